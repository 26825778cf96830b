"""Last words before a library aborts this process, where Python gets no exception.

C++ aborts where memory or threads end; JAX's coordination service aborts a process that it refuses.
"""

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator

from praxis_lite.core.errors import format_bytes
from praxis_lite.host.host_memory import available_bytes
from praxis_lite.run.job.processes.exits import end_now

# With less than this left, memory is the likeliest reason: a thread alone takes 8 MiB and more.
_LITTLE_BYTES = 256 * 2**20

_words: list[Callable[[], None]] = []
_libc = ctypes.CDLL(None)
_libc.signal.argtypes, _libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p


@contextlib.contextmanager
def speaking_before_aborts(say: Callable[[], None]) -> Iterator[None]:
    """Calls `say` from the handler of SIGABRT, in any thread; when it returns, the abort goes on.

    Of several the last that was entered is called first.
    """
    _words.append(say)
    before = _libc.signal(signal.SIGABRT, ctypes.cast(_on_abort, ctypes.c_void_p))
    try:
        yield
    finally:
        _words.remove(say)
        _libc.signal(signal.SIGABRT, before)


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_abort(signum: int) -> None:
    for say in reversed(_words):
        say()


def say_that_memory_ended() -> None:
    """Ends the process with a paragraph, if there is little memory left for it."""
    left = available_bytes()
    if left < _LITTLE_BYTES:
        os.write(2, (
            f"error: a library aborted this process, most likely for want of memory: "
            f"{format_bytes(int(left))} are left here (a limit of the container or of the shell, "
            "ulimit -v, counts). Give it more, or make the batch or the model smaller.\n"
        ).encode())
        end_now(2)
