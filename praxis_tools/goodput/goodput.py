"""Computes a job's goodput: the fraction of wall time spent in training steps that were kept."""

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

# Time categories that are only known after the end of a launch.
LOST_STEP = "lost step"  # Steps not saved before a failure, which had to be recomputed.
REGROUPING = "regrouping"  # An elastic job regroups after processes leave or join.
IDLE = "idle"  # Time between launches, including the unrecorded end of a killed launch.
KINDS = (
    IMPORT,
    INIT,
    COMPILE,
    RESTORE,
    INPUT_WAIT,
    STEP,
    LOST_STEP,
    EVALUATION,
    SAVE,
    REGROUPING,
    IDLE,
)
# If a job has a single launch that is shorter than this, seconds are reported instead of goodput.
_MIN_SECONDS_FOR_GOODPUT = 600


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of a job, from its start to its end.

    Attributes:
      began: Start in Unix seconds.
      ended: End in Unix seconds; for a killed launch, the last recorded moment.
      first_step: Step that training started from, or None if the launch ended before training
        started.
      last_step: Last completed step, or None.
      ended_by: `THE_END`, the name of a signal or exception, or None if the launch was killed or is
        still running.
      num_lost_steps: Number of steps in this launch that a later launch recomputed.
      seconds: Seconds in each category; they add up to `ended - began`.
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
    """The time breakdown of a job, from the start of the first launch to the end of the last.

    Attributes:
      launches: The launches in chronological order.
      seconds: Seconds in each category, in the order of `KINDS`. Time between launches is counted
        as `REGROUPING` while an elastic job regroups, and as `IDLE` otherwise.
      total_seconds: Sum over all categories.
    """

    launches: tuple[Launch, ...]
    seconds: Mapping[str, float]
    total_seconds: float

    @property
    def share(self) -> float:
        """Fraction of the time spent in steps that were not lost; 0 if no time has passed."""
        return self._share(self.seconds[STEP])

    @property
    def num_lost_steps(self) -> int:
        """Number of steps that were lost and recomputed."""
        return sum(launch.num_lost_steps for launch in self.launches)

    def line(self) -> str:
        """Returns a one-line summary with the goodput and the three largest other categories.

        For a single launch shorter than `_MIN_SECONDS_FOR_GOODPUT`, the line shows seconds instead
        of percentages, because startup dominates a short run.
        """
        others = sorted(
            ((value, kind) for kind, value in self.seconds.items() if kind != STEP), reverse=True
        )
        if len(self.launches) == 1 and self.total_seconds < _MIN_SECONDS_FOR_GOODPUT:
            parts = [f"{kind} {value:,.0f} s" for value, kind in others[:3] if value >= 0.5]
            steps = f"steps took {self.seconds[STEP]:,.0f} of {self.total_seconds:,.0f} s"
            rest = f"; {', '.join(parts)}" if parts else ""
            return f"{steps}{rest} (startup dominates a short run)"
        rest = ", ".join(
            f"{kind} {self._share(value):.1%}"
            for value, kind in others[:3]
            if self._share(value) >= 0.001
        )
        count = len(self.launches)
        over = f"{self.total_seconds:,.0f} s in {count} launch{'es' * (count > 1)}"
        return f"goodput {self.share:.1%} of {over}" + (f"; {rest}" if rest else "")

    def __str__(self) -> str:
        """Returns a table of the time in each category and a table of the launches."""
        rows: list[tuple[str, ...]] = [("kind", "seconds", "share")]
        for kind, value in self.seconds.items():
            rows.append((kind, f"{value:,.1f}", f"{self._share(value):.1%}"))
        rows.append(("all", f"{self.total_seconds:,.1f}", "100.0%"))
        lines = [*table_lines(rows, right=(1, 2)), f"goodput: {self.share:.1%}, the steps' share"]
        if lost := self.num_lost_steps:
            lines[-1] += f"; {lost:,} step{'s' * (lost > 1)} recomputed"
        rows = [("launch", "seconds", "steps", "lost", "goodput", "ended by")]
        for launch in self.launches:
            seconds = launch.ended - launch.began
            steps = "none"
            first, last = launch.first_step, launch.last_step
            if first is not None and last is not None and last > first:
                steps = f"{first + 1} to {last}"
            rows.append(
                (
                    time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(launch.began)),
                    f"{seconds:,.1f}",
                    steps,
                    f"{launch.num_lost_steps}",
                    f"{launch.seconds[STEP] / seconds if seconds else 0.0:.1%}",
                    launch.ended_by or "unknown: killed or running",
                )
            )
        return "\n".join([*lines, "", *table_lines(rows, right=(1, 3, 4))])

    def _share(self, seconds: float) -> float:
        return seconds / self.total_seconds if self.total_seconds else 0.0


def goodput_of(job_dir: JobDir) -> Goodput | None:
    """Computes the goodput of a job from timeline.jsonl; returns None if nothing was recorded.

    A launch starts when it locks the job directory. Launches that were refused before that, or
    that found nothing to do, are not recorded, so their time is counted as idle. Only `praxis
    train` records launches.

    If a launch began before the previous launch ended, the overlap is subtracted from the import
    time of the later launch. An overlap longer than the import time means that a clock was set
    back; the gap between the two launches is then counted as zero.

    Raises:
      ConfigError: timeline.jsonl cannot be read.
    """
    if not job_dir.timeline_jsonl.exists():
        return None
    spans = _with_unrecorded_steps(read_spans(job_dir.timeline_jsonl))
    pairs = zip(spans, _lost_steps(spans), strict=True)
    launches: list[Launch] = []
    for began, group in itertools.groupby(pairs, lambda pair: pair[0].launch):
        previous_end = launches[-1].ended if launches else None
        launches.append(_launch(began, list(group), previous_end))
    if not launches:
        return None
    seconds = {kind: sum(launch.seconds.get(kind, 0.0) for launch in launches) for kind in KINDS}
    # Between launches, an elastic job regroups, and other jobs are idle.
    gaps = [
        (before.ended, after.began)
        for before, after in itertools.pairwise(launches)
        if after.began > before.ended
    ]
    generations = read_generation_records(job_dir.elastic_jsonl)
    seconds[REGROUPING] = sum(_regrouping_seconds(gap, generations) for gap in gaps)
    seconds[IDLE] = sum(end - begin for begin, end in gaps) - seconds[REGROUPING]
    return Goodput(tuple(launches), seconds, sum(seconds.values()))


def note_goodput(job_dir: JobDir, note: Callable[[str], None]) -> None:
    """Logs the job's goodput so far, or why it is unknown. Only the first process logs this."""
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
    """Returns how many steps of a job were recomputed, according to timeline.jsonl."""
    goodput = goodput_of(job_dir)
    return goodput.num_lost_steps if goodput else 0


def time_section(job_dir: JobDir) -> str:
    """Returns the goodput section of a job's summary, or "" if nothing was recorded."""
    if (goodput := goodput_of(job_dir)) is None:
        return ""
    return "Where the time went\n" + textwrap.indent(str(goodput), "  ")


def _regrouping_seconds(gap: tuple[float, float], generations: Sequence[GenerationRecord]) -> float:
    """Returns the seconds of a gap between launches in which an elastic job regrouped.

    The time from the start of the gap until the first step of the new generation is counted,
    because regrouping begins with the shutdown of the previous generation. If the gap contains a
    new start of the entire job, the time is only counted from this start.
    """
    seconds, counted_until = 0.0, gap[0]
    intervals = sorted(
        (record.time if record.kind == START else gap[0], record.time + record.total)
        for record in generations
        if record.time < gap[1]
    )
    for begin, end in intervals:
        begin, end = max(begin, counted_until), min(end, gap[1])
        if end > begin:
            seconds, counted_until = seconds + end - begin, end
    return seconds


def _launch(
    began: float, spans_with_losses: Sequence[tuple[Span, "_Lost"]], previous_end: float | None
) -> Launch:
    """Combines the spans of one launch."""
    kinds = [kind for kind in KINDS if kind not in (REGROUPING, IDLE)]
    seconds = {
        kind: sum(span.seconds.get(kind, 0.0) for span, _ in spans_with_losses) for kind in kinds
    }
    # Time in steps that a later launch recomputed is lost.
    seconds[LOST_STEP] = sum(span.seconds[STEP] * lost.share for span, lost in spans_with_losses)
    seconds[STEP] = max(0.0, seconds[STEP] - seconds[LOST_STEP])
    if previous_end is not None and 0 < previous_end - began <= seconds[IMPORT]:
        seconds[IMPORT] -= previous_end - began
        began = previous_end
    with_steps = [span for span, _ in spans_with_losses if span.first_step is not None]
    last_span, _ = spans_with_losses[-1]
    return Launch(
        began,
        began + sum(seconds.values()),
        with_steps[0].first_step if with_steps else None,
        with_steps[-1].last_step if with_steps else None,
        last_span.ended_by,
        sum(lost.num_steps for _, lost in spans_with_losses),
        seconds,
    )


def _with_unrecorded_steps(spans: Sequence[Span]) -> list[Span]:
    """Adds the last steps of killed launches, which timeline.jsonl does not contain.

    The timeline is written every second, and metrics.jsonl after every step.
    """
    extended: list[Span] = []
    latest = None  # Index of the latest span with steps.
    for span in spans:
        if span.lost_to is not None and latest is not None:
            last_step = max(extended[latest].last_step or 0, span.lost_to)
            extended[latest] = dataclasses.replace(extended[latest], last_step=last_step)
        if span.first_step is not None:
            latest = len(extended)
        extended.append(span)
    return extended


@dataclasses.dataclass
class _Lost:
    """The steps of one span that a later span recomputed.

    Attributes:
      num_steps: Number of recomputed steps.
      share: Fraction of the span's step time that was spent in these steps.
    """

    num_steps: int = 0
    share: float = 0.0


def _lost_steps(spans: Sequence[Span]) -> list[_Lost]:
    """Finds the steps in each span that a later span recomputed.

    `valid` is a stack of the spans that still have valid steps, with the last valid step of each.
    If a span starts from step N and does not continue the previous span, all steps after N are
    removed from the top of the stack.
    """
    lost = [_Lost() for _ in spans]
    steps: dict[int, tuple[int, int]] = {}  # Maps a span's index to its first and last step.
    valid: list[tuple[int, int]] = []  # (span index, last valid step)
    for index, span in enumerate(spans):
        first, last = span.first_step, span.last_step
        if first is None or last is None:
            continue
        steps[index] = first, last
        previous = spans[index - 1] if index else None
        if previous is None or (previous.launch, previous.last_step) != (span.launch, first):
            while valid and valid[-1][1] >= first:
                i, end = valid.pop()
                begin, last_of_span = steps[i]
                if begin >= first:
                    # All steps are lost, together with the time spent in the incomplete step.
                    lost[i] = _Lost(lost[i].num_steps + end - begin, 1.0)
                    continue
                if end > first:
                    lost[i].num_steps += end - first
                    lost[i].share = lost[i].num_steps / (last_of_span - begin)
                valid.append((i, first))
                break
        valid.append((index, last))
    return lost
