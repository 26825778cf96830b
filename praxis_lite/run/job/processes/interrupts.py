"""When a training in Python is asked to end: the process, a notebook say, goes on without it."""

import signal
import time

from praxis_lite.core.errors import ConfigError
from praxis_lite.run.job.processes import signals
from praxis_lite.run.job.processes.stopping import StopRequest


class Interrupt(StopRequest):
    """Hears signals and a time limit as StopRequest does, and never ends the process.

    Before a step is made a signal raises KeyboardInterrupt, and the time limit ConfigError at the
    end of the first step: there is nothing to save. From then on only `reason` is set. A second
    signal raises KeyboardInterrupt wherever the main thread is. Outside the main thread no signal
    is heard.
    """

    def __init__(self, time_limit_seconds: float | None = None, *, num_processes: int = 1):
        super().__init__(time_limit_seconds, num_processes=num_processes)
        self._first_in_main: tuple[int, float] | None = None  # The signal, and when it came.
        self._second: int | None = None  # As the thread has heard it.
        self._interrupted_at = float("-inf")

    def _in_main(self, signum: int) -> None:
        now = time.monotonic()
        if self._second is not None:
            # Python calls the handlers of signals that came while it waited in the order of their
            # numbers, each once: only the thread knows how many there were, and which was first.
            if signum != signal.SIGHUP and now - self._interrupted_at > signals.SAME_SECONDS:
                self._interrupt(self._second, now)
            return
        if self._first_in_main is None:
            self._first_in_main = signum, now
            self._ask(signals.name(signum))
            if self._leaves:
                raise KeyboardInterrupt(signals.name(signum))
            return
        first, began = self._first_in_main
        # As in SignalListener: one request may come twice, and SIGHUP is never the second.
        if signum != signal.SIGHUP and (first != signum or now - began > signals.SAME_SECONDS):
            is_late = self._heard_first is not None and self._heard_first[0] == signum
            self._interrupt(first if is_late else signum, now)

    def _interrupt(self, signum: int, now: float) -> None:
        self._interrupted_at = now
        raise KeyboardInterrupt(signals.name(signum))

    def _asked(self, signum: int) -> None:
        self._ask(signals.name(signum))

    def _asked_again(self, signum: int) -> None:
        self._second = signum
        signals.say(f"{signals.name(signum)}, the second signal: the step is not saved")

    def _time_is_up(self) -> None:
        if self.reason is None:
            self._status = 2
            self._ask(f"the time limit of {self._time_limit_seconds} s")

    def _end_before_any_step(self) -> BaseException:
        return ConfigError(self._too_short()) if self._status else KeyboardInterrupt(self.reason)

    def _say_nothing_is_lost(self) -> None:
        if not self._status:  # Else the error says so.
            super()._say_nothing_is_lost()
