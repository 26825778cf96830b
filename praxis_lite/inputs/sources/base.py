"""Base classes of sources, which provide random access to examples in files."""

import abc
import contextlib
import dataclasses
import functools
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import xxhash

from praxis_lite.core.errors import ConfigError, require_choice
from praxis_lite.host.optional_packages import NeedsPackage
from praxis_lite.host.places import is_url
from praxis_lite.inputs.sources.cache import locked
from praxis_lite.inputs.sources.faults import FAULTS, BadExample
from praxis_lite.inputs.sources.files.paths import Make, make_files, matching_files

Example = Mapping[str, Any]
_EXAMPLES_PER_PART = 8_192
# Up to this number of files, each file has separate parts. If there are more files, those smaller
# than _SMALL_FILE bytes are grouped into parts of at most _MAX_GROUP_SIZE bytes.
_MAX_SEPARATE_FILES, _SMALL_FILE, _MAX_GROUP_SIZE = 100, 1 << 20, 16 << 20
# Block size in bytes and maximum number of blocks in the digest of a file that is read in place.
_BLOCK, _MAX_BLOCKS = 1 << 16, 64


class Part(NamedTuple):
    """A contiguous range of examples, the unit of work when all examples are read in parallel.

    Attributes:
      start: Index of the first example.
      stop: Index after the last example.
      name: Identifier of the contents, which changes when the files change.
    """

    start: int
    stop: int
    name: str


def ranges_of_parts(num_examples: int) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) for consecutive parts that cover `num_examples` examples."""
    for start in range(0, num_examples, _EXAMPLES_PER_PART):
        yield start, min(start + _EXAMPLES_PER_PART, num_examples)


def picklable_state(instance: Any, *cached: str) -> dict[str, Any]:
    """Returns the attributes of a dataclass to pickle for a worker process.

    Open files and other cached properties are omitted; the worker opens the files again.

    Args:
      instance: The dataclass instance.
      cached: Names of cached properties to include if they have been computed.
    """
    names = {*(field.name for field in dataclasses.fields(instance)), *cached}
    return {name: value for name, value in vars(instance).items() if name in names}


class Source(NeedsPackage, abc.ABC):
    """A random-access sequence of examples, each a dict.

    A source is a Grain random access data source, so `grain.MapDataset.source` accepts it.
    Constructors only store their settings; files are read by `check` and later methods.

    Attributes:
      skip: Names of faults (keys of FAULTS). Examples with such a fault are skipped and counted;
        other faults raise an error.
    """

    skip: tuple[str, ...] = ()

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of examples, including those with faults in `skip`."""

    @abc.abstractmethod
    def __getitem__(self, index: int) -> Example:
        """Returns an example. Raises BadExample with the location if the example is invalid."""

    @property
    @abc.abstractmethod
    def location(self) -> str:
        """The location of the data for messages: the globs of the files, or a folder."""

    @abc.abstractmethod
    def where(self, index: int) -> str:
        """Returns the location of an example for messages, such as "file, row 7"."""

    @abc.abstractmethod
    def parts(self) -> list[Part]:
        """Returns consecutive parts that cover all examples."""

    @abc.abstractmethod
    def cache_folder(self) -> str:
        """Returns the folder in which copies, tokens and rows of the examples are cached."""

    @abc.abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Returns JSON that identifies the examples, without machine-specific paths."""

    def contains_location(self, where: str) -> bool:
        """Returns whether a location, in the format of `where`, belongs to this source."""
        return where.startswith(self.location)

    def classes_of_labels(self) -> dict[str, tuple[str, ...]]:
        """Returns the class names of each label, keyed by the label's name; {} if unknown."""
        return {}

    def first_of_files(self) -> np.ndarray:
        """Returns the index of each file's first example, then the number of examples, as int64.

        By default, all examples count as one file.
        """
        return np.array([0, len(self)])

    def check(self) -> None:
        """Opens the files. Raises ConfigError if they are damaged or contain no examples."""
        super().check()
        for fault in self.skip:
            require_choice(f"{type(self).__name__}.skip", fault, FAULTS)

    def map_part(
        self, part: Part, function: Callable[[Example, int], Any], left_out: Counter[str]
    ) -> Iterator[tuple[int, Any]]:
        """Applies a function to the examples in a part, except examples with faults in `skip`.

        Args:
          part: Range of examples.
          function: Function of (example, index) that returns a value, or a string with the reason
            to skip the example.
          left_out: Counter of skipped examples, keyed by fault or reason. It is updated in place.

        Yields:
          (index, value) for each example that is not skipped.
        """
        for index in range(part.start, part.stop):
            try:
                value = function(self[index], index)
            except BadExample as error:
                if error.fault not in self.skip:
                    raise
                value = error.fault
            if isinstance(value, str):
                left_out[value] += 1
            else:
                yield index, value


class FileState(NamedTuple):
    """The size in bytes and modification time of a file, to detect changes."""

    size: int
    mtime_ns: int


def file_state(path: str) -> FileState:
    """Returns the state of a file. Raises ConfigError if the file does not exist."""
    try:
        stat = os.stat(path)
    except OSError as error:
        raise unreadable_file(path, error) from None
    return FileState(stat.st_size, stat.st_mtime_ns)


def unreadable_file(path: str, error: OSError) -> ConfigError:
    """Returns the error for a file that is missing or unreadable."""
    return ConfigError(
        f"The file {path} cannot be read: {error.strerror or error}. Restore it, or exclude it "
        "from `files`."
    )


@dataclasses.dataclass(eq=False)
class GlobSource(Source):
    """Base class for sources that read the files matching glob patterns.

    Args:
      files: Comma-separated globs; `**` and `~` are expanded.
      skip: Names of faults (keys of FAULTS). Examples with such a fault are skipped and counted;
        other faults raise an error.
      cache_dir: Folder for data derived from the files. If None, `.praxis_lite` next to the first
        file.
    """

    files: str
    _: dataclasses.KW_ONLY
    skip: tuple[str, ...] = ()
    cache_dir: str | None = None

    @property
    def location(self) -> str:
        return self.files

    @functools.cached_property
    def paths(self) -> list[str]:
        """The matching files, sorted by name. Raises ConfigError if there are none."""
        return [
            path
            for path in matching_files(self.files, type(self).__name__)
            if ".praxis_lite" not in path.split(os.sep)
        ]

    @functools.cached_property
    def states(self) -> list[FileState]:
        """The state of each file when the source was first used."""
        return [file_state(path) for path in self.paths]

    def require_unchanged(self, file: int) -> None:
        """Raises ConfigError if file number `file` is missing or has changed since first use."""
        path, expected, actual = self.paths[file], self.states[file], file_state(self.paths[file])
        if actual != expected:
            sizes = f"{expected.size:,} bytes then and {actual.size:,} bytes now"
            raise ConfigError(
                f"{path} has changed since it was first read ({sizes}; modification times are also "
                "compared). Restore the file, or launch the job again to check whether its data "
                "still matches the checkpoint."
            )

    def cache_folder(self) -> str:
        if self.cache_dir is not None:
            return os.path.expanduser(self.cache_dir)
        return os.path.join(os.path.dirname(self.paths[0]), ".praxis_lite")

    def contains_location(self, where: str) -> bool:
        return where.startswith(tuple(self.paths))

    def __getstate__(self) -> dict[str, Any]:
        # Include the paths, so that worker processes use the same files as the parent.
        return picklable_state(self, "paths", "states")


@dataclasses.dataclass(eq=False)
class RowsOfFiles(GlobSource):
    """Base class of sources whose files contain several rows each.

    Rows are numbered across all files.

    Args:
      files: Comma-separated globs; `**` and `~` are expanded.
      skip: Names of faults (keys of FAULTS). Examples with such a fault are skipped and counted.
      cache_dir: Folder for data derived from the files. If None, `.praxis_lite` next to the first
        file.
      make: Function that creates the files if no files match. It is called with a temporary folder
        and either writes files there, or returns the examples for the single file specified by
        `files`. Once complete, the files are moved to the folder of the first glob, without
        overwriting existing files. If None, an error is raised if no files match.
    """

    _: dataclasses.KW_ONLY
    make: Make | None = None

    @property
    @abc.abstractmethod
    def counts(self) -> list[int]:
        """The number of examples in each file."""

    @functools.cached_property
    def digests(self) -> list[str]:
        """The hex XXH3 of each file's size and of up to 64 evenly spaced blocks."""
        return [file_digest(path, _MAX_BLOCKS) for path in self.paths]

    @functools.cached_property
    def paths(self) -> list[str]:
        """The matching files, sorted by name; `make` creates them first if there are none."""
        try:
            return matching_files(self.files, type(self).__name__)
        except ConfigError:
            if self.make is None or is_url(self.files):
                raise
        folder = os.path.dirname(os.path.expanduser(self.files.split(",")[0].strip())) or "."
        with locked(os.path.join(folder, ".praxis_lite")):
            # Look again: another process may have created the files before this process acquired
            # the lock.
            with contextlib.suppress(ConfigError):
                return matching_files(self.files, type(self).__name__)
            _log.info("creating %s", self.files)
            make_files(self.files, folder, self.make)
        return matching_files(self.files, type(self).__name__)

    @functools.cached_property
    def first_numbers(self) -> np.ndarray:
        """int64[files + 1]: the index of each file's first example, then the number of examples."""
        _ = self.states  # Record the states before the files are read, to detect later changes.
        return np.cumsum([0, *self.counts], dtype=np.int64)

    def check(self) -> None:
        super().check()
        if not len(self):
            raise ConfigError(
                f"{type(self).__name__}: {self.files!r} contains no examples ({len(self.paths)} "
                "files, all empty). Change `files`, or remove the source."
            )

    def first_of_files(self) -> np.ndarray:
        return self.first_numbers

    def __len__(self) -> int:
        return int(self.first_numbers[-1])

    def file_and_row(self, index: int) -> tuple[int, int]:
        """Returns the zero-based indices of an example's file and of its row in that file."""
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        file = int(np.searchsorted(self.first_numbers, index, side="right")) - 1
        return file, int(index - self.first_numbers[file])

    def where(self, index: int) -> str:
        file, row = self.file_and_row(index)
        return f"{self.paths[file]}, row {row}"

    def parts(self) -> list[Part]:
        parts, first = [], 0
        for files in self._file_groups():
            # Include the modification time: the digest of a large file covers only some blocks.
            names = [
                f"{os.path.basename(self.paths[file])[:60]}.{self.digests[file][:12]}."
                f"{self.states[file].mtime_ns:x}"
                for file in files
            ]
            name, count = names[0], sum(self.counts[file] for file in files)
            if len(files) > 1:
                name = f"files.{xxhash.xxh3_64_hexdigest(repr(names).encode())}"
            for start, stop in ranges_of_parts(count):
                parts.append(Part(first + start, first + stop, f"{name}.{start}"))
            first += count
        return parts

    def _file_groups(self) -> list[list[int]]:
        """Returns the indices of the files that share parts; only small files share parts."""
        files = range(len(self.paths))
        if len(files) <= _MAX_SEPARATE_FILES:
            return [[file] for file in files]
        groups: list[list[int]] = []
        group_size = math.inf  # The size of the last group; infinite if it is closed.
        for file in files:
            size = self.states[file].size
            if size < _SMALL_FILE and group_size + size <= _MAX_GROUP_SIZE:
                groups[-1].append(file)
                group_size += size
            else:
                groups.append([file])
                group_size = size if size < _SMALL_FILE else math.inf
        return groups

    def fingerprint(self) -> dict[str, Any]:
        names = [os.path.basename(path) for path in self.paths]
        counts = Counter(names)
        return {
            "source": type(self).__name__,
            "skip": sorted(self.skip),
            **self.settings(),
            "files": {
                name if counts[name] == 1 else f"{number}/{name}": digest
                for number, (name, digest) in enumerate(zip(names, self.digests, strict=True))
            },
        }

    def settings(self) -> dict[str, Any]:
        """Returns additional settings for the fingerprint; {} by default."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return picklable_state(self, "paths", "states", "counts", "digests")


def file_digest(path: str, max_blocks: int | None = None) -> str:
    """Returns the hex XXH3 of a file's size and bytes.

    Args:
      path: Path of the file.
      max_blocks: Number of evenly spaced 64 KiB blocks to read from a larger file; if None, the
        complete file is read.
    """
    size = os.path.getsize(path)
    digest = xxhash.xxh3_128(str(size).encode())
    with open(path, "rb") as file:
        if max_blocks is None or size <= max_blocks * _BLOCK:
            while block := file.read(1 << 20):
                digest.update(block)
            return digest.hexdigest()
        for number in range(max_blocks):
            file.seek((size - _BLOCK) * number // (max_blocks - 1))
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()


_log = logging.getLogger(__name__)
