"""Copies a job's files, except checkpoints, between an object store and a local folder.

Jobs append to metrics.jsonl and to logs, but object stores do not support appending. Jobs therefore
write local files, and a thread uploads the files that have changed. A file is stored in parts of
4 MiB, whose concatenation is the file: `metrics.jsonl`, `metrics.jsonl.part1`, ... Only the last
part of a growing file is uploaded again.
"""

import contextlib
import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import xxhash

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.object_stores import StorePath

_PART_BYTES = 1 << 22
_UPLOAD_SECONDS = 10.0
# Readers access checkpoints directly. They do not need TensorBoard summaries, and the files of
# supervisors.
_NOT_DOWNLOADED = ("checkpoints/", "tensorboard/", "elastic/")
_PART = re.compile(r"(.+)\.part([1-9][0-9]*)")


class Mirror:
    """Downloads and uploads the files of a job. The methods are thread-safe.

    Args:
      store: The job's folder in the store.
      folder: An existing local folder.
    """

    def __init__(self, store: StorePath, folder: Path):
        self.store, self.folder = store, folder
        self._lock = threading.Lock()
        # For each file: its size and mtime at the last transfer, and the digests of its parts.
        self._seen: dict[str, tuple[int, int]] = {}
        self._digests: dict[str, list[str]] = {}
        self._tags: dict[str, str] = {}  # The versions of the downloaded objects.

    def names(self) -> list[str]:
        """Returns the sorted names of the files and folders in the job's folder in the store."""
        return sorted({name.partition("/")[0] for name in self.store.files()})

    def download(self, *, newest: bool = False) -> None:
        """Downloads the file parts that have changed in the store since the last download.

        Args:
          newest: Whether to wait for a listing that is not outdated, which requires a write.
        """
        with self._lock:
            parts: dict[str, dict[int, tuple[str, int]]] = {}
            files = self.store.newest_files() if newest else self.store.files()
            for name, status in files.items():
                if not _is_local(name) and not name.startswith(_NOT_DOWNLOADED):
                    match = _PART.fullmatch(name)
                    file, number = (match[1], int(match[2])) if match else (name, 0)
                    parts.setdefault(file, {})[number] = status.tag, status.st_size
            for file, by_number in parts.items():
                self._download(file, by_number)

    def _download(self, file: str, parts: dict[int, tuple[str, int]]) -> None:
        path, end = self.folder / file, None
        digests = self._digests.setdefault(file, [])
        for number in range(len(parts)):  # Ignore parts after a missing part.
            if number not in parts:
                break
            part, (tag, size) = _part_name(file, number), parts[number]
            if self._tags.get(part) != tag:
                try:
                    content, status = (self.store / part).read_version()
                except FileNotFoundError:  # It was deleted after it was listed.
                    break
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "r+b" if path.exists() else "w+b") as out:
                    out.seek(number * _PART_BYTES)
                    out.write(content)
                digests[number : number + 1] = [_digest(content)]
                self._tags[part], size = status.tag, len(content)
            end = number * _PART_BYTES + size
        if end is not None:
            os.truncate(path, end)
            self._seen[file] = _state(path)

    def upload(self) -> None:
        """Uploads the file parts that have changed locally, and deletes removed files."""
        with self._lock:
            existing = set()
            for path in sorted(self.folder.rglob("*")):
                name = str(path.relative_to(self.folder))
                if not _is_local(name) and path.is_file():
                    existing.add(name)
                    with contextlib.suppress(FileNotFoundError):
                        self._upload(name, path)
            for name in self._digests.keys() - existing:
                self._delete_parts(name, 0)
                del self._digests[name]
                self._seen.pop(name, None)

    def _upload(self, name: str, path: Path) -> None:
        state = _state(path)
        if self._seen.get(name) == state:
            return
        # If the file has become shorter, delete its last parts first. If that is interrupted, the
        # remaining parts are a prefix of the previous version.
        self._delete_parts(name, max(1, -(-state[0] // _PART_BYTES)))
        digests = self._digests.setdefault(name, [])
        with open(path, "rb") as file:
            for number in range(max(1, -(-state[0] // _PART_BYTES))):
                content = file.read(_PART_BYTES)
                digest = _digest(content)
                if digests[number : number + 1] != [digest]:
                    (self.store / _part_name(name, number)).write_bytes(content)
                    digests[number : number + 1] = [digest]
        self._seen[name] = state

    def _delete_parts(self, name: str, num_parts: int) -> None:
        """Deletes all parts of a file except the first `num_parts`, in reverse order."""
        digests = self._digests.get(name, [])
        while len(digests) > num_parts:
            (self.store / _part_name(name, len(digests) - 1)).unlink()
            digests.pop()

    @contextlib.contextmanager
    def uploading(self) -> Iterator[None]:
        """Context manager that uploads changed files every ten seconds, and at exit.

        Raises:
          ConfigError: The last upload failed. Earlier failures are logged and retried.
        """
        stopped = threading.Event()

        def upload_until_stopped() -> None:
            while not stopped.wait(_UPLOAD_SECONDS):
                try:
                    self.upload()
                except (ConfigError, OSError) as error:
                    _log.warning("the job's files could not be uploaded; retrying: %s", error)

        thread = threading.Thread(target=upload_until_stopped, name="uploads", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()
            self.upload()


def _is_local(name: str) -> bool:
    """Returns whether a file is hidden and not mirrored, such as the lock or an incomplete file."""
    return any(part.startswith(".") for part in name.split("/"))


def _part_name(file: str, number: int) -> str:
    return f"{file}.part{number}" if number else file


def _digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def _state(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


_log = logging.getLogger(__name__)
