"""Locks a job directory, so that two training runs cannot delete each other's checkpoints."""

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

_LOCKED_ERRORS = (errno.EWOULDBLOCK, errno.EACCES)
# Retry, because `is_training` in another process holds the lock for a moment.
_TRIES, _RETRY_SECONDS = 5, 0.02


class JobLock(contextlib.AbstractContextManager):
    """Context manager that locks a directory for training.

    It uses `flock` on the hidden file `.training`, which contains the PID and host of the process
    that holds the lock. The lock is released if the process dies. The file is never removed,
    because a lock on a removed file has no effect. On file systems without locks, a note is printed
    and training continues without a lock.

    Args:
      directory: The job directory.
      note: Function that prints a line.
      is_shared: Whether to take a shared lock. Workers of elastic jobs take shared locks, because a
        suspended worker would hold an exclusive lock forever. These workers are coordinated by
        their supervisors.
    """

    def __init__(self, directory: Path, note: Callable[[str], None], *, is_shared: bool = False):
        self._path, self._note = directory / ".training", note
        self._kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
        self._file = -1

    def __enter__(self) -> "JobLock":
        """Raises ConfigError, with the host and PID, if another process is training there."""
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._lock()
        except OSError as error:
            holder = os.pread(self._file, 1000, 0).decode(errors="replace").strip()
            self._close()
            if error.errno not in _LOCKED_ERRORS:  # A file system without locks.
                self._note(
                    f"note: {self._path.parent} could not be locked ({error.strerror}): make sure "
                    "that no other process trains in it."
                )
                return self
            raise ConfigError(
                f"job_log_dir={self._path.parent} is in use by another process that trains or "
                f"creates a job: {holder or 'it has not written its name yet'}. Wait until it "
                "ends, stop it (kill PID saves its step), or choose a different directory."
            ) from None
        with contextlib.suppress(OSError):  # The disk may be full; the lock is taken anyway.
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        _entered_locks.add(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _entered_locks.discard(self)
        self._close()

    def _lock(self) -> None:
        for tries_left in reversed(range(_TRIES)):
            try:
                return fcntl.flock(self._file, self._kind | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _LOCKED_ERRORS or not tries_left:
                    raise
                time.sleep(_RETRY_SECONDS)

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def is_training(directory: Path) -> bool:
    """Returns whether a process is training in a directory; False if locks are unsupported."""
    try:
        file = os.open(directory / ".training", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _LOCKED_ERRORS
    finally:
        # This also releases the lock, if it was acquired.
        os.close(file)
    return False


_entered_locks: set[JobLock] = set()


def _release_in_child() -> None:
    for lock in list(_entered_locks):
        lock.__exit__()


# A forked process inherits the lock, and might outlive the training.
os.register_at_fork(after_in_child=_release_in_child)
