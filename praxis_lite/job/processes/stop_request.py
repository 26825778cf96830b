"""Handles stop requests for a training job, from signals or from its time limit."""

import threading
import time

from praxis_lite.job.processes import signals
from praxis_lite.job.processes.exits import end_now
from praxis_lite.job.processes.logs import write_now

# All processes of a job stop after the same step. Before the first step, a process that received a
# stop request waits for that step for at most this time, and then exits. Schedulers kill a process
# after 30 s.
PEERS_SECONDS = 20.0


class StopRequest(signals.SignalListener):
    """Context manager that handles SIGTERM, SIGINT, SIGHUP and a time limit.

    The first request is reported immediately on standard error. Before the first step, there is
    nothing to save, so the process exits immediately. The exit status is 0 after a signal, and 2 at
    the time limit, because a restarted job would reach the limit again. After the first call of
    `step_ended`, only `reason` is set; the training loop reads it, saves and stops. A second signal
    ends the process immediately with status 128 + the signal's number.

    Args:
      time_limit_seconds: Time limit, measured from `__enter__`, or None for no limit.
      num_processes: Number of processes in the job. If there are several, they all stop after the
        same step, and not before the first step has ended.

    Attributes:
      reason: The request to stop this process, such as "SIGTERM", or None.
      profile_requested: Whether SIGUSR1 has requested a profile. Reset by the code that starts the
        profile.
    """

    def __init__(self, time_limit_seconds: float | None = None, *, num_processes: int = 1):
        super().__init__()
        self._time_limit_seconds = time_limit_seconds
        self._is_alone = num_processes == 1
        self._has_begun = False
        self._newest_step: int | None = None
        # Reentrant: the handler interrupts the main thread, which may hold the lock.
        self._lock = threading.RLock()
        self._has_stepped = self._ends_now = False
        self._status = 0  # The exit status if the process exits before the first step.
        self.reason: str | None = None
        self.profile_requested = False

    def __enter__(self) -> "StopRequest":
        if self._time_limit_seconds is not None:
            self._timeout_at = time.monotonic() + self._time_limit_seconds
        super().__enter__()
        return self

    def training_begins(self, newest_step: int | None) -> None:
        """Sets the step of the latest checkpoint for messages; None if there is no checkpoint."""
        self._has_begun, self._newest_step = True, newest_step

    def saved(self, newest_step: int | None) -> None:
        """Updates the step of the latest checkpoint. Callable from any thread."""
        self._newest_step = newest_step

    def step_ended(self) -> None:
        """Records that the job has a state to save. Called after every step."""
        if not self._has_stepped:
            with self._lock:
                if self._ends_now:
                    raise self._end_before_any_step()
                self._has_stepped = True

    def _in_main_thread(self, signum: int) -> None:
        self._request_end(signals.name(signum))
        if self._ends_now:
            self._end(0)

    def _on_signal(self, signum: int) -> None:
        name = signals.name(signum)
        if self.reason not in (None, name):
            write_now(f"{name}: already ending, because of {self.reason}")
        self._request_end(name)
        if not self._has_stepped:
            seconds = signals.CLEAN_UP_SECONDS if self._ends_now else PEERS_SECONDS
            self._timeout_at = time.monotonic() + seconds

    def _on_profile_signal(self) -> None:
        self.profile_requested = True
        begins = "after the current step" if self._has_stepped else "after the first step"
        write_now(f"{signals.name(signals.PROFILES)}: a profile begins {begins}")

    def _on_timeout(self) -> None:
        if self.reason is None:
            self._status = 2
            self._request_end(f"the time limit of {self._time_limit_seconds} s")
            if not self._ends_now:
                self._timeout_at = time.monotonic() + PEERS_SECONDS
                return
        with self._lock:
            if not self._has_stepped:
                if not self._ends_now:
                    self._report_nothing_lost()
                end_now(self._status, f"ended before its first step, because of {self.reason}")

    def _request_end(self, reason: str) -> None:
        """Handles the first request. Later requests from either thread are ignored."""
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
            self._ends_now = self._is_alone and not self._has_stepped
            if self._ends_now:
                self._report_nothing_lost()
            else:
                write_now(
                    f"{reason}: ending after the current step is saved; a second signal ends the "
                    "job immediately"
                )

    def _outcome(self) -> str:
        return f"; {self._newest_checkpoint()}"

    def _newest_checkpoint(self) -> str:
        """Describes the latest checkpoint."""
        if self._newest_step is not None:
            return f"the newest checkpoint is of step {self._newest_step}"
        if not self._has_begun:
            return "training had not begun"
        return "there is no checkpoint yet" if self._has_stepped else "no step had been completed"

    def _end_before_any_step(self) -> BaseException:
        """Returns the exception to raise after the first step if the request came before it."""
        return self._raised or SystemExit(self._status)

    def _report_nothing_lost(self) -> None:
        if self._status:
            write_now(f"error: {self._time_limit_message()}")
            return
        write_now(f"{self.reason}: ended; nothing is lost: {self._newest_checkpoint()}")

    def _time_limit_message(self) -> str:
        """Returns the error message for a time limit that expires before the first step."""
        return (
            f"{self.reason} expired before the first step, and {self._newest_checkpoint()}. It "
            "must be longer than the time for restoring and compiling: raise "
            "run.stopping.time_limit_seconds."
        )
