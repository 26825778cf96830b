"""Records the progress of a process's main thread, to detect stuck processes."""

import collections
import dataclasses
import time
from collections.abc import Callable

from praxis_lite.job import events
from praxis_lite.job.events import DISPATCH, MEETING, Listener, Phase

ON_DEVICES = f" {events.ON_DEVICES}"  # Suffix of `Phase.doing`.
_MIN_TIMES = 3  # `usual_seconds` requires this number of recorded times of an activity.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """The activity and progress of a process.

    Attributes:
      process: Index of the process in the job, or in the generation of an elastic job.
      doing: Activity of the main thread: a goodput time category such as "step", "connect" or "hook
        NAME", optionally followed by ON_DEVICES; MEETING; or "" if it is unknown.
      usual_seconds: Longest time without a sign of life in earlier activities of this kind, or None
        if there were fewer than three.
      step: Last finished training step, or None before the first step.
      dispatched: Last training step dispatched to the devices, or None before the first step.
      arrived: Number of synchronization points that the process has reached. These are dispatches
        of training steps and evaluation batches, and barriers on the host. All processes reach the
        same points in the same order, so they wait for the process with the lowest count.
      silent_seconds: Time since the last sign of life, measured on the host of the process. A sign
        of life is a synchronization point, a finished step, or the start or end of an activity.
      unheard_seconds: Time since a thread of the process last reported its progress. It increases
        while the process is stopped or while C code holds the GIL.
      cpu_seconds: CPU time of the process and its children so far.
      ready_seconds: Time for which threads of the process and its children ran or waited for a
        core.
      io_bytes: Number of bytes that the process has read and written so far.
      state: State in /proc/PID/stat: "R" (running), "S" (sleeping), "D" (waiting for a disk or a
        network file system), "T" (stopped), or "" (unknown).
    """

    process: int
    doing: str
    usual_seconds: float | None = None
    step: int | None = None
    dispatched: int | None = None
    arrived: int = 0
    silent_seconds: float = 0.0
    unheard_seconds: float = 0.0
    cpu_seconds: float = 0.0
    ready_seconds: float = 0.0
    io_bytes: int = 0
    state: str = ""


class ProgressRecorder(Listener):
    """Records the activity and progress of this process from the events of its main thread.

    Attributes:
      first_collective: Function that takes the index of a process and describes the first
        collective of a training step that involves the devices of that process, or returns "" if it
        is unknown.

    Args:
      now: Function that returns the time of a monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self.first_collective: Callable[[int], str] = lambda process: ""
        self._now, self._doing, self._last_sign = now, "", now()
        self._step: int | None = None
        self._dispatched: int | None = None
        self._arrived = 0
        self._longest: dict[str, float] = collections.defaultdict(float)
        self._num_times: collections.Counter[str] = collections.Counter()

    def record_sign_of_life(self) -> None:
        """Records a sign of life."""
        now, doing = self._now(), self._doing
        self._longest[doing] = max(self._longest[doing], now - self._last_sign)
        self._num_times[doing] += 1
        self._last_sign = now

    def begins(self, phase: Phase, step: int | None) -> None:
        if phase.kind in (DISPATCH, MEETING):
            self.reach_sync_point(dispatched=step)
        self.start_activity(phase.doing)

    def resumes(self, phase: Phase) -> None:
        self.start_activity(phase.doing)

    def step_ended(self, step: int) -> None:
        self._step = step
        self.record_sign_of_life()

    def progress(self) -> None:
        self.record_sign_of_life()

    def start_activity(self, doing: str) -> None:
        """Records the start of an activity."""
        if doing != self._doing:
            self.record_sign_of_life()
            self._doing = doing

    def reach_sync_point(self, dispatched: int | None = None) -> None:
        """Records that the process has reached a synchronization point.

        Args:
          dispatched: Training step that is about to be dispatched, or None for any other point.
        """
        self._arrived += 1
        self._dispatched = self._dispatched if dispatched is None else dispatched
        self.record_sign_of_life()

    def progress_of(self, process: int) -> Progress:
        """Returns the progress of this process, given its index; may be called from any thread."""
        doing = self._doing
        is_known = self._num_times[doing] >= _MIN_TIMES
        return Progress(
            process=process,
            doing=doing,
            step=self._step,
            dispatched=self._dispatched,
            usual_seconds=self._longest[doing] if is_known else None,
            arrived=self._arrived,
            silent_seconds=self._now() - self._last_sign,
        )


# The recorder of this process.
progress_recorder = ProgressRecorder()
