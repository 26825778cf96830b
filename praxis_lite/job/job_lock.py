"""Locks a job directory, so that two training runs cannot delete each other's checkpoints.

A local directory is locked with `flock`. In an object store, the lock is a lease: an object that
its holder replaces every few seconds with a conditional write. Another process may take the lease
after it has seen the same version for LEASE_SECONDS, so the clocks of hosts are not compared. The
holder writes and deletes the job's objects only if the last successful renewal was sent less than
half of this time ago. It checks this before each request, because it may have been suspended.

In an elastic job, the first worker of each generation takes the lease from earlier generations
immediately, and then waits until their workers can no longer write.
"""

import abc
import contextlib
import dataclasses
import errno
import fcntl
import itertools
import json
import logging
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError, Error, PeerLost
from praxis_lite.host.object_stores import ObjectChanged, StorePath
from praxis_lite.job.processes.addresses import refuses_connections
from praxis_lite.job.processes.exits import end_now
from praxis_lite.job.processes.membership import Membership

__all__ = ("LEASE_SECONDS", "JobLock", "Lease", "LeaseOfFirst", "is_leased", "is_locked")

_LOCKED_ERRORS = (errno.EWOULDBLOCK, errno.EACCES)
# Retry, because `is_locked` in another process holds the lock for a moment.
_TRIES, _RETRY_SECONDS = 5, 0.02
_NAME = ".training"
LEASE_SECONDS = 30.0
_RENEW_SECONDS = 5.0
_CHECK_SECONDS = 180.0  # Maximum time that `Lease.check` waits for a renewal.
_FREE = b"{}"  # Content of a lease without a holder.


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
        self._path, self._note = directory / _NAME, note
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
                f"creates a job: {holder or 'its PID is not known yet'}. Wait until it "
                "ends, stop it (`kill PID` saves its step), or choose a different directory."
            ) from None
        with contextlib.suppress(OSError):  # A full disk does not affect the lock.
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


class _Lease(contextlib.AbstractContextManager):
    """Base class of the lease in the first process of a job, and in its other processes.

    Args:
      folder: The job's folder.
      membership: The role of this process in an elastic job, or None.

    Attributes:
      token: Identifies the holder.
    """

    def __init__(self, folder: StorePath, membership: Membership | None = None):
        self._folder, self._membership = folder, membership
        self._object = dataclasses.replace(folder / _NAME, guard=None)
        self._renewed = -math.inf  # Time at which the last successful renewal was sent.
        self.token = secrets.token_hex(8)

    def check(self) -> None:
        """Waits until the last renewal is recent, so that no other process can take the lease soon.

        This is the `StorePath.guard` of the job's files.

        Raises:
          ConfigError: The lease could not be renewed within _CHECK_SECONDS.
        """
        deadline = time.monotonic() + _CHECK_SECONDS
        while _seconds() > self._renewed + LEASE_SECONDS / 2:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"job_log_dir={self._folder}: the lease could not be renewed for "
                    f"{_CHECK_SECONDS:.0f} s, and another process may train there. Check the "
                    "network; the same command then resumes the job."
                )
            self._wait_for_renewal()

    @abc.abstractmethod
    def _wait_for_renewal(self) -> None:
        """Waits for a moment. Sets `_renewed` if no other thread does."""

    def _read(self) -> tuple[Mapping[str, Any], str]:
        """Returns the holder, {} if there is none, and the version, "create" if there is none."""
        try:
            content, status = self._object.read_version()
        except FileNotFoundError:
            return {}, "create"
        return json.loads(content), status.version


class Lease(_Lease):
    """Context manager that holds a lease on a folder in an object store.

    A thread renews the lease. If another process has taken it, for example because this process was
    suspended, this process exits immediately, without saving. If the store cannot be reached,
    `check` blocks until the lease is renewed. A killed process leaves its lease behind. On the same
    host, the next launch takes this lease immediately; on another host, or in another container, it
    first waits for LEASE_SECONDS.
    """

    def __init__(self, folder: StorePath, membership: Membership | None = None):
        super().__init__(folder, membership)
        # Other requests are retried for minutes, which is longer than the lease.
        self._object = dataclasses.replace(self._object, is_quick=True)
        self._number = itertools.count()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_stopped, daemon=True, name="lease")

    def __enter__(self) -> "Lease":
        """Raises ConfigError, with the host and PID, if another process is training there.

        In an elastic job, it raises PeerLost instead.
        """
        may_write = self._take()
        self._thread.start()
        if may_write:
            time.sleep(LEASE_SECONDS / 2 + _RENEW_SECONDS)
        return self

    def take_if_free(self) -> bool:
        """Takes the lease, like `__enter__`, and returns True, or False if a process holds it."""
        holder, _ = self._read()
        if holder and not _has_ended(holder) and is_leased(self._folder):
            return False
        try:
            self.__enter__()
        except ConfigError as error:
            _log.debug("the lease was not taken: %s", error)
            return False
        return True

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases the lease."""
        self._stopped.set()
        self._thread.join()
        try:
            # The object is not deleted, because a repeated request could delete the next lease.
            holder, version = self._read()
            if holder.get("token") == self.token:
                with contextlib.suppress(ObjectChanged):
                    self._object.write_bytes(_FREE, version)
        except ConfigError as error:
            _log.warning(
                "the lease could not be released; it expires in %g s: %s", LEASE_SECONDS, error
            )

    def _wait_for_renewal(self) -> None:
        time.sleep(min(0.1, _RENEW_SECONDS))

    def _write(self, version: str) -> None:
        """Replaces a version. Raises ObjectChanged if another process holds the lease."""
        sent = _seconds()
        # Make each version's content different, because S3 derives the version from the content.
        holder = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "pid_namespace": _pid_namespace(),
            "token": self.token,
            "renewal": next(self._number),
        }
        if self._membership is not None:
            holder["generation"] = self._membership.generation
            holder["supervisor"] = self._membership.supervisor
        content = json.dumps(holder).encode()
        try:
            self._version = self._object.write_bytes(content, version)
        except ObjectChanged:
            # The answer to an earlier write, of this or another call, may have been lost.
            found, found_version = self._read()
            if found.get("token") != self.token:
                raise
            return self._write(found_version)
        self._renewed = sent

    def _take(self) -> bool:
        """Takes the lease once its holder has ended, or has not renewed it for LEASE_SECONDS.

        The lease of an earlier generation is taken immediately.

        Returns:
          Whether the previous holder may still write, until it notices that it lost the lease.

        Raises:
          ConfigError: The holder has renewed the lease, or another process has taken it.
          PeerLost: The same, in an elastic job.
        """
        seen = None
        while True:
            holder, version = self._read()
            if seen is None:  # A slow first read does not count.
                deadline = time.monotonic() + LEASE_SECONDS
            elif seen != version and holder and not self._succeeds(holder):
                raise self._in_use(holder)
            seen = version
            is_free = not holder or time.monotonic() > deadline or self._has_ended(holder)
            if is_free or self._succeeds(holder):
                with contextlib.suppress(ObjectChanged):
                    self._write(version)
                    return not is_free
            time.sleep(_RENEW_SECONDS / 5)

    def _succeeds(self, holder: Mapping[str, Any]) -> bool:
        """Returns whether the holder belongs to an earlier generation than this process."""
        own = self._membership
        return own is not None and holder.get("generation", own.generation) < own.generation

    def _has_ended(self, holder: Mapping[str, Any]) -> bool:
        """Returns whether it is certain that the holder has ended.

        A worker of this elastic job has ended if its supervisor has ended. Other jobs may be on a
        different network, with the same addresses.
        """
        return _has_ended(holder) or (
            self._succeeds(holder) and refuses_connections(holder["supervisor"])
        )

    def _in_use(self, holder: Mapping[str, Any]) -> Error:
        kind = ConfigError if self._membership is None else PeerLost
        return kind(
            f"job_log_dir={self._folder} is in use by another process that trains or creates a "
            f"job: process {holder.get('pid')} on {holder.get('host')}. Wait until it ends, stop "
            "it (`kill PID` saves its step), or choose a different directory."
        )

    def _renew_until_stopped(self) -> None:
        while not self._stopped.wait(_RENEW_SECONDS):
            try:
                self._write(self._version)
            except ObjectChanged:
                _log.error(
                    "job_log_dir=%s was taken over by another process, because this process did "
                    "not renew its lease in time. This process exits without saving.",
                    self._folder,
                )
                status = 1 if self._membership is None else self._membership.lost_status
                end_now(status, "lost its lease on job_log_dir")
            except (ConfigError, OSError) as error:
                _log.warning("the lease on job_log_dir could not be renewed; retrying: %s", error)


class LeaseOfFirst(_Lease):
    """The lease of a job's first process, in the job's other processes, which set its `token`.

    `check` waits until it sees that the lease is renewed. Nothing is written.
    """

    def __init__(self, folder: StorePath, membership: Membership | None = None):
        super().__init__(folder, membership)
        self._last_read = "", -math.inf  # The version, and the time at which the read was sent.

    def __exit__(self, *exc_info: object) -> None:
        """Does nothing, because the first process releases the lease."""

    def _wait_for_renewal(self) -> None:
        sent = _seconds()
        holder, version = self._read()
        if holder.get("token") != self.token:
            kind = ConfigError if self._membership is None else PeerLost
            raise kind(
                f"job_log_dir={self._folder} was taken over by another process, because the job's "
                "first process did not renew its lease in time. This process writes no more files."
            )
        last_version, last_sent = self._last_read
        self._last_read = version, sent
        if version == last_version:
            time.sleep(_RENEW_SECONDS / 5)
        else:  # It was written after the previous read.
            self._renewed = last_sent


def _seconds() -> float:
    """Returns the time of a clock that also runs while the system is suspended."""
    # On Linux, CLOCK_MONOTONIC stops.
    clock = time.CLOCK_BOOTTIME if sys.platform == "linux" else time.CLOCK_MONOTONIC
    return time.clock_gettime(clock)


def _has_ended(holder: Mapping[str, Any]) -> bool:
    """Returns whether the holder was a process on this host that no longer exists."""
    namespace = holder.get("pid_namespace")
    if not namespace or namespace != _pid_namespace() or holder.get("pid") == os.getpid():
        return False
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return True
    except (OSError, TypeError):
        pass
    return False


def _pid_namespace() -> str:
    """Identifies the processes that this process can see; "" if unknown.

    Containers may have the same host name, but do not see each other's processes.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def is_leased(folder: StorePath) -> bool:
    """Returns whether a process is training in a folder.

    Compares the time of the last renewal, from the clock of the store, with the clock of this host.
    """
    lease = folder / _NAME
    try:
        is_expired = time.time() - lease.stat().st_mtime > LEASE_SECONDS
        return not is_expired and lease.read_bytes() != _FREE
    except FileNotFoundError:
        return False


def is_locked(directory: Path) -> bool:
    """Returns whether a process is training in a directory; False if locks are unsupported."""
    try:
        file = os.open(directory / _NAME, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _LOCKED_ERRORS
    finally:
        # This also releases the lock if it was acquired.
        os.close(file)
    return False


_entered_locks: set[JobLock] = set()


def _release_in_child() -> None:
    for lock in list(_entered_locks):
        lock.__exit__()


# A forked process inherits the lock, and might run longer than the training.
os.register_at_fork(after_in_child=_release_in_child)

_log = logging.getLogger(__name__)
