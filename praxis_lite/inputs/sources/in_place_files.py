"""Base class of sources that read files in place and open them on first use."""

import abc
import collections
import dataclasses
import functools
import resource
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import xxhash

from praxis_lite.core.errors import require
from praxis_lite.host.atomic_files import user_cache
from praxis_lite.inputs.sources.base import FileState, RowsOfFiles, picklable_state
from praxis_lite.inputs.sources.bounded_files import BoundedFiles

# Use at most a quarter of the file descriptors that the process may open.
_MAX_OPEN = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
_MAX_OPEN = 16_384 if _MAX_OPEN == resource.RLIM_INFINITY else max(16, _MAX_OPEN // 4)


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

    @functools.cached_property
    def bounded(self) -> BoundedFiles | None:
        """The files in the store if `cache_bytes` is set, else None. Lists the store."""
        if self.cache_bytes is None:
            return None
        return BoundedFiles(
            type(self).__name__,
            self.files,
            self.written_before,
            self.cache_bytes,
            _MAX_OPEN // 2,
            self.cache_folder(),
        )

    def opened(self, file: int) -> Any:
        """Returns the rows of file number `file`, and keeps recently opened files open."""
        if self.bounded is not None:
            return self.bounded.opened(file, self.open_file)
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
        if self.bounded is not None:
            return self.bounded.counts(self.open_file, self.num_rows)

        def count(path: str) -> int:
            return self.num_rows(self.open_file(path), path)

        with ThreadPoolExecutor(self.num_counting_threads) as pool:
            return list(pool.map(count, self.paths))

    # Lists of files in a store come from `bounded`, lists of local files from the base class.

    @functools.cached_property
    def paths(self) -> list[str]:
        return super().paths if self.bounded is None else self.bounded.paths

    @functools.cached_property
    def states(self) -> list[FileState]:
        return super().states if self.bounded is None else self.bounded.states

    @functools.cached_property
    def digests(self) -> list[str]:
        """Hashes of the ETags of files in a store, or digests of local files."""
        return super().digests if self.bounded is None else self.bounded.digests

    def cache_folder(self) -> str:
        if self.cache_bytes is None or self.cache_dir is not None:
            return super().cache_folder()
        name = f"bounded-{xxhash.xxh3_64_hexdigest(self.files.encode())}"
        return str(user_cache() / "stores" / name)

    def check(self) -> None:
        if self.bounded is None:
            require(
                self.written_before is None,
                f"{type(self).__name__}.written_before",
                self.written_before,
                "None, because cache_bytes is not set",
            )
        else:
            self.bounded.check_sizes()
        super().check()

    def __getstate__(self) -> dict[str, Any]:
        return picklable_state(self, "paths", "states", "counts", "digests", "bounded")
