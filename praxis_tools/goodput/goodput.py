"""Where the time of a job went, in all its launches and between them."""

import dataclasses
import itertools
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.text_table import table_lines
from praxis_lite.job import processes
from praxis_lite.job.events import (
    COMPILE,
    EVALUATION,
    IMPORT,
    INIT,
    INPUT_WAIT,
    RESTORE,
    SAVE,
    STEP,
)
from praxis_lite.job.job_dir import JobDir
from praxis_tools.elastic.generation_log import START, GenerationRecord, read_generation_records
from praxis_tools.goodput.spans import Span, read_spans

# Kinds of seconds that no launch knows of itself.
LOST_STEP = "lost step"  # Steps that were lost before a save, and repeated.
HANDS = "change of hands"  # Of an elastic job: another process is gone, leaves or comes; agreed.
IDLE = "idle"  # Between launches, and from the last sign of life of a launch that was killed.
KINDS = (
    IMPORT, INIT, COMPILE, RESTORE, INPUT_WAIT, STEP, LOST_STEP, EVALUATION, SAVE, HANDS,
    IDLE,
)
# A single launch shorter than this reports no goodput.
_FIRST_SECONDS = 600


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch of a job: a process that trained, or was about to.

    Attributes:
      began, ended: in Unix seconds. A launch that was killed ends with its last sign of life.
      first_step: the step that it started from; None: it ended before that was known.
      last_step: the newest step that it made, or None.
      ended_by: THE_END, a signal, the name of an exception; None: it was killed, or still runs.
      num_lost_steps: how many of its steps were lost and repeated.
      seconds: by kind, all that a launch can have; they add up to `ended` - `began`.
    """

    began: float
    ended: float
    first_step: int | None
    last_step: int | None
    ended_by: str | None
    num_lost_steps: int
    seconds: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Goodput:
    """The seconds of a job by kind, from its first launch to the end of its last.

    Attributes:
      launches: in their order.
      seconds: by kind, in the order of `KINDS`, those between launches as "idle", or "change of
        hands" where an elastic job was about to continue.
      total_seconds: the sum of all kinds.
    """

    launches: tuple[Launch, ...]
    seconds: Mapping[str, float]
    total_seconds: float

    @property
    def share(self) -> float:
        """The share of time of steps that were not lost; 0 if no time passed."""
        return self._share(self.seconds[STEP])

    @property
    def num_lost_steps(self) -> int:
        """The number of steps that were lost and repeated."""
        return sum(launch.num_lost_steps for launch in self.launches)

    def line(self) -> str:
        """Returns a sentence: the share of useful steps, and where the most of the rest went.

        Of a single launch of less than `_FIRST_SECONDS` it has seconds and no share, because the
        start takes most of a short run.
        """
        others = sorted(
            ((value, kind) for kind, value in self.seconds.items() if kind != STEP), reverse=True
        )
        if len(self.launches) == 1 and self.total_seconds < _FIRST_SECONDS:
            parts = [f"{kind} {value:,.0f} s" for value, kind in others[:3] if value >= 0.5]
            steps = f"steps took {self.seconds[STEP]:,.0f} of {self.total_seconds:,.0f} s"
            return f"{steps}; {', '.join(parts)} (a short run is mostly its start)"
        rest = ", ".join(
            f"{kind} {self._share(value):.1%}"
            for value, kind in others[:3] if self._share(value) >= 0.001
        )
        count = len(self.launches)
        over = f"{self.total_seconds:,.0f} s in {count} launch{'es' * (count > 1)}"
        return f"goodput {self.share:.1%} of {over}" + (f"; {rest}" if rest else "")

    def __str__(self) -> str:
        """Returns two tables: seconds and share of each kind; and the launches."""
        rows = [("kind", "seconds", "share")]
        for kind, value in self.seconds.items():
            rows.append((kind, f"{value:,.1f}", f"{self._share(value):.1%}"))
        rows.append(("all", f"{self.total_seconds:,.1f}", "100.0%"))
        lines = [*table_lines(rows, right=(1, 2)), f"goodput: {self.share:.1%}, the steps' share"]
        if lost := self.num_lost_steps:
            lines[-1] += f"; {lost:,} step{'s' * (lost > 1)} made again"
        rows = [("launch", "seconds", "steps", "lost", "goodput", "ended by")]
        for launch in self.launches:
            seconds = launch.ended - launch.began
            steps = "none"
            if launch.first_step is not None and launch.last_step > launch.first_step:
                steps = f"{launch.first_step + 1} to {launch.last_step}"
            rows.append((
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(launch.began)),
                f"{seconds:,.1f}", steps, f"{launch.num_lost_steps}",
                f"{launch.seconds[STEP] / seconds if seconds else 0.0:.1%}",
                launch.ended_by or "no word: killed, or at work",
            ))
        return "\n".join([*lines, "", *table_lines(rows, right=(1, 3, 4))])

    def _share(self, seconds: float) -> float:
        return seconds / self.total_seconds if self.total_seconds else 0.0


def goodput_of(job_dir: JobDir) -> Goodput | None:
    """Returns where the time of a job went, or None if no launch recorded it.

    Launches count from the moment that they hold the job's directory; one that was refused before
    has no entry, and its time is idle. So is the time of a launch that found nothing to do. Only
    launches that train are recorded.

    A launch that began before the previous one had ended is cut: its import is shorter by the
    overlap. If it began earlier than that a clock was set back, and no time is between the two.

    Raises:
      ConfigError: timeline.jsonl cannot be read.
    """
    if not job_dir.timeline_jsonl.exists():
        return None
    spans = _with_steps_before_a_kill(read_spans(job_dir.timeline_jsonl))
    pairs = zip(spans, _lost_shares(spans), strict=True)
    launches: list[Launch] = []
    for began, group in itertools.groupby(pairs, lambda pair: pair[0].launch):
        previous_end = launches[-1].ended if launches else None
        launches.append(_launch(began, list(group), previous_end))
    if not launches:
        return None
    seconds = {
        kind: sum(launch.seconds.get(kind, 0.0) for launch in launches) for kind in KINDS
    }
    gaps = [
        (before.ended, after.began) for before, after in itertools.pairwise(launches)
        if after.began > before.ended
    ]
    changes = read_generation_records(job_dir.elastic_jsonl)
    seconds[HANDS] = sum(_seconds_of_changes(gap, changes) for gap in gaps)
    seconds[IDLE] = sum(end - begin for begin, end in gaps) - seconds[HANDS]
    return Goodput(tuple(launches), seconds, sum(seconds.values()))


def note_goodput(job_dir: JobDir, note: Callable[[str], None]) -> None:
    """Notes where the time of the job went so far, or why that is not known."""
    if not processes.is_first():
        return
    try:
        goodput = goodput_of(job_dir)
    except ConfigError as error:
        note(f"note: {error}")
        return
    if goodput is not None:
        note(goodput.line())


def num_lost_steps(job_dir: JobDir) -> int:
    """Returns how many steps of a job were lost and repeated, as recorded in timeline.jsonl."""
    goodput = goodput_of(job_dir)
    return goodput.num_lost_steps if goodput else 0


def time_section(job_dir: JobDir) -> str:
    """Returns where the time of a job went, as a section of its summary; "" if it is not known."""
    if (goodput := goodput_of(job_dir)) is None:
        return ""
    return "Where the time went\n" + textwrap.indent(str(goodput), "  ")


def _seconds_of_changes(gap: tuple[float, float], changes: Sequence[GenerationRecord]) -> float:
    """Returns the seconds of a gap between launches that changes of hands took.

    A change takes the gap's time up to its end: before, the processes of the previous generation
    were ending. The start of a job takes time only from when it happened.
    """
    seconds, reached = 0.0, gap[0]
    intervals = sorted(
        (change.time if change.kind == START else gap[0], change.time + change.total)
        for change in changes if change.time < gap[1]
    )
    for begin, end in intervals:
        begin, end = max(begin, reached), min(end, gap[1])
        if end > begin:
            seconds, reached = seconds + end - begin, end
    return seconds


def _launch(
    began: float, parts: Sequence[tuple[Span, "_Lost"]], previous_end: float | None
) -> Launch:
    kinds = [kind for kind in KINDS if kind not in (HANDS, IDLE)]
    seconds = {
        kind: sum(span.seconds.get(kind, 0.0) for span, _ in parts) for kind in kinds
    }
    seconds[LOST_STEP] = sum(span.seconds[STEP] * lost.share for span, lost in parts)
    seconds[STEP] = max(0.0, seconds[STEP] - seconds[LOST_STEP])
    if previous_end is not None and 0 < previous_end - began <= seconds[IMPORT]:
        seconds[IMPORT] -= previous_end - began
        began = previous_end
    with_steps = [span for span, _ in parts if span.first_step is not None]
    return Launch(
        began, began + sum(seconds.values()),
        with_steps[0].first_step if with_steps else None,
        with_steps[-1].last_step if with_steps else None,
        parts[-1][0].ended_by, sum(lost.num_steps for _, lost in parts), seconds,
    )


def _with_steps_before_a_kill(spans: Sequence[Span]) -> list[Span]:
    """Returns spans with the steps that a later launch found, of the last second before a kill."""
    result: list[Span] = []
    newest = None  # The index of the newest span with steps.
    for span in spans:
        if span.lost_to is not None and newest is not None:
            last_step = max(result[newest].last_step, span.lost_to)
            result[newest] = dataclasses.replace(result[newest], last_step=last_step)
        if span.first_step is not None:
            newest = len(result)
        result.append(span)
    return result


@dataclasses.dataclass
class _Lost:
    """The steps of a span that were lost and repeated, and their share of its seconds of steps."""

    num_steps: int = 0
    share: float = 0.0


def _lost_shares(spans: Sequence[Span]) -> list[_Lost]:
    """Returns the loss of each span: its steps that a later span repeated."""
    lost = [_Lost() for _ in spans]
    ends: list[tuple[int, int]] = []  # The index and the last kept step of each span with any.
    for index, span in enumerate(spans):
        first = span.first_step
        if first is None:
            continue
        previous = spans[index - 1] if index else None
        is_same = previous is not None and previous.launch == span.launch
        if not (is_same and previous.last_step == first):
            while ends and ends[-1][1] >= first:
                before, end = ends.pop()
                begin = spans[before].first_step
                if begin >= first:  # With the step in which it was killed.
                    lost[before] = _Lost(lost[before].num_steps + end - begin, 1.0)
                    continue
                if end > first:
                    lost[before].num_steps += end - first
                    lost[before].share = lost[before].num_steps / (
                        spans[before].last_step - begin
                    )
                ends.append((before, first))
                break
        ends.append((index, span.last_step))
    return lost
