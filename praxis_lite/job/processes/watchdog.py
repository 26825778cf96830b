"""Reports where a job hangs, by writing all stacks if no step completes for a given time."""

import contextlib
import faulthandler
import threading
import time
from collections.abc import Callable, Iterator

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.file_reading import append_text
from praxis_lite.host.object_stores import AnyPath
from praxis_lite.job.events import events
from praxis_lite.job.processes.exits import end_now
from praxis_lite.job.processes.logs import write_now
from praxis_lite.job.processes.stacks import stacks

__all__ = ("SAVING", "entered", "write_report")

COMPILING = "compiling the first step"
TRAINING = "training"
SAVING = "saving"

_ADVICE = {
    COMPILING: "if compiling a large model takes this long, raise run.stopping.watchdog_seconds",
    TRAINING: "check the input pipeline, the other processes and the devices",
    SAVING: "check the file system of job_log_dir; the process is not ended while it saves",
}


class Watchdog(contextlib.AbstractContextManager):
    """Context manager that reports if the training loop makes no progress for some time.

    A report is a line on standard error with the last step and the current activity, followed by
    the stacks of all threads. The time until the next report doubles. If C code hangs while it
    holds the GIL, no Python thread runs; in that case, `faulthandler` writes the stacks, after at
    most twice the time.

    Args:
      seconds: Seconds without progress before a report, or None for no reports.
      exits: Whether the process exits with status 1 after the first report. The process does not
        exit during a save, that is, within `during(SAVING)` or while `is_saving` returns True.
        Saves only start within `during(SAVING)`.
      is_saving: Function that returns whether a save runs in the background.
      stacks_txt: A file to which reports are appended, or None.

    Attributes:
      last_sign: `time.monotonic` at the last progress.
    """

    def __init__(
        self,
        seconds: float | None,
        *,
        exits: bool,
        is_saving: Callable[[], bool] = lambda: False,
        stacks_txt: AnyPath | None = None,
    ):
        self._seconds, self._stacks_txt = seconds, stacks_txt
        self._exits, self._is_saving = exits, is_saving
        self._step: int | None = None
        self._doing = COMPILING
        # Held from the decision to end the process until the process exits, so that no save starts
        # in between.
        self._lock = threading.Lock()
        self.last_sign = self._last_step = time.monotonic()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def step_ended(self, step: int) -> None:
        """Restarts the timer, and stores the step for reports."""
        events.step_ended(step)
        self._step, self._doing = step, TRAINING
        self.last_sign = self._last_step = time.monotonic()

    def alive(self) -> None:
        """Restarts the timer, although no step has completed."""
        events.progress()
        self.last_sign = time.monotonic()

    def is_silent(self) -> bool:
        """Returns whether no progress was made for `seconds`, except while compiling or saving."""
        if self._seconds is None or self._doing in (COMPILING, SAVING) or self._is_saving():
            return False
        return time.monotonic() - self.last_sign > self._seconds

    @contextlib.contextmanager
    def during(self, doing: str) -> Iterator[None]:
        """Context manager that sets the reported activity; restarts the timer on entry and exit."""
        previous = self._doing
        self._set_activity(doing)
        with events.phase(doing):
            yield
        self._set_activity(previous)

    def _set_activity(self, doing: str) -> None:
        with self._lock:
            self._doing = doing
            self.alive()
            if self._thread is not None and self._seconds is not None:
                self._restart_faulthandler(self._seconds)

    def may_end(self) -> bool:
        """Returns whether a report about a stuck process may end this process now."""
        with self._lock:
            return self._is_exit_allowed()

    def _is_exit_allowed(self) -> bool:
        """Returns whether a report may end the process. The caller must hold the lock."""
        return self._exits and self._doing != SAVING and not self._is_saving()

    def _restart_faulthandler(self, seconds: float) -> None:
        """Restarts the timer of `faulthandler`. The caller must hold the lock."""
        may_exit = self._is_exit_allowed()
        faulthandler.dump_traceback_later(2 * seconds, exit=may_exit, file=2)

    def __enter__(self) -> "Watchdog":
        if self._seconds is not None:
            self.last_sign = self._last_step = time.monotonic()
            self._thread = threading.Thread(
                target=self._watch, args=(self._seconds,), name="watchdog", daemon=True
            )
            self._thread.start()
        _entered.append(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _entered.remove(self)
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def _watch(self, seconds: float) -> None:
        last_sign, timeout = self.last_sign, seconds
        while True:
            with self._lock:
                self._restart_faulthandler(seconds)
            # Wait until a report would be due if there is no progress.
            seconds_left = last_sign + timeout - time.monotonic()
            if self._stopped.wait(min(max(seconds_left, 0.0), seconds)):
                return
            with self._lock:  # Prevents a save from ending between the check and the report.
                if self.last_sign != last_sign:
                    last_sign, timeout = self.last_sign, seconds
                if time.monotonic() - last_sign >= timeout:
                    self._report()
                    timeout *= 2

    def _report(self) -> None:
        now, doing = time.monotonic(), self._doing
        last_step = "none so far" if self._step is None else f"the last was step {self._step}"
        if doing != SAVING and self._is_saving():
            doing += ", while a checkpoint is saved"
        exits = self._is_exit_allowed()
        advice = _ADVICE.get(self._doing, _ADVICE[TRAINING])
        report = (
            f"watchdog: no step has ended for {now - self._last_step:.0f} s ({last_step}). The "
            f"activity of the last {now - self.last_sign:.0f} s is: {doing}; {advice}. "
            f"{'The process ends with status 1. ' if exits else ''}All threads:\n{stacks()}"
        )
        self.write(report)
        if exits:
            end_now(1)

    def write(self, report: str) -> None:
        """Logs a report and appends it to the file."""
        write_report(report, self._stacks_txt)


_entered: list[Watchdog] = []


def entered() -> Watchdog | None:
    """Returns the watchdog of the current training run, or None."""
    return _entered[-1] if _entered else None


def write_report(report: str, stacks_txt: AnyPath | None) -> None:
    """Logs a report, and appends it to a file unless the file is None."""
    write_now(report.rstrip("\n"))
    if stacks_txt is not None:
        # If the file cannot be written, the report is still in the log.
        with contextlib.suppress(OSError, ConfigError):
            append_text(stacks_txt, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {report}")
