"""Returns the stacks of all threads in this process or in another process on the same host."""

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

__all__ = ("request_stacks", "install_stacks_handler", "stacks")

# The signal that makes a process write its stacks. `faulthandler` writes them in C, even while C
# code holds the GIL. `job/processes/signals.py` uses signals with names for other purposes.
_STACKS_SIGNAL = signal.SIGRTMIN + 3
_MAX_CHARS = 100_000


def stacks() -> str:
    """Returns the stacks of all threads except the calling thread, with the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    # Group threads with equal stacks, such as the idle threads of a pool.
    threads_by_stack: dict[str, list[str]] = {}
    main, calling = threading.main_thread().ident, threading.get_ident()
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if ident != calling:
            stack = "".join(traceback.format_stack(frame))
            threads_by_stack.setdefault(stack, []).append(names.get(ident, str(ident)))
    return "".join(
        f"{', '.join(sorted(threads))}:\n{stack}" for stack, threads in threads_by_stack.items()
    )


def install_stacks_handler() -> str:
    """Makes this process write its stacks to a file on request, and returns the file's path."""
    path = temporary_folder() / "stacks"
    # The file stays open, because the signal handler writes to its descriptor.
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    faulthandler.register(_STACKS_SIGNAL, file=descriptor, all_threads=True)
    return str(path)


def request_stacks(pid: int, path: str, seconds: float = 3.0) -> str:
    """Returns the stacks of another process on this host, or "" if it does not answer in time.

    Args:
      pid: Id of a process that has called `install_stacks_handler`.
      path: The path returned by that call.
      seconds: Maximum time to wait. A suspended process does not respond.
    """
    file = Path(path)
    try:
        before = file.stat().st_size
        os.kill(pid, _STACKS_SIGNAL)
        deadline, size = time.monotonic() + seconds, before
        while time.monotonic() < deadline:
            time.sleep(0.1)
            # The stacks are complete once the file has stopped growing.
            last, size = size, file.stat().st_size
            if before < last == size:
                break
        with file.open("rb") as opened:
            opened.seek(before)
            return opened.read(_MAX_CHARS).decode(errors="replace")
    except OSError:
        return ""


class GilAlarm(contextlib.AbstractContextManager):
    """Timer that, unless postponed, writes this process's stacks to standard error.

    It uses a timer of the Linux kernel, so it fires even while C code holds the GIL and no Python
    thread runs. On other systems, it does nothing.

    Args:
      seconds: Seconds until the timer fires.
    """

    def __init__(self, seconds: float):
        self._seconds, self._timer = seconds, ctypes.c_void_p()
        self._libc: ctypes.CDLL | None = None  # Set once the timer has been created.

    def __enter__(self) -> "GilAlarm":
        faulthandler.register(_STACKS_SIGNAL, file=2, all_threads=True)
        event = _Event(signo=_STACKS_SIGNAL, notify=0)  # SIGEV_SIGNAL.
        libc = ctypes.CDLL(None)
        # The function is missing outside Linux, and in glibc before 2.34.
        with contextlib.suppress(AttributeError):
            timer = ctypes.byref(self._timer)
            if libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), timer) == 0:
                self._libc = libc
        return self

    def postpone(self, seconds: float | None = None) -> None:
        """Restarts the timer with the given seconds (default: the constructor's); 0 cancels it."""
        if self._libc is not None:
            spec = _Timer(after=int(self._seconds if seconds is None else seconds))
            self._libc.timer_settime(self._timer, 0, ctypes.byref(spec), None)

    def __exit__(self, *exc_info: object) -> None:
        self.postpone(0)


class _Event(ctypes.Structure):
    """The C struct `sigevent` of Linux."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("_", ctypes.c_byte * 48),
    )


class _Timer(ctypes.Structure):
    """The C struct `itimerspec`: the interval, and the time until the timer fires."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every", "every_ns", "after", "after_ns"))
