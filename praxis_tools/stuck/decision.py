"""Decides which process is stuck, from the progress of all processes over time.

In a collective program, all processes wait for the one that has reached the fewest synchronization
points. It is stuck if the others have waited for long, and it does no work. The time limit depends
on its phase, and on how long the same phase took before (`Observed`).
"""

import dataclasses
from collections.abc import Iterable, Sequence

from praxis_tools.stuck.progress import ON_DEVICES, Progress
from praxis_tools.stuck.progress_history import LONG, Observed

# Longer than a debugger or profiler stops a process to inspect it.
STOPPED_SECONDS = 5.0
_TOGETHER_SECONDS = 60.0
# Maximum time to count between observations, because the observer may have been stopped.
_MAX_GAP_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Stuck:
    """The stuck processes of a job.

    Attributes:
      processes: Last progress of each stuck process; empty if all processes wait, and none is
        behind the others.
      seconds: How long the other processes have waited for them, or how long all have waited.
      waiting: Last progress of the processes that wait.
      why: The reason, as text.
    """

    processes: tuple[Progress, ...]
    seconds: float
    waiting: tuple[Progress, ...]
    why: str


class Decision:
    """Decides from observations which process is stuck; deterministic, because it has no clock.

    In an elastic job, the leading supervisor creates one for each generation.

    Args:
      num_processes: Number of processes in the job or the generation.
    """

    def __init__(self, num_processes: int):
        self._observed = [Observed() for _ in range(num_processes)]
        self._now, self._last = 0.0, None

    def add(self, seconds: float, progress: Iterable[Progress]) -> Stuck | None:
        """Adds an observation, and returns the stuck processes, or None if there seem to be none.

        Args:
          seconds: Time of the observation on the observer's clock, about 1 s after the previous.
          progress: Progress of the processes at that time. A missing process has not changed.
        """
        if self._last is not None:
            self._now += min(max(0.0, seconds - self._last), _MAX_GAP_SECONDS)
        self._last = seconds
        for item in progress:
            self._observed[item.process].take(item, self._now)
        stopped = [
            item for item in self._known()
            if item.last.state == "T" and self._now - item.state_since >= STOPPED_SECONDS
        ]
        if stopped:
            since = min(item.state_since for item in stopped)
            return self._stuck(stopped, since, "stopped by a signal (state T) and not continued")
        if len(self._known()) < len(self._observed):
            return None
        arrived = [item.last.arrived for item in self._observed]
        if min(arrived) < max(arrived):
            return self._check_behind(max(arrived))
        return self._check_all_waiting()

    def _known(self) -> list[Observed]:
        return [item for item in self._observed if item.last is not None]

    def _check_behind(self, most: int) -> Stuck | None:
        """Checks whether the processes that are behind the others are stuck."""
        for item in self._observed:
            if item.last.arrived < most and item.behind_since is None:
                item.behind_since = self._now
        least = min(item.last.arrived for item in self._observed)
        behind = [item for item in self._observed if item.last.arrived == least]
        reasons = [item.why_stuck(self._now) for item in behind]
        if not all(reasons):  # One of them makes progress, so the rest may wait for it.
            return None
        since = min(item.behind_since for item in behind)
        return self._stuck(behind, since, "; ".join(dict.fromkeys(reasons)))

    def _check_all_waiting(self) -> Stuck | None:
        """Checks whether all processes wait at the same synchronization point."""
        doing = {item.last.doing for item in self._observed}
        silent = min(item.silent(self._now) for item in self._observed)
        patience = max(item.patience_together() for item in self._observed)
        if doing & set(LONG) or silent < max(patience, _TOGETHER_SECONDS):
            return None
        on_devices = all(item.endswith(ON_DEVICES) for item in doing)
        last = (
            "a device, or a link between devices, is stuck" if on_devices
            else "look for a file system or a service that all of them wait for"
        )
        if len(doing) == len(self._observed) == 1 and not on_devices:
            return self._stuck(self._observed, self._observed[0].changed_at, "nothing goes on")
        return Stuck((), silent, tuple(item.last for item in self._observed), (
            f"all processes have come as far ({' and '.join(sorted(doing))}) and none goes on: no "
            f"process is behind; {last}"
        ))

    def _stuck(self, stuck: Sequence[Observed], since: float, why: str) -> Stuck:
        who = tuple(item.last for item in stuck)
        waiting = tuple(item.last for item in self._known() if item.last not in who)
        return Stuck(who, self._now - since, waiting, why)
