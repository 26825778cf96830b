"""Locks with which several workers divide the trials of a sweep among themselves."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from praxis_lite.core.errors import ConfigError


class Claims(contextlib.AbstractContextManager):
    """The trials that this process has claimed, which are released at exit.

    Each claim is a POSIX lock on a byte of `sweep.claims`, which works across the hosts that mount
    a shared file system. The kernel releases the locks when the process ends, in any way, so the
    trial of a killed worker is free again.

    Args:
      directory: Directory of the sweep.
      is_shared: Whether other processes may claim trials at the same time. If False, no lock is
        taken.
    """

    def __init__(self, directory: Path, *, is_shared: bool):
        self._path, self._is_shared = directory / "sweep.claims", is_shared
        self._numbers: set[int] = set()
        # POSIX locks end when any descriptor of the file is closed, so it is opened only once.
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666) if is_shared else -1

    def __exit__(self, *exc_info: object) -> None:
        if self._is_shared:
            os.close(self._file)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Context manager in which no other process chooses a trial."""
        self._lock(fcntl.LOCK_EX, 0)
        try:
            yield
        finally:
            self._lock(fcntl.LOCK_UN, 0)

    def claim(self, number: int) -> bool:
        """Claims a trial; returns False if this or another process has already claimed it."""
        if number in self._numbers or not self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB, number + 1):
            return False
        self._numbers.add(number)
        return True

    def release(self, number: int) -> None:
        """Releases the claim on a trial."""
        self._numbers.remove(number)
        self._lock(fcntl.LOCK_UN, number + 1)

    def _lock(self, kind: int, byte: int) -> bool:
        """Changes the lock on a byte; returns False if another process has locked it.

        Raises:
          ConfigError: The file system does not support locks.
        """
        if not self._is_shared:
            return True
        try:
            fcntl.lockf(self._file, kind, 1, byte)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise ConfigError(
                f"{self._path} cannot be locked ({error.strerror}), but the workers of a sweep "
                "divide the trials with POSIX locks. Mount the file system with locks (on Lustre, "
                "with the option flock), or run the sweep without --worker."
            ) from error
        return True
