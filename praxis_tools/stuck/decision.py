"""The decision which process is stuck, from the progress of all of them over time.

In a collective program all processes wait for the one that has come to the fewest places. It is
stuck if the others have waited long and it does no work. How long is long depends on its phase, and
on how long the same phase has taken it before (`Observed`).
"""

import dataclasses
from collections.abc import Iterable, Sequence

from praxis_tools.stuck.progress import ON_DEVICES, Progress
from praxis_tools.stuck.progress_history import LONG, Observed

# Longer than a debugger stops a process to look at it.
STOPPED_SECONDS = 5.0
_TOGETHER_SECONDS = 60.0
# Observations further apart say nothing of the time between: the observer may have been stopped.
_MOST_BETWEEN = 5.0


@dataclasses.dataclass(frozen=True)
class Stuck:
    """Who is stuck, and why.

    Attributes:
      processes: the last progress of each process that is stuck; (): none is, for no process is
        behind the others.
      seconds: how long the others have waited for them, or all together.
      waiting: the last progress of the processes that wait.
      why: as text.
    """

    processes: tuple[Progress, ...]
    seconds: float
    waiting: tuple[Progress, ...]
    why: str


class Decision:
    """Decides from observations which process is stuck. It has no clock, so it is deterministic.

    Of an elastic job the leading supervisor makes one for each generation.

    Args:
      num_processes: that meet: of the job, or of a generation.
    """

    def __init__(self, num_processes: int):
        self._observed = [Observed() for _ in range(num_processes)]
        self._now, self._last = 0.0, None

    def add(self, seconds: float, progress: Iterable[Progress]) -> Stuck | None:
        """Returns who is stuck, after another observation; None: nobody, as it seems.

        Args:
          seconds: of a clock of the observer, when it was made; about 1 s after the one before.
          progress: of the processes, with seconds as of now. One that is not there is as it was.
        """
        if self._last is not None:
            self._now += min(max(0.0, seconds - self._last), _MOST_BETWEEN)
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
        places = [item.last.arrived for item in self._observed]
        return self._one_behind(max(places)) if min(places) < max(places) else self._together()

    def _known(self) -> list[Observed]:
        return [item for item in self._observed if item.last is not None]

    def _one_behind(self, most: int) -> Stuck | None:
        for item in self._observed:
            if item.last.arrived < most and item.behind_since is None:
                item.behind_since = self._now
        least = min(item.last.arrived for item in self._observed)
        behind = [item for item in self._observed if item.last.arrived == least]
        reasons = [item.why_stuck(self._now) for item in behind]
        if not all(reasons):  # One of them makes progress: the rest may wait for it.
            return None
        since = min(item.behind_since for item in behind)
        return self._stuck(behind, since, "; ".join(dict.fromkeys(reasons)))

    def _together(self) -> Stuck | None:
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
