"""Requests to end a job, by a signal or by its time limit."""

import threading
import time

from praxis_lite.job.processes import signals
from praxis_lite.job.processes.exits import end_now

# Several processes end after the same step. A process that was asked to end waits for its first
# step no longer than this and then ends by itself: schedulers wait 30 s before they kill.
PEERS_SECONDS = 20.0


class StopRequest(signals.SignalListener):
    """Hears SIGTERM, SIGINT, SIGHUP and a time limit while it is entered.

    The first of them is answered at once with a line on standard error. Until `step_ended` is
    called there is nothing to save, and the process ends then and there: with status 0 after a
    signal, and 2 at the time limit, because a job that is started again would do no better. From
    then on only `reason` is set; the loop over steps reads it, and saves. A second signal ends the
    process at once, with status 128 + its number, whatever it is doing.

    Args:
      time_limit_seconds: counted from entering; None: there is no limit.
      num_processes: of the job. Several end after the same step, if need be the first.

    Attributes:
      reason: what asked this process to end, such as "SIGTERM", or None.
      profile_requested: SIGUSR1 came; the code that makes the profile resets it.
    """

    def __init__(self, time_limit_seconds: float | None = None, *, num_processes: int = 1):
        super().__init__()
        self._time_limit_seconds = time_limit_seconds
        self._is_alone = num_processes == 1
        self._has_begun, self._newest_step = False, None
        # Reentrant: the handler interrupts the main thread, which may hold the lock.
        self._lock = threading.RLock()
        self._has_stepped = self._leaves = False
        self._status = 0  # Of an end before any step.
        self.reason: str | None = None
        self.profile_requested = False

    def __enter__(self) -> "StopRequest":
        if self._time_limit_seconds is not None:
            self._wakes_at = time.monotonic() + self._time_limit_seconds
        super().__enter__()
        return self

    def training_begins(self, newest_step: int | None) -> None:
        """Takes the step of the newest checkpoint, for messages; None: there is none yet."""
        self._has_begun, self._newest_step = True, newest_step

    def saved(self, newest_step: int | None) -> None:
        """Takes the step of the newest checkpoint from now on; from any thread."""
        self._newest_step = newest_step

    def step_ended(self) -> None:
        """Notes that the job has a state to save from now on. Called after every step."""
        if not self._has_stepped:
            with self._lock:
                if self._leaves:
                    raise self._end_before_any_step()
                self._has_stepped = True

    def _in_main(self, signum: int) -> None:
        self._ask(signals.name(signum))
        if self._leaves:
            self._end(0)

    def _asked(self, signum: int) -> None:
        name = signals.name(signum)
        if self.reason not in (None, name):
            signals.say(f"{name}: ending already, for {self.reason}")
        self._ask(name)
        if not self._has_stepped:
            seconds = signals.CLEAN_UP_SECONDS if self._leaves else PEERS_SECONDS
            self._wakes_at = time.monotonic() + seconds

    def _profile_asked(self) -> None:
        self.profile_requested = True
        begins = "after the running step" if self._has_stepped else "after the first step"
        signals.say(f"{signals.name(signals.PROFILES)}: a profile begins {begins}")

    def _time_is_up(self) -> None:
        if self.reason is None:
            self._status = 2
            self._ask(f"the time limit of {self._time_limit_seconds} s")
            if not self._leaves:
                self._wakes_at = time.monotonic() + PEERS_SECONDS
                return
        with self._lock:
            if not self._has_stepped:
                if not self._leaves:
                    self._say_nothing_is_lost()
                end_now(self._status, f"ended before it made a step, for {self.reason}")

    def _ask(self, reason: str) -> None:
        """Answers the first request, in the thread that comes first."""
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
            self._leaves = self._is_alone and not self._has_stepped
            if self._leaves:
                self._say_nothing_is_lost()
            else:
                signals.say(
                    f"{reason}: ending when the running step is made and saved; a second signal "
                    "ends at once"
                )

    def _kept(self) -> str:
        return f"; {self._newest()}"

    def _newest(self) -> str:
        """Returns as text which checkpoint is the newest."""
        if self._newest_step is not None:
            return f"the newest checkpoint is of step {self._newest_step}"
        if not self._has_begun:
            return "training had not begun"
        return "there is no checkpoint yet" if self._has_stepped else "no step had been made"

    def _end_before_any_step(self) -> BaseException:
        """Returns the exception that ends the training of a process that was to end before."""
        return self._raised or SystemExit(self._status)

    def _say_nothing_is_lost(self) -> None:
        if self._status:
            signals.say(f"error: {self._too_short()}")
            return
        signals.say(f"{self.reason}: ended; nothing is lost, for {self._newest()}")

    def _too_short(self) -> str:
        """Returns the message for a time limit that ends before any step."""
        return (
            f"{self.reason} is over before a step was made, and {self._newest()}. It has to be "
            "longer than restoring and compiling take: raise run.stopping.time_limit_seconds."
        )
