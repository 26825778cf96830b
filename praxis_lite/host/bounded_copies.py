"""Local copies of files in object stores, whose total size is bounded on each host.

All processes that use the same folder share the copies and the bound. The least recently used
copies are deleted to make room. A process holds a shared `flock` on each copy that it has open, so
no process deletes it; the kernel releases the locks of a process that is killed. A copy is
downloaded to a file with the suffix `.partial`, on which the downloading process holds an exclusive
lock. The name of a copy contains its size, so an unfinished download already counts in full.
"""

import collections
import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from praxis_lite.core.errors import ConfigError, format_bytes
from praxis_lite.host.atomic_files import not_written
from praxis_lite.host.object_stores import StorePath

_PARTIAL = ".partial"
_NUM_THREADS = 8  # Number of files that a process downloads in advance at the same time.
# A process that reads nothing for this long closes its copies, so that other processes can delete
# them. For example, it has only checked the data, or it waits for other processes of its job.
_IDLE_SECONDS = 20.0
_MAX_WAIT_SECONDS = 600.0  # Maximum time to wait for room for a file.


class StoredFile(NamedTuple):
    """A version of a file in an object store.

    Attributes:
      path: Path of the file.
      size: Size in bytes.
      mtime_ns: Time of the last modification, in nanoseconds.
      tag: ETag of the version.
    """

    path: StorePath
    size: int
    mtime_ns: int
    tag: str

    @property
    def name_of_copy(self) -> str:
        version = xxhash.xxh3_64_hexdigest(f"{self.path}\n{self.tag}".encode())
        return f"{version}-{self.size}-{self.path.name[-50:]}"


class _OpenCopy:
    """An open copy, with a shared lock that is held until garbage collection."""

    def __init__(self, lock: int, content: Any):
        self._lock, self.content = lock, content

    def __del__(self) -> None:
        self.content = None  # Close the file before other processes may delete it.
        os.close(self._lock)


class BoundedCopies:
    """Downloads files when they are needed, or in advance, and deletes unused copies.

    Args:
      folder: Folder of the copies.
      max_bytes: Maximum total size of the copies; no file may be larger.
      max_open: Maximum number of copies that this process keeps open.
    """

    def __init__(self, folder: Path, max_bytes: int, max_open: int):
        self._folder, self._max_bytes, self._max_open = folder, max_bytes, max_open
        # The copies that this process has open, keyed by name; the most recently used is last.
        self._open: collections.OrderedDict[str, _OpenCopy] = collections.OrderedDict()
        self._mutex = threading.Lock()
        self._used_at, self._closer = 0.0, threading.Thread()
        self._prefetched: Sequence[StoredFile] = ()  # Argument of the latest `prefetch`.

    def opened(self, file: StoredFile, open_file: Callable[[str], Any]) -> Any:
        """Returns `open_file(path of the copy)`, or the result of an earlier call.

        Raises:
          ConfigError: The file cannot be downloaded or has changed, or other processes have copies
            open that leave no room for it.
        """
        name = file.name_of_copy
        self._used_at = time.monotonic()
        with self._mutex:
            if name in self._open:
                self._open.move_to_end(name)
                return self._open[name].content
        copy = _OpenCopy(self._lock_of_copy(file), None)
        copy.content = open_file(str(self._folder / name))
        with self._mutex:
            # Another thread may have opened the copy in the meantime.
            copy = self._open.setdefault(name, copy)
            while len(self._open) > self._max_open:
                self._open.popitem(last=False)
            self._used_at = time.monotonic()
            if not self._closer.is_alive():
                self._closer = threading.Thread(target=self._close_when_idle, daemon=True)
                self._closer.start()
        return copy.content

    def _close_when_idle(self) -> None:
        while time.monotonic() - self._used_at < _IDLE_SECONDS:
            time.sleep(_IDLE_SECONDS / 10)
        with self._mutex:
            self._open.clear()
            self._closer = threading.Thread()  # The next copy starts another thread.

    def prefetch(self, files: Sequence[StoredFile]) -> None:
        """Starts to download the files that are needed next, and closes all other copies.

        Threads download the files in the given order, until there is no room for the next one.
        """
        if files and files == self._prefetched:
            return
        names = {file.name_of_copy for file in files}
        with self._mutex:
            self._prefetched = files
            for name in self._open.keys() - names:
                del self._open[name]
        for _ in range(min(_NUM_THREADS, len(files))):
            threading.Thread(target=self._download_all, args=(files,), daemon=True).start()

    def _download_all(self, files: Sequence[StoredFile]) -> None:
        names = {file.name_of_copy for file in files}
        for file in files:
            if self._prefetched is not files:  # `prefetch` was called again.
                return
            if not (self._folder / file.name_of_copy).exists():
                # `opened` repeats the download, and raises its error.
                with contextlib.suppress(ConfigError, OSError):
                    if not self._download(file, keep=names):
                        return

    def _lock_of_copy(self, file: StoredFile) -> int:
        """Downloads a file if there is no copy, and returns a shared lock on the copy."""
        path = self._folder / file.name_of_copy
        deadline = time.monotonic() + _MAX_WAIT_SECONDS
        while True:
            if (lock := _shared_lock(path)) is not None:
                os.utime(path)  # The time of its last use.
                return lock
            if self._download(file):
                # Wait until another thread or process has downloaded it.
                if (other := _shared_lock(path.with_name(path.name + _PARTIAL))) is not None:
                    os.close(other)
                continue
            with self._mutex:
                if self._open:  # Make room by closing this process's least recently used copy.
                    self._open.popitem(last=False)
                    continue
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{file.path}: {format_bytes(file.size)} do not fit into cache_bytes="
                    f"{self._max_bytes:,}, because other processes have used the copies in "
                    f"{self._folder} for {_MAX_WAIT_SECONDS:.0f} s. Increase cache_bytes, or "
                    "set a different cache_dir for each job and dataset."
                )
            time.sleep(0.05)

    def _download(self, file: StoredFile, keep: Collection[str] = ()) -> bool:
        """Downloads a file, unless a process is downloading it already.

        Args:
          file: The file.
          keep: Names of copies that may not be deleted to make room.

        Returns:
          False if there is no room.
        """
        path = self._folder / file.name_of_copy
        partial = path.with_name(path.name + _PARTIAL)
        try:
            with self._locked():
                # A partial file that is not locked was left by a killed process.
                if path.exists() or partial.exists() and not _delete(partial):
                    return True
                if not self._has_room(file.size, keep):
                    return False
                lock = os.open(partial, os.O_RDWR | os.O_CREAT, 0o666)
                fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                try:
                    tag = file.path.download(partial)
                except FileNotFoundError:
                    raise ConfigError(
                        f"{file.path} was deleted after it was listed. Restore it, or exclude it "
                        "from `files`."
                    ) from None
                size = os.fstat(lock).st_size
                if (tag, size) != (file.tag, file.size):
                    raise ConfigError(
                        f"{file.path} has changed since it was listed ({file.size:,} bytes and "
                        f"the tag {file.tag} then; {size:,} bytes and the tag {tag} now). Restore "
                        "the file, or launch the job again to check whether its data still matches "
                        "the checkpoint."
                    )
                os.fsync(lock)
                with self._locked():
                    os.rename(partial, path)
            finally:
                os.close(lock)
        except OSError as error:
            raise not_written(path, error) from None
        return True

    def _has_room(self, size: int, keep: Collection[str]) -> bool:
        """Deletes unused copies, the least recently used first, until `size` bytes fit."""
        # Names of copies are VERSION-SIZE-NAME; the folder also contains the file "lock".
        names = [name for name in os.listdir(self._folder) if name.count("-") >= 2]
        names.sort(key=lambda name: (self._folder / name).stat().st_mtime_ns)
        total = sum(int(name.split("-")[1]) for name in names)
        for name in names:
            if total + size <= self._max_bytes:
                return True
            if name not in keep and _delete(self._folder / name):
                total -= int(name.split("-")[1])
        return total + size <= self._max_bytes

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Locks the folder, so that one process at a time creates, renames and deletes copies."""
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def _shared_lock(path: Path) -> int | None:
    """Returns a descriptor with a shared lock on a file, or None if the file does not exist."""
    try:
        lock = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    fcntl.flock(lock, fcntl.LOCK_SH)
    if os.fstat(lock).st_nlink:
        return lock
    os.close(lock)  # It was deleted before this process had the lock.
    return None


def _delete(path: Path) -> bool:
    """Deletes a file unless a process has locked it. Returns whether it was deleted."""
    lock = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
