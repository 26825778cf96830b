"""The stacks of the threads of this process, and of another process on request."""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from praxis_lite.job.processes.exits import temporary_folder

__all__ = ("asked_for", "give_when_asked", "stacks")

# Asks a process for its stacks. `faulthandler` answers in C, even while C code holds Python's lock.
# The signals with names have other meanings (`job/processes/signals.py`).
_ASKS = signal.SIGRTMIN + 3
_MOST_CHARACTERS = 100_000


def stacks() -> str:
    """Returns the stacks of all threads but the calling one, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    alike: dict[str, list[str]] = {}  # The idle threads of a pool all have the same stack.
    main, local = threading.main_thread().ident, threading.get_ident()
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if ident != local:
            stack = "".join(traceback.format_stack(frame))
            alike.setdefault(stack, []).append(names.get(ident, str(ident)))
    return "".join(f"{', '.join(sorted(them))}:\n{stack}" for stack, them in alike.items())


def give_when_asked() -> str:
    """Lets this process write its stacks to a file when it is asked; returns the file's path."""
    path = temporary_folder() / "stacks"
    # Never closed: the handler, in C, writes to its descriptor.
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    faulthandler.register(_ASKS, file=descriptor, all_threads=True)
    return str(path)


def asked_for(pid: int, path: str, seconds: float = 3.0) -> str:
    """Returns the stacks of a process of this host, "" if it gives none in time.

    Args:
      pid: of a process that called `give_when_asked`, which returned `path`.
      seconds: how long it may take; a process that is stopped gives none.
    """
    file = Path(path)
    try:
        before = file.stat().st_size
        os.kill(pid, _ASKS)
        deadline, size = time.monotonic() + seconds, before
        while time.monotonic() < deadline:
            time.sleep(0.1)
            last, size = size, file.stat().st_size
            if before < last == size:
                break
        with file.open("rb") as opened:
            opened.seek(before)
            return opened.read(_MOST_CHARACTERS).decode(errors="replace")
    except OSError:
        return ""


class AlarmOfLock(contextlib.AbstractContextManager):
    """Writes the stacks of this process to standard error, unless it is postponed in time.

    It is a timer of the kernel, so it fires even if C code holds Python's lock and no thread of
    Python runs. Systems other than Linux have none; there nothing is written.

    Args:
      seconds: after which it fires.
    """

    def __init__(self, seconds: float):
        self._seconds, self._timer = seconds, ctypes.c_void_p()
        self._libc = ctypes.CDLL(None)

    def __enter__(self) -> "AlarmOfLock":
        faulthandler.register(_ASKS, file=2, all_threads=True)
        event = _Event(signo=_ASKS, notify=0)  # SIGEV_SIGNAL.
        try:
            create = self._libc.timer_create
            failed = create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer))
        except AttributeError:  # Before glibc 2.34, or no Linux.
            failed = True
        if failed:
            self._libc = None
        return self

    def put_off(self, seconds: float | None = None) -> None:
        """Lets it fire so many seconds from now, by default its own number; 0: never."""
        if self._libc is not None:
            spec = _Timer(after=int(self._seconds if seconds is None else seconds))
            self._libc.timer_settime(self._timer, 0, ctypes.byref(spec), None)

    def __exit__(self, *exc_info: object) -> None:
        self.put_off(0)


class _Event(ctypes.Structure):
    """A sigevent of Linux."""

    _fields_ = (
        ("value", ctypes.c_void_p), ("signo", ctypes.c_int), ("notify", ctypes.c_int),
        ("_", ctypes.c_byte * 48),
    )


class _Timer(ctypes.Structure):
    """An itimerspec: seconds and nanoseconds of the interval, and until it fires."""

    _fields_ = tuple(
        (name, ctypes.c_long) for name in ("every", "every_ns", "after", "after_ns")
    )
