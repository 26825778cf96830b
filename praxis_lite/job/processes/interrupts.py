"""Handles signals and the time limit when training is called from Python, as in a notebook."""

from praxis_lite.core.errors import ConfigError
from praxis_lite.job.processes import signals
from praxis_lite.job.processes.logs import write_now
from praxis_lite.job.processes.stop_request import StopRequest

__all__ = ("Interrupt",)


class Interrupt(StopRequest):
    """A StopRequest that raises exceptions instead of ending the process.

    Before the first step, when there is nothing to save, a signal raises KeyboardInterrupt; if the
    time limit expires, ConfigError is raised after the first step. Later, only `reason` is set. A
    second signal raises KeyboardInterrupt in the main thread, even during a save. If the context
    manager is entered in a different thread, no signals are handled.
    """

    # The signal for which the main thread must raise KeyboardInterrupt.
    _interrupts: int | None = None

    def _in_main_thread(self, signum: int) -> None:
        self._wait_for_listener()
        interrupts, self._interrupts = self._interrupts, None
        if interrupts is not None:
            raise KeyboardInterrupt(signals.name(interrupts))

    def _on_signal(self, signum: int) -> None:
        is_first = self.reason is None
        self._request_end(signals.name(signum))
        if is_first and self._ends_now:
            self._interrupts = signum

    def _on_second_signal(self, signum: int) -> None:
        self._interrupts = signum
        write_now(f"{signals.name(signum)}, the second signal: the step is not saved")

    def _on_timeout(self) -> None:
        if self.reason is None:
            self._status = 2
            self._request_end(f"the time limit of {self._time_limit_seconds} s")

    def _end_before_any_step(self) -> BaseException:
        if self._status:
            return ConfigError(self._time_limit_message())
        return KeyboardInterrupt(self.reason)

    def _report_nothing_lost(self) -> None:
        if not self._status:  # At the time limit, the ConfigError contains the message.
            super()._report_nothing_lost()
