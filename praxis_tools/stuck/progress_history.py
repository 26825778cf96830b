"""Tracks how long a process has been silent and whether it is working, based on its progress."""

import collections
import itertools
import math

from praxis_tools.stuck.progress import MEETING, ON_DEVICES, Progress

# Time limit for a process that does no work while others wait for it.
WAIT_SECONDS = 35.0
# Time limit for the silence of a working process in phases that should be short.
BUSY_SECONDS = 300.0
# Time limit for phases whose usual time is unknown, such as the first step on the devices, or a
# save that waits for a file system in another process (FUSE).
UNKNOWN_SECONDS = 600.0
# A phase may take up to this many times its longest duration so far, in idle and in busy processes.
_TIMES_IDLE, _TIMES_BUSY = 3.0, 10.0
# A process is working if, within a time window, it uses this fraction of a core (_CORES) or reads
# and writes this number of bytes (_BYTES). On a host with too few cores, the process is also
# working if its threads are ready to run for this fraction of the window (_READY). Background
# threads (heartbeats, the timeline, trackers) use about 1% of a core.
_WINDOW_SECONDS, _MIN_WINDOW_SECONDS = 20.0, 10.0
_CORES, _BYTES, _READY = 0.05, 2**20, 0.5
# A process usually reports its progress every second or two.
_UNHEARD_SECONDS = 25.0

# Phases that have no time limit while the process is working.
LONG = ("import", "init", "connect", "compile", "restore", "save")


class ProcessHistory:
    """The recent progress of a process, with times in seconds of the observer's clock.

    Attributes:
      last: The last observed progress, or None before the first observation.
      changed_at: Time at which the last sign of life was observed.
      state_since: Time at which the current state was first observed.
      behind_since: Time at which another process was first observed waiting for this process, or
        None.
    """

    def __init__(self) -> None:
        self.last: Progress | None = None
        self.changed_at = self.state_since = 0.0
        self.behind_since: float | None = None
        self._samples: collections.deque[tuple[float, Progress]] = collections.deque()

    @property
    def latest(self) -> Progress:
        """The last observed progress; requires at least one observation."""
        assert self.last is not None
        return self.last

    def add(self, progress: Progress, now: float) -> None:
        """Adds an observation of the process at the time `now`."""
        last, self.last = self.last, progress
        if last is None or progress.state != last.state:
            self.state_since = now
        if last is None or _has_changed(last, progress):
            self.changed_at = now
        if last is None or progress.arrived != last.arrived:
            self.behind_since = None
        self._samples.append((now, progress))
        while now - self._samples[0][0] > _WINDOW_SECONDS:
            self._samples.popleft()

    def why_stuck(self, now: float) -> str:
        """Returns why this process is stuck while others wait for it, or "" if it is not stuck."""
        silent = self.silent(now)
        if self.behind_since is None or min(now - self.behind_since, silent) < self._time_limit():
            return ""
        if self._is_unheard():
            return "none of its threads runs Python, as if C code never released the GIL"
        if self._is_working():
            usual = self.latest.usual_seconds
            before = f" (at most {usual:.2g} s before)" if usual is not None else ""
            return f"at work for {silent:.0f} s without a sign of life{before}"
        disk = ", and it waits for a disk or a network file system" * (self.latest.state == "D")
        return f"no sign of life and no work for {silent:.0f} s{disk}"

    def silent(self, now: float) -> float:
        """Returns the seconds since the last sign of life was observed."""
        return now - self.changed_at

    def time_limit_together(self) -> float:
        """Returns the time limit for silence if no process is behind the others."""
        usual = self.latest.usual_seconds
        if not self.latest.doing:
            return math.inf
        if usual is None:
            return UNKNOWN_SECONDS
        # Simulated devices run in the process, so their work is counted as the work of the process.
        return max(BUSY_SECONDS if self._is_working() else 0.0, _TIMES_BUSY * usual)

    def _time_limit(self) -> float:
        """Returns the time limit for silence while other processes wait for this one."""
        doing, usual = self.latest.doing, self.latest.usual_seconds
        if not doing:
            return math.inf
        if self._is_working() and not self._is_unheard():
            if doing in LONG:
                return math.inf
            limit = BUSY_SECONDS if usual is None else min(_TIMES_BUSY * usual, BUSY_SECONDS)
        elif doing == "save" and not self._is_unheard():
            limit = math.inf if self.latest.state == "D" else UNKNOWN_SECONDS
        else:
            limit = UNKNOWN_SECONDS if self.latest.state == "D" and doing in LONG else WAIT_SECONDS
        if usual is None or doing.endswith((ON_DEVICES, MEETING)):
            # The usual time may include waiting for other processes, so ignore it.
            usual = 0.0
        return max(limit, WAIT_SECONDS, _TIMES_IDLE * usual)

    def _is_unheard(self) -> bool:
        """Returns whether the process seems to have hung without releasing the GIL.

        A process that waits releases the GIL, even if it waits for a slow file system during a
        save, so its reports continue. If reports stop in a long phase while the process is idle,
        the process may have hung in a later phase that it could not report.
        """
        if self.latest.unheard_seconds < _UNHEARD_SECONDS:
            return False
        return self.latest.doing not in LONG or not self._is_working()

    def _is_working(self) -> bool:
        """Returns whether the process is working, or True if this is unknown."""
        began, first = self._samples[0]
        seconds, last = self._samples[-1][0] - began, self.latest
        if not last.state or seconds < _MIN_WINDOW_SECONDS:
            return True
        return (
            last.cpu_seconds - first.cpu_seconds >= _CORES * seconds
            or self._ready_seconds() >= _READY * seconds
            or last.io_bytes - first.io_bytes >= _BYTES
        )

    def _ready_seconds(self) -> float:
        """Returns the seconds of the window during which a thread was ready to run.

        Samples are sums over the threads found in /proc. A thread that is missing in one sample
        reappears with its total, so the difference between two samples is limited to the time
        between them.
        """
        return sum(
            min(max(after.ready_seconds - before.ready_seconds, 0.0), end - begin)
            for (begin, before), (end, after) in itertools.pairwise(self._samples)
        )


def _has_changed(before: Progress, after: Progress) -> bool:
    """Returns whether there was a sign of life or the process was continued by SIGCONT."""
    return (
        (after.arrived, after.step, after.doing) != (before.arrived, before.step, before.doing)
        or after.silent_seconds < before.silent_seconds
        or (before.state == "T" and after.state not in ("T", ""))
    )
