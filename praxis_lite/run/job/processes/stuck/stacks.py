"""The stacks of a process's threads: of this process, and of one that is asked for them."""

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from praxis_lite.run.job.processes.exits import temporary_folder

# It asks a worker of an elastic job for its stacks, also where C code keeps Python's lock.
_ASKS = signal.SIGUSR2
_MOST_CHARACTERS = 100_000


def stacks() -> str:
    """Returns the stacks of all threads but this, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    alike: dict[str, list[str]] = {}  # A pool's idle threads all wait at the same place.
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
