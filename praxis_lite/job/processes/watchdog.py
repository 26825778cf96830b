"""Reports where a job hangs: the stacks of its threads when no step has ended for a set time."""

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from praxis_lite.host.file_reading import opened_to_append
from praxis_lite.job.events import events
from praxis_lite.job.processes.exits import end_now
from praxis_lite.job.processes.stacks import stacks

__all__ = ("SAVING", "entered", "write_report")

COMPILING = "compiling the first step"
TRAINING = "training"
SAVING = "saving"

_ADVICE = {
    COMPILING: "a large program may take as long: then raise run.stopping.watchdog_seconds",
    TRAINING: "look for the input pipeline, a peer that is gone, a device that does not answer",
    SAVING: "look at the file system of job_log_dir; the process is not ended while it saves",
}


class Watchdog(contextlib.AbstractContextManager):
    """Reports, while it is entered, that there was no sign of life for `seconds` (None: never).

    A report goes to standard error. It is a line with the last step and the present work, followed
    by the stacks of all threads. The next one comes after twice the time. If C code that hangs
    holds Python's lock, so that no thread of Python runs, `faulthandler` writes the stacks after up
    to twice the time.

    Args:
      exits: the process ends after the first report, with status 1, but not while it saves: within
        `during(SAVING)`, or while `is_saving` returns True for a save in the background. Saves
        begin within `during(SAVING)` only.
      stacks_txt: a file to which the reports are also appended; None: there is no such file.

    Attributes:
      last_sign: the time of the last sign of life, in seconds of time.monotonic.
    """

    def __init__(
        self,
        seconds: float | None,
        *,
        exits: bool,
        is_saving: Callable[[], bool] = lambda: False,
        stacks_txt: Path | None = None,
    ):
        self._seconds, self._stacks_txt = seconds, stacks_txt
        self._exits, self._is_saving = exits, is_saving
        self._step: int | None = None
        self._doing = COMPILING
        # Held from the decision that the process ends until it does, so that no save begins.
        self._lock = threading.Lock()
        self.last_sign = self._last_step = time.monotonic()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def step_ended(self, step: int) -> None:
        """Restarts the clock, and stores the step for the reports."""
        events.progress(step)
        self._step, self._doing = step, TRAINING
        self.last_sign = self._last_step = time.monotonic()

    def alive(self) -> None:
        """Restarts the clock: a sign of life without the end of a step."""
        events.progress()
        self.last_sign = time.monotonic()

    def is_silent(self) -> bool:
        """Returns True if there was no sign of life for `seconds`; a compilation or a save is."""
        if self._seconds is None or self._doing in (COMPILING, SAVING) or self._is_saving():
            return False
        return time.monotonic() - self.last_sign > self._seconds

    @contextlib.contextmanager
    def during(self, doing: str) -> Iterator[None]:
        """Restarts the clock at both ends; a report within names this work."""
        before = self._doing
        self._now_doing(doing)
        with events.phase(doing):
            yield
        self._now_doing(before)

    def _now_doing(self, doing: str) -> None:
        with self._lock:
            self._doing = doing
            self.alive()
            if self._thread is not None:
                self._set_off()

    def may_end(self) -> bool:
        """Returns True if a report of a stuck process may end this process now."""
        with self._lock:
            return self._ends()

    def _ends(self) -> bool:
        """Returns True if a report is to end the process; the lock is held."""
        return self._exits and self._doing != SAVING and not self._is_saving()

    def _set_off(self) -> None:
        """Lets `faulthandler` fire if this class's thread cannot; the lock is held."""
        faulthandler.dump_traceback_later(2 * self._seconds, exit=self._ends(), file=2)

    def __enter__(self) -> "Watchdog":
        if self._seconds is not None:
            self.last_sign = self._last_step = time.monotonic()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        _entered.append(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _entered.remove(self)
        if self._thread is not None:
            self._is_over.set()
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        seen, patience = self.last_sign, self._seconds
        while True:
            with self._lock:  # Anew each time this thread wakes up.
                self._set_off()
            left = seen + patience - time.monotonic()
            if self._is_over.wait(min(max(left, 0.0), self._seconds)):
                return
            with self._lock:  # Otherwise the end of a save, a sign of life, may come between.
                if self.last_sign != seen:
                    seen, patience = self.last_sign, self._seconds
                if time.monotonic() - seen >= patience:
                    self._report()
                    patience *= 2

    def _report(self) -> None:
        now, doing = time.monotonic(), self._doing
        last = "none has yet" if self._step is None else f"the last was step {self._step}"
        if doing != SAVING and self._is_saving():
            doing += ", while a checkpoint is saved"
        ends = self._ends()
        advice = _ADVICE.get(self._doing, _ADVICE[TRAINING])
        report = (
            f"watchdog: no step has ended for {now - self._last_step:.0f} s ({last}); for "
            f"{now - self.last_sign:.0f} s now: {doing}; {advice}. "
            f"{'The process ends, status 1. ' if ends else ''}All threads:\n{stacks()}"
        )
        self.say(report)
        if ends:
            end_now(1)

    def say(self, report: str) -> None:
        """Writes a report to standard error and to the file."""
        write_report(report, self._stacks_txt)


_entered: list[Watchdog] = []


def entered() -> Watchdog | None:
    """Returns the watchdog of the training that runs, or None."""
    return _entered[-1] if _entered else None


def write_report(report: str, stacks_txt: Path | None) -> None:
    """Writes a report to standard error, and appends it to a file, if one is given."""
    _to_stderr(report)
    if stacks_txt is not None:
        # A report that cannot be written there is on standard error.
        with contextlib.suppress(OSError), opened_to_append(stacks_txt) as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {report}")


def _to_stderr(text: str) -> None:
    # Past Python's buffers: the thread that hangs may hold their lock.
    data = text.encode(errors="replace")
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]
