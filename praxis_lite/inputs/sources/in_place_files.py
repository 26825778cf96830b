"""Base class of sources that read files in place and open them on first use."""

import abc
import collections
import contextlib
import dataclasses
import datetime
import functools
import logging
import math
import os
import resource
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import xxhash

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.host.atomic_files import user_cache
from praxis_lite.host.bounded_copies import BoundedCopies, StoredFile
from praxis_lite.host.object_stores import is_store_url
from praxis_lite.host.places import stored_files
from praxis_lite.inputs.sources import cache
from praxis_lite.inputs.sources.base import FileState, RowsOfFiles, picklable_state
from praxis_lite.inputs.sources.files.paths import nothing_matches

# Use at most a quarter of the file descriptors that the process may open.
_MAX_OPEN = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
_MAX_OPEN = 16_384 if _MAX_OPEN == resource.RLIM_INFINITY else max(16, _MAX_OPEN // 4)
_NUM_THREADS = 16  # Number of threads that read files in a store to count their rows.
# Bytes at both ends of a file from which rows are counted without downloading the file.
_HEAD, _TAIL = 1 << 16, 1 << 20


@dataclasses.dataclass(eq=False)
class OpenedFiles(RowsOfFiles):
    """Base class of sources over files whose format allows random access to rows.

    Args:
      cache_bytes: Maximum total size in bytes of the local copies of files in an object store.
        Files are downloaded when they are needed, and the least recently used copies are deleted.
        All processes of a host share the copies. If None, all files are downloaded before training.
      written_before: Time in ISO 8601 with an offset, such as "2026-11-30T12:00:00Z". Files in the
        store that were written at this time or later are not used. Requires `cache_bytes`.
    """

    _: dataclasses.KW_ONLY
    cache_bytes: int | None = None
    written_before: str | None = None
    num_counting_threads: ClassVar[int] = 1  # For local files.

    @abc.abstractmethod
    def open_file(self, path: str) -> Any:
        """Opens a file and returns its rows; garbage collection of the rows closes the file."""

    @abc.abstractmethod
    def num_rows(self, opened: Any, path: str) -> int:
        """Returns the number of rows in the result of `open_file(path)`."""

    def opened(self, file: int) -> Any:
        """Returns the rows of file number `file`, and keeps recently opened files open."""
        if self.cache_bytes is not None:
            return self._copies.opened(self.stored[file], self.open_file)
        rows = self._open.get(file)
        if rows is None:
            self.require_unchanged(file)
            rows = self._open[file] = self.open_file(self.paths[file])
            while len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)
        return rows

    @functools.cached_property
    def _open(self) -> collections.OrderedDict[int, Any]:
        return collections.OrderedDict()

    @functools.cached_property
    def counts(self) -> list[int]:
        if self.cache_bytes is None:
            with ThreadPoolExecutor(self.num_counting_threads) as pool:
                return list(pool.map(self._count, self.paths))
        name = f"counts.{xxhash.xxh3_128_hexdigest(repr(self.stored).encode())}"

        def count(_: list[int]) -> None:
            with ThreadPoolExecutor(_NUM_THREADS) as pool:
                counts = list(pool.map(self._count_stored, self.stored))
            cache.write(self.cache_folder(), name, {"counts": counts}, {})

        return cache.entries(self.cache_folder(), [name], count)[0].values["counts"]

    def _count(self, path: str) -> int:
        return self.num_rows(self.open_file(path), path)

    def _count_stored(self, file: StoredFile) -> int:
        """Counts the rows in a file, and downloads only both ends of the file if possible.

        The number of rows is stored at the beginning (.npy) or at the end (ArrayRecord) of a file.
        It is therefore read from a local file of the same size in which only both ends are filled.
        If this file cannot be read (.npz, because its checksums are wrong), the complete file is
        downloaded.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, file.path.name)
            head, tail = min(_HEAD, file.size), max(_HEAD, file.size - _TAIL)
            with open(path, "wb") as ends:
                for start, stop in ((0, head), (tail, file.size)):
                    if start < stop:
                        ends.seek(start)
                        ends.write(file.path.read_range(start, stop))
            with contextlib.suppress(ConfigError):
                return self._count(path)
        return self.num_rows(self._copies.opened(file, self.open_file), str(file.path))

    # The following members behave differently if `cache_bytes` is set.

    @functools.cached_property
    def stored(self) -> list[StoredFile]:
        """The files in the store, sorted by URL. Raises ConfigError if there are none."""
        owner = type(self).__name__
        files = set()
        for pattern in map(str.strip, self.files.split(",")):
            require(
                is_store_url(pattern),
                f"{owner}.files",
                pattern,
                "gs:// or s3:// URLs, because cache_bytes is set",
                "Omit cache_bytes for local files. For hf:// URLs, use FromIterableDataset.",
            )
            found = stored_files(pattern)
            if not found:
                raise nothing_matches(pattern, owner)
            files.update(found)
        used = [file for file in files if file.mtime_ns < self._max_mtime_ns]
        if not used:
            raise ConfigError(
                f"{owner}.written_before is {self.written_before!r}, but all {len(files)} files of "
                f"{self.files!r} were written later. Set a later time, or omit it."
            )
        if len(used) < len(files):
            _log.info(
                "%s: %d of %d files are not used, because they were not written before %s",
                self.files,
                len(files) - len(used),
                len(files),
                self.written_before,
            )
        return sorted(used, key=lambda file: str(file.path))

    @property
    def _max_mtime_ns(self) -> float:
        """The modification time from which on files are not used, in nanoseconds."""
        if self.written_before is None:
            return math.inf
        with contextlib.suppress(ValueError):
            time = datetime.datetime.fromisoformat(self.written_before)
            if time.tzinfo is not None:
                return time.timestamp() * 1e9
        raise ConfigError(
            f"{type(self).__name__}.written_before is {self.written_before!r}; expected a time in "
            "ISO 8601 with an offset, such as '2026-11-30T12:00:00Z'."
        )

    @functools.cached_property
    def _copies(self) -> BoundedCopies:
        assert self.cache_bytes is not None
        folder = Path(self.cache_folder(), "copies")
        return BoundedCopies(folder, self.cache_bytes, _MAX_OPEN // 2)

    @functools.cached_property
    def paths(self) -> list[str]:
        if self.cache_bytes is None:
            return super().paths
        return [str(file.path) for file in self.stored]

    @functools.cached_property
    def states(self) -> list[FileState]:
        if self.cache_bytes is None:
            return super().states
        return [FileState(file.size, file.mtime_ns) for file in self.stored]

    @functools.cached_property
    def digests(self) -> list[str]:
        """Hashes of the ETags of files in a store, or digests of local files."""
        if self.cache_bytes is None:
            return super().digests
        return [xxhash.xxh3_128_hexdigest(file.tag.encode()) for file in self.stored]

    def cache_folder(self) -> str:
        if self.cache_bytes is None or self.cache_dir is not None:
            return super().cache_folder()
        name = f"bounded-{xxhash.xxh3_64_hexdigest(self.files.encode())}"
        return str(user_cache() / "stores" / name)

    def check(self) -> None:
        owner = type(self).__name__
        if self.cache_bytes is None:
            require(
                self.written_before is None,
                f"{owner}.written_before",
                self.written_before,
                "None, because cache_bytes is not set",
            )
        else:
            largest = max(self.stored, key=lambda file: file.size)
            if largest.size > self.cache_bytes:
                raise ConfigError(
                    f"{owner}.cache_bytes is {self.cache_bytes:,}, but {largest.path} has "
                    f"{largest.size:,} bytes. Increase cache_bytes, or write smaller files."
                )
        super().check()

    def max_bytes_of_rows(self, first_of_files: np.ndarray, num_rows: int) -> int:
        """Returns an upper bound on the total size of the files that contain consecutive rows.

        The bound holds for any order of the files.

        Args:
          first_of_files: int64[files + 1], the number of selected rows before each file, then their
            total.
          num_rows: Number of consecutive rows.
        """
        counts, sizes = np.diff(first_of_files), np.array([file.size for file in self.stored])
        counts, sizes = np.sort(counts[counts > 0]), np.sort(sizes[counts > 0])[::-1]
        # The files between the first and the last file have at most `num_rows - 2` rows.
        num_between = int(np.searchsorted(np.cumsum(counts), num_rows - 2, side="right"))
        return int(sizes[: num_between + 2].sum())

    def prefetch(self, now: np.ndarray, later: np.ndarray) -> None:
        """Starts to download the files of the examples that are read next; closes all other files.

        Args:
          now: Indices of the examples that are read first.
          later: Indices of the examples that are read after these.
        """
        numbers: dict[int, None] = {}
        for rows in (now, later):
            files = np.searchsorted(self.first_numbers, rows, side="right") - 1
            numbers.update(dict.fromkeys(np.unique(files).tolist()))
        self._copies.prefetch([self.stored[number] for number in numbers])

    def __getstate__(self) -> dict[str, Any]:
        stored = ("stored",) if self.cache_bytes is not None else ()
        return picklable_state(self, "paths", "states", "counts", "digests", *stored)


_log = logging.getLogger(__name__)
