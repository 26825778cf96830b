"""The valid part of a record: each step by the last start that made it, in order."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from praxis_lite.core.errors import few
from praxis_lite.inputs.position import DataPosition
from praxis_lite.job.examples.lines import Record, Start, Stretch

__all__ = ("Part",)

_MOST_FAULTS = 50


@dataclasses.dataclass(frozen=True)
class Part:
    """The steps of a start that no later start repeated.

    Attributes:
      starts: the lines of its processes, in their order.
      first_step, last_step: of those that count.
      stretches: of its processes, those that count.
    """

    starts: Sequence[Start]
    first_step: int
    last_step: int
    stretches: Sequence[Stretch]

    @property
    def number(self) -> int:
        """The number of the start."""
        return self.starts[0].start

    @property
    def batch_size(self) -> int:
        """The rows of a global batch."""
        return self.starts[0].batch_size

    @property
    def skipped(self) -> tuple[int, ...]:
        """The indices of the batches that are left out."""
        return self.starts[0].skipped

    def rows_of(self, process: int) -> tuple[tuple[int, int], ...]:
        """Returns the ranges of rows that a process feeds."""
        return next(item.rows for item in self.starts if item.process == process)

    def batch_of(self, step: int) -> int:
        """Returns the index of the batch that a step has, in order."""
        return DataPosition.of_step(step - 1, self.skipped).next_batch


@dataclasses.dataclass(frozen=True)
class History:
    """The lines of a record that count, and its faults.

    Attributes:
      parts: in the order of their steps.
      faults: sentences; none: each row of each batch was fed by a single process, in order.
      notes: sentences on what is no fault.
      starts: how many there were.
      num_launches: of the job.
      num_lost_steps: how many recorded steps were repeated later.
    """

    parts: Sequence[Part]
    faults: Sequence[str]
    notes: Sequence[str]
    starts: int
    num_launches: int
    num_lost_steps: int

    @property
    def first_step(self) -> int:
        """The first step on record; 0 if there is none."""
        return self.parts[0].first_step if self.parts else 0

    @property
    def last_step(self) -> int:
        """The last step that counts; 0 if there is none."""
        return self.parts[-1].last_step if self.parts else 0

    @property
    def skipped(self) -> tuple[int, ...]:
        """The batches that were left out before the last step's batch."""
        if not self.parts:
            return ()
        last = self.parts[-1]
        return tuple(item for item in last.skipped if item < last.batch_of(last.last_step))

    @property
    def num_rows(self) -> int:
        """The rows of all batches."""
        return sum(
            (part.last_step - part.first_step + 1) * part.batch_size for part in self.parts
        )

    @property
    def digest(self) -> str:
        """The sum of all recorded digests modulo 2^64, in hex."""
        stretches = (item for part in self.parts for item in part.stretches)
        return f"{sum(int(item.digest, 16) for item in stretches) % 2**64:016x}"


def history_of(record: Record, saved_step: int | None) -> History:
    """Returns the lines of a record that count.

    Args:
      saved_step: of the newest checkpoint, from which the job would resume; None: there is none.
    """
    groups = {
        number: list(group)
        for number, group in itertools.groupby(record.starts, lambda item: item.start)
    }
    stretches: dict[int, list[Stretch]] = {number: [] for number in groups}
    for item in record.stretches:
        stretches.setdefault(item.start, []).append(item)
    ends = {
        number: max((item.steps[1] for item in stretches[number]), default=starts[0].step)
        for number, starts in groups.items()
    }
    faults, notes = [], []
    if missing := [item for item in range(1, 1 + record.last_start) if item not in groups]:
        faults.append(f"the record has no line of start {few([str(item) for item in missing], 8)}")
    newest = ends[max(ends)] if ends else 0
    if saved_step is None:
        notes.append("there is no checkpoint: that the steps on record were saved is not known")
    elif newest > saved_step:
        notes.append(f"steps {saved_step + 1} to {newest} are on record, but not saved")
    parts = [
        _part(groups[number], stretches[number], last_step, faults)
        for number, last_step in _chain(groups, ends, newest if saved_step is None else saved_step)
    ]
    _check_order(parts, saved_step or 0, faults)
    if parts and parts[0].starts[0].is_new and parts[0].first_step > 1:
        notes.append(
            f"the job began with a state of step {parts[0].first_step - 1}: what that was made of "
            "is not on record"
        )
    if record.num_unreadable:
        notes.append(
            f"{record.num_unreadable} lines of the record cannot be read: cut short by a kill, or "
            "damaged"
        )
    num_made = sum(ends[number] - starts[0].step for number, starts in groups.items())
    num_counted = sum(part.last_step - part.first_step + 1 for part in parts)
    return History(
        parts, faults[:_MOST_FAULTS], notes, len(groups),
        len({starts[0].launch for starts in groups.values()}), max(0, num_made - num_counted),
    )


def _chain(
    groups: Mapping[int, Sequence[Start]], ends: Mapping[int, int], step: int
) -> list[tuple[int, int]]:
    """Returns the starts that made the steps up to `step` last, and the last valid step of each.

    A start resumed from the state that the newest earlier start had after the same step.
    """
    chain, number = [], max(groups, default=0) + 1
    while step > 0:
        before = [item for item in groups if item < number and groups[item][0].step < step]
        if not before:
            break
        # A start without a line of that step leaves a gap, which `_check_order` reports.
        number = max([item for item in before if ends[item] >= step] or before)
        chain.append((number, min(step, ends[number])))
        if (first := groups[number][0]).is_new:
            break
        step = first.step
    return chain[::-1]


def _part(
    starts: Sequence[Start], stretches: Sequence[Stretch], limit: int, faults: list[str]
) -> Part:
    first = starts[0]
    part = Part(
        starts, first.step + 1, limit, [item for item in stretches if item.steps[1] <= limit]
    )
    where = f"start {part.number}"
    for item in starts[1:]:
        for name in ("step", "num_processes", "batch_size", "skipped", "data", "versions"):
            values = getattr(first, name), getattr(item, name)
            if values[0] != values[1]:
                faults.append(
                    f"{where}: process {first.process} says {name} {values[0]}, process "
                    f"{item.process} says {values[1]}"
                )
    processes = [item.process for item in starts]
    if processes != list(range(first.num_processes)):
        faults.append(
            f"{where} has lines of the processes {processes}, and had {first.num_processes}"
        )
    faults += [f"{where}: {fault}" for fault in _faults_of_rows(starts)]
    for item in starts:
        own = [stretch for stretch in stretches if stretch.process == item.process]
        faults += [f"{where}, process {item.process}: {it}" for it in _faults_of_steps(part, own)]
    return part


def _faults_of_rows(starts: Sequence[Start]) -> Iterator[str]:
    """Yields sentences on rows of a batch that several processes fed, or none."""
    end = 0
    for first, last, process in sorted(
        (first, last, item.process) for item in starts for first, last in item.rows
    ):
        if first > end:
            yield f"rows {end} to {first - 1} of each batch were fed by no process"
        if first < end:
            yield f"rows {first} to {min(end, last) - 1} were fed twice, also by process {process}"
        end = max(end, last)
    if end < starts[0].batch_size:
        yield f"rows {end} to {starts[0].batch_size - 1} of each batch were fed by no process"


def _faults_of_steps(part: Part, stretches: Sequence[Stretch]) -> Iterator[str]:
    """Yields sentences on the steps of a process that are not each on record once, in order."""
    end = part.first_step - 1
    for item in stretches:
        first, last = item.steps
        if first > part.last_step:
            break
        if first > end + 1:
            yield f"steps {end + 1} to {first - 1} are not on record"
        if first <= end:
            yield f"steps {first} to {min(end, last)} are on record twice"
        if last > part.last_step:
            yield (
                f"the run went on from step {part.last_step}, within the stretch of steps "
                f"{first} to {last}"
            )
        expected = part.batch_of(first), part.batch_of(last)
        if item.batches != expected:
            yield (
                f"steps {first} to {last} were fed the batches {item.batches[0]} to "
                f"{item.batches[1]}; in order they are {expected[0]} to {expected[1]}"
            )
        left_out = tuple(k for k in part.skipped if expected[0] < k < expected[1])
        if item.skipped != left_out:
            yield (
                f"steps {first} to {last} left out the batches {list(item.skipped)}; the start "
                f"says {list(left_out)}"
            )
        end = max(end, last)
    if end < part.last_step:
        yield f"steps {end + 1} to {part.last_step} are not on record"


def _check_order(parts: Sequence[Part], saved_step: int, faults: list[str]) -> None:
    """Adds sentences on steps between the parts, and on batches that came twice or never."""
    last = parts[-1].last_step if parts else 0
    if last < saved_step:
        faults.append(
            f"steps {last + 1} to {saved_step}, which is saved, are not on record"
        )
    if not parts:
        return
    first = parts[0].starts[0]
    if first.step and not first.is_new:
        faults.append(f"steps 1 to {first.step} are not on record")
    for before, part in itertools.pairwise(parts):
        if part.first_step != before.last_step + 1:
            faults.append(
                f"steps {before.last_step + 1} to {part.first_step - 1} are not on record: start "
                f"{part.number} went on from step {part.first_step - 1}"
            )
        next_batch = before.batch_of(before.last_step) + 1
        expected = [item for item in before.skipped if item < next_batch]
        actual = [item for item in part.skipped if item < next_batch]
        if actual != expected:
            faults.append(
                f"start {part.number} left out the batches {actual} before batch {next_batch}; "
                f"the steps before it left out {expected}"
            )
