"""The observations of a process over time: how long it is silent, and whether it works."""

import collections
import itertools
import math

from praxis_tools.stuck.progress import MEETING, ON_DEVICES, Progress

# How long the others have waited for a process that does no work.
WAIT_SECONDS = 35.0
# How long a process that works may be silent in a phase that is expected to be short.
BUSY_SECONDS = 300.0
# The limit for a phase whose usual time is not known: a first step on the devices, a save that
# waits for a file system in another process (FUSE).
UNKNOWN_SECONDS = 600.0
# Up to these multiples of its longest time so far a phase is not stuck.
_TIMES_STILL, _TIMES_BUSY = 3.0, 10.0
# A process works if it uses at least this share of a core, or reads and writes this many bytes, in
# a window; or if its threads are ready to run for this share of the window, on a host with too few
# cores. Our own threads (beats, the timeline, trackers) take about 1% of a core.
_WINDOW_SECONDS, _LEAST_WINDOW = 20.0, 10.0
_CORES, _BYTES, _READY = 0.05, 2**20, 0.5
# A thread of it should tell its progress every second or two.
_UNHEARD_SECONDS = 25.0

# Phases without a limit for a process that works.
LONG = ("import", "init", "connect", "compile", "restore", "save")


class Observed:
    """The observations of a process; times are in seconds of the observer's clock.

    Attributes:
      last: its last progress; None: none yet.
      changed_at: when its last sign of life was seen.
      state_since: when its state was first seen as it is now.
      behind_since: when another process was first seen to wait for it; None: none does.
    """

    def __init__(self) -> None:
        self.last: Progress | None = None
        self.changed_at = self.state_since = 0.0
        self.behind_since: float | None = None
        self._samples: collections.deque[tuple[float, Progress]] = collections.deque()

    def take(self, item: Progress, now: float) -> None:
        """Takes the progress that the process reports."""
        last, self.last = self.last, item
        if last is None or item.state != last.state:
            self.state_since = now
        if last is None or _has_changed(last, item):
            self.changed_at = now
        if last is None or item.arrived != last.arrived:
            self.behind_since = None
        self._samples.append((now, item))
        while now - self._samples[0][0] > _WINDOW_SECONDS:
            self._samples.popleft()

    def why_stuck(self, now: float) -> str:
        """Returns why a process is stuck for which others wait; "" if it is not."""
        silent = self.silent(now)
        if self.behind_since is None or min(now - self.behind_since, silent) < self._patience():
            return ""
        if self._is_unheard():
            return "none of its threads runs Python, as if C code kept Python's lock"
        if self._moves():
            usual = self.last.usual_seconds
            before = f", which took at most {usual:.2g} s before" if usual is not None else ""
            return f"at work for {silent:.0f} s without a sign of life{before}"
        disk = ", and waits for a disk or a network file system" * (self.last.state == "D")
        return f"no sign of life and no work for {silent:.0f} s{disk}"

    def silent(self, now: float) -> float:
        """Returns the seconds since its last sign of life was seen."""
        return now - self.changed_at

    def patience_together(self) -> float:
        """Returns how long it may be silent if no process is behind another."""
        usual = self.last.usual_seconds
        if not self.last.doing:
            return math.inf
        if usual is None:
            return UNKNOWN_SECONDS
        # It works: simulated devices are part of it.
        return max(BUSY_SECONDS if self._moves() else 0.0, _TIMES_BUSY * usual)

    def _patience(self) -> float:
        """Returns how long it may be silent while others wait for it."""
        doing, usual = self.last.doing, self.last.usual_seconds
        if not doing:
            return math.inf
        if self._moves() and not self._is_unheard():
            if doing in LONG:
                return math.inf
            most = BUSY_SECONDS if usual is None else min(_TIMES_BUSY * usual, BUSY_SECONDS)
        elif doing == "save":
            most = math.inf if self.last.state == "D" else UNKNOWN_SECONDS
        else:
            most = UNKNOWN_SECONDS if self.last.state == "D" and doing in LONG else WAIT_SECONDS
        if usual is None or doing.endswith((ON_DEVICES, MEETING)):
            usual = 0.0  # It may have waited for others, so its own time is not known.
        return max(most, WAIT_SECONDS, _TIMES_STILL * usual)

    def _is_unheard(self) -> bool:
        return self.last.unheard_seconds >= _UNHEARD_SECONDS and self.last.doing not in LONG

    def _moves(self) -> bool:
        """Returns True if the process is at work, or if that is unknown."""
        began, first = self._samples[0]
        seconds, last = self._samples[-1][0] - began, self.last
        if not last.state or seconds < _LEAST_WINDOW:
            return True
        return (
            last.cpu_seconds - first.cpu_seconds >= _CORES * seconds
            or self._ready_seconds() >= _READY * seconds
            or last.io_bytes - first.io_bytes >= _BYTES
        )

    def _ready_seconds(self) -> float:
        """Returns for how long of the window a thread was ready to run.

        Between two samples that is at most the time that passed. The samples are sums over the
        threads that were found: one that was missed once reappears with its total seconds.
        """
        return sum(
            min(max(item.ready_seconds - before.ready_seconds, 0.0), now - then)
            for (then, before), (now, item) in itertools.pairwise(self._samples)
        )


def _has_changed(last: Progress, item: Progress) -> bool:
    """Returns True if there was a sign of life, or the process was continued."""
    return (
        (item.arrived, item.step, item.doing) != (last.arrived, last.step, last.doing)
        or item.silent_seconds < last.silent_seconds
        or (last.state == "T" and item.state not in ("T", ""))
    )
