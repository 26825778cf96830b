"""Where the time of a job went: all its launches, and what lay between them."""

import dataclasses
import itertools
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence

from praxis_lite.core.errors import ConfigError
from praxis_lite.run.events import (
    COMPILE,
    EVALUATION,
    IMPORT,
    INIT,
    INPUT_WAIT,
    RESTORE,
    SAVE,
    STEP,
)
from praxis_lite.run.goodput.stretches import Stretch, read_stretches
from praxis_lite.run.job import processes
from praxis_lite.run.job.elastic.changes import START, changes_of_hands
from praxis_lite.run.job.job_dir import JobDir
from praxis_lite.run.text_table import table_lines

# Kinds of seconds that no launch knows of itself.
LOST_STEP = "lost step"  # Steps that were made, not saved, and made again later.
HANDS = "change of hands"  # Of an elastic job: another process is gone, leaves or comes; agreed.
IDLE = "idle"  # Between launches, and from the last sign of life of a launch that was killed.
KINDS = (
    IMPORT, INIT, COMPILE, RESTORE, INPUT_WAIT, STEP, LOST_STEP, EVALUATION, SAVE, HANDS,
    IDLE,
)
# The goodput of a first launch is reported from so many seconds on.
_FIRST_SECONDS = 600


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch of a job: a process that trained, or was about to.

    Attributes:
      began, ended: in Unix seconds. A launch that was killed ends with its last sign of life.
      first_step: the step that it went on from; None: it ended before that was known.
      last_step: the newest step that it made, or None.
      ended_by: THE_END, a signal, the name of an exception; None: it was killed, or still runs.
      num_lost_steps: how many of its steps were made again later.
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
        hands" where an elastic job was about to go on.
      total_seconds: the sum of all kinds.
    """

    launches: tuple[Launch, ...]
    seconds: Mapping[str, float]
    total_seconds: float

    @property
    def share(self) -> float:
        """The share of the time in which steps were made that count; 0 if no time passed."""
        return self._share(self.seconds[STEP])

    @property
    def num_lost_steps(self) -> int:
        """The number of steps that were made again later."""
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
    """Returns where the time of a job went, or None if no launch has left a word.

    Launches count from the moment that they hold the job's directory; one that was refused before
    has no entry, and its time is idle. So is the time of a launch that found nothing to do. Only
    launches that train are there.

    Raises:
      ConfigError: timeline.jsonl cannot be read.
    """
    if not job_dir.timeline_jsonl.exists():
        return None
    changes = changes_of_hands(job_dir.elastic_jsonl)
    # What another generation ended for has no idle time before it: its processes were ending.
    hands = [
        (change.time if change.kind == START else 0.0, change.time, change.time + change.total)
        for change in changes
    ]
    return goodput(read_stretches(job_dir.timeline_jsonl), hands)


def say_goodput(job_dir: JobDir, note: Callable[[str], None]) -> None:
    """Notes where the time of the job went so far, or why that is not known."""
    if not processes.is_first():
        return
    try:
        actual = goodput_of(job_dir)
    except ConfigError as error:
        note(f"note: {error}")
        return
    if actual is not None:
        note(actual.line())


def num_lost_steps(job_dir: JobDir) -> int:
    """Returns how many steps of a job were made again later, as far as timeline.jsonl knows."""
    actual = goodput_of(job_dir)
    return actual.num_lost_steps if actual else 0


def time_section(job_dir: JobDir) -> str:
    """Returns where the time of a job went, as a section of its summary; "" if it is not known."""
    if (actual := goodput_of(job_dir)) is None:
        return ""
    return "Where the time went\n" + textwrap.indent(str(actual), "  ")


def goodput(
    stretches: Sequence[Stretch], hands: Sequence[tuple[float, float, float]] = ()
) -> Goodput | None:
    """Returns where the time went by all stretches of a job, in their order; None if by none.

    A launch that began before the one before it had ended is cut: its import is shorter by the
    time that both were there. If it began before by more than that, a clock was set back, and no
    time lies between the two.

    Args:
      hands: of each change of hands, in Unix seconds: since when the time between launches is its
        own, when it happened, and when it ended. What a launch did meanwhile has its own kind.
    """
    stretches = _with_steps_after_the_last_sign(stretches)
    lost = _lost_shares(stretches)
    launches: list[Launch] = []
    for began, group in itertools.groupby(zip(stretches, lost, strict=True), lambda x: x[0].launch):
        parts = list(group)
        before = launches[-1].ended if launches else None
        launches.append(_launch(began, parts, before))
    if not launches:
        return None
    seconds = {
        kind: sum(launch.seconds.get(kind, 0.0) for launch in launches) for kind in KINDS
    }
    gaps = [
        (before.ended, after.began) for before, after in itertools.pairwise(launches)
        if after.began > before.ended
    ]
    seconds[HANDS] = sum(_covered(gap, hands) for gap in gaps)
    seconds[IDLE] = sum(end - begin for begin, end in gaps) - seconds[HANDS]
    return Goodput(tuple(launches), seconds, sum(seconds.values()))


def _covered(
    gap: tuple[float, float], hands: Sequence[tuple[float, float, float]]
) -> float:
    """Returns the seconds of a gap between launches that changes of hands took."""
    seconds, reached = 0.0, gap[0]
    within = sorted(
        (since, end) for since, event, end in hands if event < gap[1] and end > gap[0]
    )
    for since, end in within:
        begin, end = max(since, reached), min(end, gap[1])
        if end > begin:
            seconds, reached = seconds + end - begin, end
    return seconds


def _launch(
    began: float, parts: Sequence[tuple[Stretch, "_Lost"]], before: float | None
) -> Launch:
    kinds = [kind for kind in KINDS if kind not in (HANDS, IDLE)]
    seconds = {
        kind: sum(part.seconds.get(kind, 0.0) for part, _ in parts) for kind in kinds
    }
    seconds[LOST_STEP] = sum(part.seconds[STEP] * lost.share for part, lost in parts)
    seconds[STEP] = max(0.0, seconds[STEP] - seconds[LOST_STEP])
    if before is not None and 0 < before - began <= seconds[IMPORT]:
        seconds[IMPORT] -= before - began
        began = before
    steps = [part for part, _ in parts if part.first_step is not None]
    return Launch(
        began, began + sum(seconds.values()),
        steps[0].first_step if steps else None, steps[-1].last_step if steps else None,
        parts[-1][0].ended_by, sum(lost.num_steps for _, lost in parts), seconds,
    )


def _with_steps_after_the_last_sign(stretches: Sequence[Stretch]) -> list[Stretch]:
    """Returns stretches with the steps that a later launch found, in the second before a kill."""
    result: list[Stretch] = []
    newest = None  # The index of the newest stretch with steps.
    for stretch in stretches:
        if stretch.lost_to is not None and newest is not None:
            last_step = max(result[newest].last_step, stretch.lost_to)
            result[newest] = dataclasses.replace(result[newest], last_step=last_step)
        if stretch.first_step is not None:
            newest = len(result)
        result.append(stretch)
    return result


@dataclasses.dataclass
class _Lost:
    """The steps of a stretch that were made again, and their share of its seconds of steps."""

    num_steps: int = 0
    share: float = 0.0


def _lost_shares(stretches: Sequence[Stretch]) -> list[_Lost]:
    """Returns the loss of each stretch: its steps that a later stretch made again."""
    lost = [_Lost() for _ in stretches]
    ends: list[tuple[int, int]] = []  # Stretches that count, and the last step that counts of each.
    for index, stretch in enumerate(stretches):
        first = stretch.first_step
        if first is None:
            continue
        former = stretches[index - 1] if index else None
        is_same = former is not None and former.launch == stretch.launch
        if not (is_same and former.last_step == first):
            while ends and ends[-1][1] >= first:
                before, end = ends.pop()
                begin = stretches[before].first_step
                if begin >= first:  # With the step that it was in when it was killed.
                    lost[before] = _Lost(lost[before].num_steps + end - begin, 1.0)
                    continue
                if end > first:
                    lost[before].num_steps += end - first
                    lost[before].share = lost[before].num_steps / (
                        stretches[before].last_step - begin
                    )
                ends.append((before, first))
                break
        ends.append((index, stretch.last_step))
    return lost
