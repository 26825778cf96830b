"""Signals and time limits for training that is called from Python, such as in a notebook."""

from praxis_lite.core.errors import ConfigError
from praxis_lite.job.processes import signals
from praxis_lite.job.processes.stop_request import StopRequest

__all__ = ("Interrupt",)


class Interrupt(StopRequest):
    """Hears signals and a time limit as StopRequest does, and never ends the process.

    Before a step is made a signal raises KeyboardInterrupt, and the time limit ConfigError at the
    end of the first step: there is nothing to save. From then on only `reason` is set. A second
    signal raises KeyboardInterrupt wherever the main thread is. Outside the main thread no signal
    is heard.
    """

    _interrupts: int | None = None  # The signal that the main thread is to raise.

    def _in_main(self, signum: int) -> None:
        self._let_thread_hear()
        interrupts, self._interrupts = self._interrupts, None
        if interrupts is not None:
            raise KeyboardInterrupt(signals.name(interrupts))

    def _asked(self, signum: int) -> None:
        is_first = self.reason is None
        self._ask(signals.name(signum))
        if is_first and self._leaves:
            self._interrupts = signum

    def _asked_again(self, signum: int) -> None:
        self._interrupts = signum
        signals.say(f"{signals.name(signum)}, the second signal: the step is not saved")

    def _time_is_up(self) -> None:
        if self.reason is None:
            self._status = 2
            self._ask(f"the time limit of {self._time_limit_seconds} s")

    def _end_before_any_step(self) -> BaseException:
        return ConfigError(self._too_short()) if self._status else KeyboardInterrupt(self.reason)

    def _say_nothing_is_lost(self) -> None:
        if not self._status:  # Otherwise the error contains it.
            super()._say_nothing_is_lost()
