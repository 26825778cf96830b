"""The files of a source in an object store, read through local copies of bounded total size."""

import contextlib
import datetime
import functools
import logging
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.host.bounded_copies import BoundedCopies, StoredFile
from praxis_lite.host.object_stores import is_store_url
from praxis_lite.host.places import stored_files
from praxis_lite.inputs.sources import cache
from praxis_lite.inputs.sources.base import FileState
from praxis_lite.inputs.sources.files.paths import nothing_matches

_NUM_THREADS = 16  # Number of threads that read files to count their rows.
# Bytes at both ends of a file from which rows are counted without downloading the file.
_HEAD, _TAIL = 1 << 16, 1 << 20


class BoundedFiles:
    """The versions of files that a store lists when this object is created.

    Args:
      owner: Class name of the source, for messages.
      globs: Comma-separated globs of URLs.
      written_before: See `OpenedFiles`.
      cache_bytes: Maximum total size of the copies.
      max_open: Maximum number of copies that this process keeps open.
      cache_folder: Folder of the copies and of the numbers of rows.

    Attributes:
      stored: The files, sorted by URL.

    Raises:
      ConfigError: No files are used, a glob is not a URL, or `written_before` is not a time.
    """

    def __init__(
        self,
        owner: str,
        globs: str,
        written_before: str | None,
        cache_bytes: int,
        max_open: int,
        cache_folder: str,
    ):
        self.cache_bytes = cache_bytes
        self._owner, self._max_open, self._cache_folder = owner, max_open, cache_folder
        self.stored = _listed(owner, globs, written_before)

    @functools.cached_property
    def _copies(self) -> BoundedCopies:
        return BoundedCopies(Path(self._cache_folder, "copies"), self.cache_bytes, self._max_open)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_copies"}

    @property
    def paths(self) -> list[str]:
        return [str(file.path) for file in self.stored]

    @property
    def states(self) -> list[FileState]:
        return [FileState(file.size, file.mtime_ns) for file in self.stored]

    @property
    def digests(self) -> list[str]:
        """A hash of the ETag of each file."""
        return [xxhash.xxh3_128_hexdigest(file.tag.encode()) for file in self.stored]

    def opened(self, file: int, open_file: Callable[[str], Any]) -> Any:
        """Returns the rows of file number `file`, and keeps recently opened copies open."""
        return self._copies.opened(self.stored[file], open_file)

    def check_sizes(self) -> None:
        """Raises ConfigError if a file is larger than `cache_bytes`."""
        largest = max(self.stored, key=lambda file: file.size)
        if largest.size > self.cache_bytes:
            raise ConfigError(
                f"{self._owner}.cache_bytes is {self.cache_bytes:,}, but {largest.path} has "
                f"{largest.size:,} bytes. Increase cache_bytes, or write smaller files."
            )

    def counts(
        self, open_file: Callable[[str], Any], num_rows: Callable[[Any, str], int]
    ) -> list[int]:
        """Returns the number of rows in each file, and caches the numbers.

        Only both ends of a file are downloaded if possible. The number of rows is stored at the
        beginning (.npy) or at the end (ArrayRecord) of a file. It is therefore read from a local
        file of the same size in which only both ends are filled. If this file cannot be read (.npz,
        because its checksums are wrong), the complete file is downloaded.

        `open_file` and `num_rows` are those of `OpenedFiles`.
        """
        name = f"counts.{xxhash.xxh3_128_hexdigest(repr(self.stored).encode())}"

        def count(file: StoredFile) -> int:
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, file.path.name)
                head, tail = min(_HEAD, file.size), max(_HEAD, file.size - _TAIL)
                with open(path, "wb") as ends:
                    for start, stop in ((0, head), (tail, file.size)):
                        if start < stop:
                            ends.seek(start)
                            ends.write(file.path.read_range(start, stop))
                with contextlib.suppress(ConfigError):
                    return num_rows(open_file(path), path)
            return num_rows(self._copies.opened(file, open_file), str(file.path))

        def write(_: list[int]) -> None:
            with ThreadPoolExecutor(_NUM_THREADS) as pool:
                counts = list(pool.map(count, self.stored))
            cache.write(self._cache_folder, name, {"counts": counts}, {})

        return cache.entries(self._cache_folder, [name], write)[0].values["counts"]

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

    def prefetch(self, first_numbers: np.ndarray, examples: Sequence[np.ndarray]) -> None:
        """Starts to download the files of the examples that are read next; closes all other files.

        Args:
          first_numbers: int64[files + 1], the index of each file's first example, then the number
            of examples.
          examples: Arrays of indices of examples; those of the first array are read first.
        """
        numbers: dict[int, None] = {}
        for indices in examples:
            files = np.searchsorted(first_numbers, indices, side="right") - 1
            numbers.update(dict.fromkeys(np.unique(files).tolist()))
        self._copies.prefetch([self.stored[number] for number in numbers])


def _listed(owner: str, globs: str, written_before: str | None) -> list[StoredFile]:
    """Lists the files that match globs, sorted by URL. Raises ConfigError if there are none."""
    files = set()
    for pattern in map(str.strip, globs.split(",")):
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
    max_mtime_ns = math.inf if written_before is None else _nanoseconds(owner, written_before)
    used = [file for file in files if file.mtime_ns < max_mtime_ns]
    if not used:
        raise ConfigError(
            f"{owner}.written_before is {written_before!r}, but all {len(files)} files of "
            f"{globs!r} were written later. Set a later time, or omit it."
        )
    if len(used) < len(files):
        _log.info(
            "%s: %d of %d files are not used, because they were not written before %s",
            globs,
            len(files) - len(used),
            len(files),
            written_before,
        )
    return sorted(used, key=lambda file: str(file.path))


def _nanoseconds(owner: str, written_before: str) -> float:
    with contextlib.suppress(ValueError):
        time = datetime.datetime.fromisoformat(written_before)
        if time.tzinfo is not None:
            return time.timestamp() * 1e9
    raise ConfigError(
        f"{owner}.written_before is {written_before!r}; expected a time in ISO 8601 with an "
        "offset, such as '2026-11-30T12:00:00Z'."
    )


_log = logging.getLogger(__name__)
