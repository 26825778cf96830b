"""Reconstructs from a job's record which rows were used in the final computation of each step."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from praxis_lite.core.errors import first_few
from praxis_lite.inputs.position import DataPosition
from praxis_lite.job.examples.lines import Record, RowSpan, Start

__all__ = ("Segment",)

_MAX_FAULTS = 50


@dataclasses.dataclass(frozen=True)
class Segment:
    """The steps that were trained after one start and not recomputed after a later start.

    Attributes:
      starts: The `Start` line of each process, sorted by process.
      first_step: First step of the segment.
      last_step: Last step of the segment.
      spans: The spans of rows that the processes fed in these steps.
    """

    starts: Sequence[Start]
    first_step: int
    last_step: int
    spans: Sequence[RowSpan]

    @property
    def number(self) -> int:
        """Number of the segment's start."""
        return self.starts[0].start

    @property
    def batch_size(self) -> int:
        """The pipeline's batch size."""
        return self.starts[0].batch_size

    @property
    def skipped(self) -> tuple[int, ...]:
        """Indices of skipped batches."""
        return self.starts[0].skipped

    def rows_of(self, process: int) -> tuple[tuple[int, int], ...]:
        """Returns the (start, end) ranges of rows that a process feeds."""
        return next(start.rows for start in self.starts if start.process == process)

    def batch_of(self, step: int) -> int:
        """Returns the index of a step's batch."""
        return DataPosition.of_step(step - 1, self.skipped).next_batch


@dataclasses.dataclass(frozen=True)
class History:
    """The valid history of a job, and the errors in its record.

    Attributes:
      segments: The segments, sorted by step.
      faults: Error messages. If there are none, every row of every batch was fed exactly once and
        in order.
      notes: Messages about other observations.
      num_starts: Number of starts in the record.
      num_launches: Number of launches of the job.
      num_lost_steps: Number of recorded steps that were recomputed later.
    """

    segments: Sequence[Segment]
    faults: Sequence[str]
    notes: Sequence[str]
    num_starts: int
    num_launches: int
    num_lost_steps: int

    @property
    def first_step(self) -> int:
        """First step of the history, or 0 if it is empty."""
        return self.segments[0].first_step if self.segments else 0

    @property
    def last_step(self) -> int:
        """Last step of the history, or 0 if it is empty."""
        return self.segments[-1].last_step if self.segments else 0

    @property
    def skipped(self) -> tuple[int, ...]:
        """Indices of the batches that were skipped before the last step's batch."""
        if not self.segments:
            return ()
        last = self.segments[-1]
        return tuple(index for index in last.skipped if index < last.batch_of(last.last_step))

    @property
    def digest(self) -> str:
        """Sum of all recorded digests modulo 2^64, in hex."""
        spans = (span for segment in self.segments for span in segment.spans)
        return f"{sum(int(span.digest, 16) for span in spans) % 2**64:016x}"


def history_of(record: Record, saved_step: int | None) -> History:
    """Extracts the valid history from a record, and checks it.

    Args:
      record: All lines of the job's record.
      saved_step: Step of the latest checkpoint, from which the job would resume, or None if there
        is no checkpoint.
    """
    # The lines of each start, one per process.
    groups = {
        number: list(group)
        for number, group in itertools.groupby(record.starts, lambda start: start.start)
    }
    spans: dict[int, list[RowSpan]] = {number: [] for number in groups}
    for span in record.spans:
        spans.setdefault(span.start, []).append(span)
    # The last step that each start recorded, or the step that it resumed from.
    ends = {
        number: max((span.steps[1] for span in spans[number]), default=starts[0].step)
        for number, starts in groups.items()
    }
    faults, notes = [], []
    if missing := [number for number in range(1, 1 + record.last_start) if number not in groups]:
        faults.append(f"the record has no line for start {first_few([str(n) for n in missing], 8)}")
    last_recorded = ends[max(ends)] if ends else 0
    if saved_step is None:
        notes.append("there is no checkpoint, so it is not known whether the steps were saved")
    elif last_recorded > saved_step:
        notes.append(f"steps {saved_step + 1} to {last_recorded} are on record, but not saved")
    # Only the steps that were not recomputed after a later start belong to a segment.
    segments = [
        _segment(groups[number], spans[number], last_step, faults)
        for number, last_step in _chain(
            groups, ends, last_recorded if saved_step is None else saved_step
        )
    ]
    _check_order(segments, saved_step or 0, faults)
    if segments and segments[0].starts[0].is_new and segments[0].first_step > 1:
        notes.append(
            f"the job started from the state of step {segments[0].first_step - 1}; the data used "
            "before that step is not on record"
        )
    if record.num_unreadable:
        notes.append(
            f"{record.num_unreadable} lines of the record cannot be read: they are incomplete, "
            "because a process was killed, or damaged"
        )
    # Steps that a start computed, but that are not in the history, were lost.
    num_computed = sum(ends[number] - starts[0].step for number, starts in groups.items())
    num_valid = sum(segment.last_step - segment.first_step + 1 for segment in segments)
    return History(
        segments,
        faults[:_MAX_FAULTS],
        notes,
        len(groups),
        len({starts[0].launch for starts in groups.values()}),
        max(0, num_computed - num_valid),
    )


def _chain(
    groups: Mapping[int, Sequence[Start]], ends: Mapping[int, int], step: int
) -> list[tuple[int, int]]:
    """Returns (start number, last valid step) for the starts that led to the state at `step`.

    The chain is followed backwards. The state from which a start resumed was reached in the latest
    earlier start whose record contains the state's step.
    """
    chain, number = [], max(groups, default=0) + 1
    while step > 0:
        earlier = [other for other in groups if other < number and groups[other][0].step < step]
        if not earlier:
            break
        # If no start recorded this step, there is a gap, which `_check_order` reports.
        number = max([other for other in earlier if ends[other] >= step] or earlier)
        chain.append((number, min(step, ends[number])))
        if (first := groups[number][0]).is_new:
            break
        step = first.step
    return chain[::-1]


def _segment(
    starts: Sequence[Start], spans: Sequence[RowSpan], last_step: int, faults: list[str]
) -> Segment:
    """Returns a start's segment up to `last_step`, and appends errors in its lines to `faults`."""
    first = starts[0]
    segment = Segment(
        starts, first.step + 1, last_step, [span for span in spans if span.steps[1] <= last_step]
    )
    where = f"start {segment.number}"
    for start in starts[1:]:
        for name in ("step", "num_processes", "batch_size", "skipped", "data", "versions"):
            values = getattr(first, name), getattr(start, name)
            if values[0] != values[1]:
                faults.append(
                    f"{where}: {name} is {values[0]} in process {first.process} and {values[1]} in "
                    f"process {start.process}"
                )
    # Each process must have written exactly one line.
    processes = [start.process for start in starts]
    if processes != list(range(first.num_processes)):
        faults.append(
            f"{where} has lines of the processes {processes}, but had {first.num_processes} "
            "processes"
        )
    faults += [f"{where}: {fault}" for fault in _row_faults(starts)]
    for start in starts:
        own_spans = [span for span in spans if span.process == start.process]
        faults += [
            f"{where}, process {start.process}: {fault}"
            for fault in _step_faults(segment, own_spans)
        ]
    return segment


def _row_faults(starts: Sequence[Start]) -> Iterator[str]:
    """Yields a message for each range of rows that was not fed by exactly one process."""
    end = 0
    for first, last, process in sorted(
        (first, last, start.process) for start in starts for first, last in start.rows
    ):
        if first > end:
            yield f"rows {end} to {first - 1} of each batch were not fed by any process"
        if first < end:
            yield f"rows {first} to {min(end, last) - 1} were fed twice, also by process {process}"
        end = max(end, last)
    if end < starts[0].batch_size:
        last_row = starts[0].batch_size - 1
        yield f"rows {end} to {last_row} of each batch were not fed by any process"


def _step_faults(segment: Segment, spans: Sequence[RowSpan]) -> Iterator[str]:
    """Yields a message for each range of steps that is not recorded exactly once and in order."""
    # The invariant is that all steps up to `end` are on record.
    end = segment.first_step - 1
    for span in spans:
        first, last = span.steps
        if first > segment.last_step:
            break
        if first > end + 1:
            yield f"steps {end + 1} to {first - 1} are not on record"
        if first <= end:
            yield f"steps {first} to {min(end, last)} are on record twice"
        if last > segment.last_step:
            yield (
                f"the run resumed from step {segment.last_step}, inside the span of steps {first} "
                f"to {last}"
            )
        expected = segment.batch_of(first), segment.batch_of(last)
        if span.batches != expected:
            yield (
                f"steps {first} to {last} were fed the batches {span.batches[0]} to "
                f"{span.batches[1]}; expected {expected[0]} to {expected[1]}"
            )
        # The first and last batch of a span were fed, so only batches between them can be skipped.
        skipped = tuple(k for k in segment.skipped if expected[0] < k < expected[1])
        if span.skipped != skipped:
            yield (
                f"steps {first} to {last} skipped the batches {list(span.skipped)}; expected "
                f"{list(skipped)}, as recorded at the start"
            )
        end = max(end, last)
    if end < segment.last_step:
        yield f"steps {end + 1} to {segment.last_step} are not on record"


def _check_order(segments: Sequence[Segment], saved_step: int, faults: list[str]) -> None:
    """Appends errors between segments to `faults`: missing steps, skipped or repeated batches."""
    last = segments[-1].last_step if segments else 0
    if last < saved_step:
        faults.append(
            f"steps {last + 1} to {saved_step} are not on record, but step {saved_step} is saved"
        )
    if not segments:
        return
    first = segments[0].starts[0]
    if first.step and not first.is_new:
        faults.append(f"steps 1 to {first.step} are not on record")
    for previous, segment in itertools.pairwise(segments):
        if segment.first_step != previous.last_step + 1:
            faults.append(
                f"steps {previous.last_step + 1} to {segment.first_step - 1} are not on record: "
                f"start {segment.number} resumed from step {segment.first_step - 1}"
            )
        # Before the batch at which they meet, both segments must have skipped the same batches.
        next_batch = previous.batch_of(previous.last_step) + 1
        expected = [index for index in previous.skipped if index < next_batch]
        actual = [index for index in segment.skipped if index < next_batch]
        if actual != expected:
            faults.append(
                f"start {segment.number} skipped the batches {actual} before batch {next_batch}; "
                f"the previous start skipped {expected}"
            )
