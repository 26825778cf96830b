"""A single training at a time in a job's directory: two would delete each other's checkpoints."""

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from praxis_lite.core.errors import ConfigError

__all__ = ("JobLock", "is_training")

_HELD = (errno.EWOULDBLOCK, errno.EACCES)
# `is_training` holds the lock for a moment: a training that starts just then tries again.
_TRIES, _RETRY_SECONDS = 5, 0.02


class JobLock(contextlib.AbstractContextManager):
    """Holds the right to train in a directory while it is entered, or until the process dies.

    It is a lock (`flock`) on the hidden file `.training` there, which names its holder. The file is
    never removed: a lock on a removed file would keep no other process out. If the file system has
    no locks, `note` gets a line, and training continues without a lock.

    The processes of an elastic job share it (`is_shared`): one that is stopped would hold it for
    ever, and they have their own order (`praxis_tools/elastic`).
    """

    def __init__(
        self, directory: Path, note: Callable[[str], None], *, is_shared: bool = False
    ):
        self._path, self._note = directory / ".training", note
        self._kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
        self._file = -1

    def __enter__(self) -> "JobLock":
        """Raises ConfigError, with host and PID, if another process trains there."""
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._lock()
        except OSError as error:
            holder = os.pread(self._file, 1000, 0).decode(errors="replace").strip()
            self._close()
            if error.errno not in _HELD:  # A file system without locks.
                self._note(
                    f"note: {self._path.parent} could not be locked ({error.strerror}): see to it "
                    "that no second training is started there."
                )
                return self
            raise ConfigError(
                f"--job_log_dir={self._path.parent}: another process trains or begins a job, "
                f"{holder or 'whose name it has not written yet'}. Wait for its end, or end it "
                "(kill PID saves its step); or name another directory."
            ) from None
        with contextlib.suppress(OSError):  # A full disk: it holds the lock all the same.
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        _held.add(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _held.discard(self)
        self._close()

    def _lock(self) -> None:
        for tries_left in reversed(range(_TRIES)):
            try:
                return fcntl.flock(self._file, self._kind | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _HELD or not tries_left:
                    raise
                time.sleep(_RETRY_SECONDS)

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def is_training(directory: Path) -> bool:
    """Returns True if a process trains in a directory now, as far as the file system tells."""
    try:
        file = os.open(directory / ".training", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _HELD
    finally:
        os.close(file)
    return False


_held: set[JobLock] = set()


def _let_go() -> None:
    for lock in list(_held):
        lock.__exit__()


# A forked worker shares the lock, and would hold it longer than the training lives.
os.register_at_fork(after_in_child=_let_go)
