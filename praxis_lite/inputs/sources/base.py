"""The interface of sources: examples by their number, and the files they are read from."""

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
from praxis_lite.inputs.sources.cache import locked
from praxis_lite.inputs.sources.faults import FAULTS, BadExample
from praxis_lite.inputs.sources.files.paths import Make, make_files, matching_files

Example = Mapping[str, Any]
# Examples that one process reads at a time when all are read.
_EXAMPLES_PER_PART = 8_192
# Up to so many files have parts of their own; of more files, small ones share parts.
_FEW_FILES, _SMALL_FILE, _LARGEST_GROUP = 100, 1 << 20, 16 << 20  # The last two in bytes.
_BLOCK, _MOST_BLOCKS = 1 << 16, 64  # Of a file that is read in place, so many blocks are hashed.


class Part(NamedTuple):
    """Consecutive examples, under a name that changes whenever their files do."""

    start: int
    stop: int
    name: str


def ranges_of_parts(num_examples: int) -> Iterator[tuple[int, int]]:
    """Yields the (start, stop) of each part of `num_examples` examples."""
    for start in range(0, num_examples, _EXAMPLES_PER_PART):
        yield start, min(start + _EXAMPLES_PER_PART, num_examples)


def settings_alone(one: Any, *others: str) -> dict[str, Any]:
    """Returns the state of a dataclass for a worker process, which opens files itself.

    Args:
      others: attributes that are sent in addition to the fields, if they are set.
    """
    names = {*(field.name for field in dataclasses.fields(one)), *others}
    return {name: value for name, value in vars(one).items() if name in names}


class Source(NeedsPackage, abc.ABC):
    """Examples, each a dict by name, found by their number.

    `grain.MapDataset.source` takes one: it is what Grain calls a random access data source. A
    constructor only stores its settings; files are read by `check` or later.

    Attributes:
      skip: names of FAULTS: examples with such a fault are left out and counted, not refused.
    """

    skip: tuple[str, ...] = ()

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of examples, including those that `skip` leaves out."""

    @abc.abstractmethod
    def __getitem__(self, index: int) -> Example:
        """Returns an example. Raises BadExample, which names its place."""

    @property
    @abc.abstractmethod
    def location(self) -> str:
        """Where the examples are, for messages: the globs of its files, or a folder."""

    @abc.abstractmethod
    def where(self, index: int) -> str:
        """Returns the place of an example, for messages: "file, row 7"."""

    @abc.abstractmethod
    def parts(self) -> list[Part]:
        """Returns the parts in which all examples are read once."""

    @abc.abstractmethod
    def cache_folder(self) -> str:
        """Returns the folder that caches copies, tokens and rows of the examples."""

    @abc.abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Returns JSON that identifies the examples, without paths of this machine."""

    def has(self, where: str) -> bool:
        """Returns whether `where`, a place as given in messages, is in this source."""
        return where.startswith(self.location)

    def classes_of_labels(self) -> dict[str, tuple[str, ...]]:
        """Returns the class names of each label, by the label's name; {} if unknown."""
        return {}

    def check(self) -> None:
        """Opens the files. Raises ConfigError if there are no examples, or files are damaged."""
        super().check()
        for item in self.skip:
            require_choice(f"{type(self).__name__}.skip", item, FAULTS)

    def made_of(
        self, part: Part, make: Callable[[Example, int], Any], left_out: Counter[str]
    ) -> Iterator[tuple[int, Any]]:
        """Yields (number, `make(example, number)`) for the examples of a part.

        Examples with a fault to `skip`, and those for which `make` returns a str, are counted in
        `left_out` instead.
        """
        for number in range(part.start, part.stop):
            try:
                value = make(self[number], number)
            except BadExample as error:
                if error.fault not in self.skip:
                    raise
                value = error.fault
            if isinstance(value, str):
                left_out[value] += 1
            else:
                yield number, value


class FileState(NamedTuple):
    """Size in bytes and time of change of a file, which tell whether it changed."""

    size: int
    mtime_ns: int


def state_of(path: str) -> FileState:
    """Returns the state of a file. Raises ConfigError if it is gone."""
    try:
        result = os.stat(path)
    except OSError as error:
        raise unreadable(path, error) from None
    return FileState(result.st_size, result.st_mtime_ns)


def unreadable(path: str, error: OSError) -> ConfigError:
    """Returns the error for a file that is gone, or may not be read."""
    return ConfigError(
        f"The file {path} cannot be read: {error.strerror or error}. Put it back, or leave it out "
        "of files."
    )


@dataclasses.dataclass(eq=False)
class GlobSource(Source):
    """Source over the files that globs name.

    Args:
      files: globs, separated by commas; `**` and `~` work.
      skip: names of FAULTS: examples with one are left out and counted. Without: an error.
      cache_dir: the folder of what is derived from the files. None: the folder `.praxis_lite` next
        to the first file.
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
        """The files, sorted by name. Raises ConfigError if there are none."""
        return [
            path for path in matching_files(self.files, type(self).__name__)
            if ".praxis_lite" not in path.split(os.sep)
        ]

    @functools.cached_property
    def states(self) -> list[FileState]:
        """The state of each file when the source was first used."""
        return [state_of(path) for path in self.paths]

    def require_unchanged(self, file: int) -> None:
        """Raises ConfigError, with its name, if a file is gone or has changed since first use."""
        path, expected, actual = self.paths[file], self.states[file], state_of(self.paths[file])
        if actual != expected:
            raise ConfigError(
                f"{path} has changed while it was in use: it had {expected.size:,} bytes, and has "
                f"{actual.size:,} now, or another time of change. Put the file back; or launch "
                "again, which compares the data with the checkpoint's."
            )

    def cache_folder(self) -> str:
        if self.cache_dir is not None:
            return os.path.expanduser(self.cache_dir)
        return os.path.join(os.path.dirname(self.paths[0]), ".praxis_lite")

    def has(self, where: str) -> bool:
        return where.startswith(tuple(self.paths))

    def __getstate__(self) -> dict[str, Any]:
        # Worker processes use the files that the parent found.
        return settings_alone(self, "paths", "states")


@dataclasses.dataclass(eq=False)
class RowsOfFiles(GlobSource):
    """Source over files with rows; an example's number is its place in the files, sorted by name.

    Args:
      files, skip, cache_dir: as of all sources of files.
      make: a function that is called if there are no files, with a folder: it writes them there, or
        returns the examples of the one file that `files` names. When they are complete, they are
        moved into the folder of the first glob; existing files are not overwritten. None: no files
        are an error.
    """

    _: dataclasses.KW_ONLY
    make: Make | None = None

    @property
    @abc.abstractmethod
    def counts(self) -> list[int]:
        """The number of examples in each file."""

    @functools.cached_property
    def digests(self) -> list[str]:
        """XXH3 of each file, in hex: of its size, and of all or 64 evenly spread blocks."""
        return [digest_of_file(path, _MOST_BLOCKS) for path in self.paths]

    @functools.cached_property
    def paths(self) -> list[str]:
        """The files, sorted by name; `make` creates them first if there are none."""
        try:
            return matching_files(self.files, type(self).__name__)
        except ConfigError:
            if self.make is None:
                raise
        folder = os.path.dirname(os.path.expanduser(self.files.split(",")[0].strip())) or "."
        with locked(os.path.join(folder, ".praxis_lite")):
            with contextlib.suppress(ConfigError):  # Another process may have made them by now.
                return matching_files(self.files, type(self).__name__)
            _log.info("making %s", self.files)
            make_files(self.files, folder, self.make)
        return matching_files(self.files, type(self).__name__)

    @functools.cached_property
    def first_numbers(self) -> np.ndarray:
        """int64[files + 1]: the number of the first example of each file, and that of all."""
        _ = self.states  # From before the files are read.
        return np.cumsum([0, *self.counts], dtype=np.int64)

    def check(self) -> None:
        super().check()
        if not len(self):
            raise ConfigError(
                f"{type(self).__name__}: {self.files!r} has no examples "
                f"({len(self.paths)} files without any). Give files that have some, or leave the "
                "source out."
            )

    def __len__(self) -> int:
        return int(self.first_numbers[-1])

    def place_of(self, index: int) -> tuple[int, int]:
        """Returns the number of an example's file and its row there, both counted from 0."""
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        file = int(np.searchsorted(self.first_numbers, index, side="right")) - 1
        return file, int(index - self.first_numbers[file])

    def where(self, index: int) -> str:
        file, row = self.place_of(index)
        return f"{self.paths[file]}, row {row}"

    def parts(self) -> list[Part]:
        result, first = [], 0
        for files in self._groups():
            # With the time of change, for the digest of a large file covers blocks of it only.
            names = [
                f"{os.path.basename(self.paths[file])[:60]}.{self.digests[file][:12]}."
                f"{self.states[file].mtime_ns:x}"
                for file in files
            ]
            name, count = names[0], sum(self.counts[file] for file in files)
            if len(files) > 1:
                name = f"files.{xxhash.xxh3_64_hexdigest(repr(names).encode())}"
            for start, stop in ranges_of_parts(count):
                result.append(Part(first + start, first + stop, f"{name}.{start}"))
            first += count
        return result

    def _groups(self) -> list[list[int]]:
        """Returns the files whose parts are made together: thousands of small ones share some."""
        files = range(len(self.paths))
        if len(files) <= _FEW_FILES:
            return [[file] for file in files]
        groups, size = [], math.inf  # Of the last group; infinite if nothing may be added to it.
        for file in files:
            own = self.states[file].size
            if own < _SMALL_FILE and size + own <= _LARGEST_GROUP:
                groups[-1].append(file)
                size += own
            else:
                groups.append([file])
                size = own if own < _SMALL_FILE else math.inf
        return groups

    def fingerprint(self) -> dict[str, Any]:
        names = [os.path.basename(path) for path in self.paths]
        counts = Counter(names)
        return {
            "source": type(self).__name__, "skip": sorted(self.skip), **self.settings(),
            "files": {
                name if counts[name] == 1 else f"{number}/{name}": digest
                for number, (name, digest) in enumerate(zip(names, self.digests, strict=True))
            },
        }

    def settings(self) -> dict[str, Any]:
        """Returns further settings for the fingerprint; {} unless overridden."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return settings_alone(self, "paths", "states", "counts", "digests")


def digest_of_file(path: str, most_blocks: int | None = None) -> str:
    """Returns XXH3, in hex, of a file's size and bytes.

    Args:
      most_blocks: number of evenly spread blocks of 64 KiB that are read of a larger file; None:
        all of it.
    """
    size = os.path.getsize(path)
    digest = xxhash.xxh3_128(str(size).encode())
    with open(path, "rb") as file:
        if most_blocks is None or size <= most_blocks * _BLOCK:
            while block := file.read(1 << 20):
                digest.update(block)
            return digest.hexdigest()
        for block in range(most_blocks):
            file.seek((size - _BLOCK) * block // (most_blocks - 1))
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()


_log = logging.getLogger(__name__)
