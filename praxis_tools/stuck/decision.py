"""Decides which process is stuck, based on the progress of all processes over time.

All processes run the same collectives, so they wait for the process that has reached the fewest
synchronization points. This process is stuck if the other processes have waited too long while it
does no work. The time limit depends on the phase of this process and on how long this phase took
previously (`ProcessHistory`).
"""

import dataclasses
from collections.abc import Iterable, Sequence

from praxis_tools.stuck.progress import ON_DEVICES, Progress
from praxis_tools.stuck.progress_history import LONG, ProcessHistory

# A process that is stopped for longer than this is stuck. Debuggers and profilers stop processes
# for shorter times.
STOPPED_SECONDS = 5.0
# Minimum time limit if all processes wait at the same point.
_TOGETHER_SECONDS = 60.0
# Maximum time counted between two observations, because the observer may have been stopped.
_MAX_GAP_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Stuck:
    """The stuck processes of a job.

    Attributes:
      processes: Last progress of each stuck process; empty if all processes are waiting and none is
        behind the others.
      seconds: Seconds for which the other processes (or all processes) have been waiting.
      waiting: Last progress of the waiting processes.
      why: Explanation for the user.
    """

    processes: tuple[Progress, ...]
    seconds: float
    waiting: tuple[Progress, ...]
    why: str


class Decision:
    """Decides which process is stuck, given a series of observations.

    In an elastic job, the leading supervisor creates one instance per generation.

    Args:
      num_processes: Number of processes in the job or the generation.
    """

    def __init__(self, num_processes: int):
        self._histories = [ProcessHistory() for _ in range(num_processes)]
        self._now = 0.0  # Sum of the times between observations.
        self._last: float | None = None  # Time of the last observation.

    def add(self, seconds: float, progress: Iterable[Progress]) -> Stuck | None:
        """Adds an observation and returns the stuck processes, or None if no process seems stuck.

        Args:
          seconds: Time of the observation by the observer's clock, about 1 s after the last one.
          progress: Progress of the processes at this time. Missing processes have not changed.
        """
        if self._last is not None:
            self._now += min(max(0.0, seconds - self._last), _MAX_GAP_SECONDS)
        self._last = seconds
        for process_progress in progress:
            self._histories[process_progress.process].add(process_progress, self._now)
        stopped = [
            history
            for history in self._started()
            if history.latest.state == "T" and self._now - history.state_since >= STOPPED_SECONDS
        ]
        if stopped:
            since = min(history.state_since for history in stopped)
            return self._stuck(stopped, since, "stopped by a signal (state T) and not continued")
        if len(self._started()) < len(self._histories):
            return None
        arrived = [history.latest.arrived for history in self._histories]
        if min(arrived) < max(arrived):
            return self._check_behind(min(arrived), max(arrived))
        return self._check_all_waiting()

    def _started(self) -> list[ProcessHistory]:
        """Returns the histories of the processes that have reported their progress."""
        return [history for history in self._histories if history.last is not None]

    def _check_behind(self, first: int, last: int) -> Stuck | None:
        """Checks whether the processes that are furthest behind are stuck.

        Args:
          first: Synchronization point of the processes that are furthest behind.
          last: Synchronization point of the processes that are furthest ahead.
        """
        for history in self._histories:
            if history.latest.arrived < last and history.behind_since is None:
                history.behind_since = self._now
        behind = [history for history in self._histories if history.latest.arrived == first]
        reasons = [history.why_stuck(self._now) for history in behind]
        if not all(reasons):  # One process makes progress, so the others may be waiting for it.
            return None
        since = min(x.behind_since for x in behind if x.behind_since is not None)
        return self._stuck(behind, since, "; ".join(dict.fromkeys(reasons)))

    def _check_all_waiting(self) -> Stuck | None:
        """Checks whether all processes have been waiting too long at the same point."""
        phases = {history.latest.doing for history in self._histories}
        silent = min(history.silent(self._now) for history in self._histories)
        limit = max(history.time_limit_together() for history in self._histories)
        if phases & set(LONG) or silent < max(limit, _TOGETHER_SECONDS):
            return None
        on_devices = all(phase.endswith(ON_DEVICES) for phase in phases)
        hint = (
            "a device, or a link between devices, is stuck"
            if on_devices
            else "look for a file system or a service that all of them wait for"
        )
        if len(phases) == len(self._histories) == 1 and not on_devices:
            return self._stuck(self._histories, self._histories[0].changed_at, "no progress")
        why = (
            f"all processes have reached the same point ({' and '.join(sorted(phases))}), and none "
            f"makes progress; {hint}"
        )
        return Stuck((), silent, tuple(history.latest for history in self._histories), why)

    def _stuck(self, stuck: Sequence[ProcessHistory], since: float, why: str) -> Stuck:
        progress = tuple(history.latest for history in stuck)
        started = (history.latest for history in self._started())
        waiting = tuple(latest for latest in started if latest not in progress)
        return Stuck(progress, self._now - since, waiting, why)
