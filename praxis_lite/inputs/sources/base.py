"""The interface of sources: examples by number, and faults by place."""

import abc
import contextlib
import dataclasses
import functools
import logging
import os
import resource
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import xxhash

from praxis_lite.core.errors import ConfigError, require_choice
from praxis_lite.inputs.sources import kept
from praxis_lite.inputs.sources.faults import FAULTS, BadExample
from praxis_lite.inputs.sources.file_index import (
    FileIndex,
    Made,
    indexes_of,
    small_together,
    unreadable,
)
from praxis_lite.inputs.sources.files.paths import Make, make_files, matching_files

Example = Mapping[str, Any]
# Examples that one process reads at a time when all are read.
_EXAMPLES_PER_PART = 8_192
# Of the open files that the system lets a process have, other parts of it need some.
_MOST_OPEN = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
_MOST_OPEN = 16_384 if _MOST_OPEN == resource.RLIM_INFINITY else max(16, _MOST_OPEN // 4)


class Part(NamedTuple):
    """Examples that follow each other, and a name, which is another where their bytes are."""

    start: int
    stop: int
    name: str


def ranges_of_parts(num_examples: int) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) of the parts of so many examples."""
    for start in range(0, num_examples, _EXAMPLES_PER_PART):
        yield start, min(start + _EXAMPLES_PER_PART, num_examples)


def settings_alone(one: Any, *others: str) -> dict[str, Any]:
    """Returns the state of a dataclass for a worker process, which opens and maps files anew.

    Args:
      others: attributes that are sent besides the fields, if they are set.
    """
    names = {*(field.name for field in dataclasses.fields(one)), *others}
    return {name: value for name, value in vars(one).items() if name in names}


class Source(abc.ABC):
    """Examples, each a dict by name, found by its number.

    That is what Grain calls a random access data source: `grain.MapDataset.source` takes one. A
    constructor only keeps its settings; files are looked at by `check` or later.

    Attributes:
      skip: names of FAULTS: examples with such a fault are left out and counted, not refused.
    """

    skip: tuple[str, ...] = ()

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of examples, with those that `skip` leaves out."""

    @abc.abstractmethod
    def __getitem__(self, index: int) -> Example:
        """Returns an example. Raises BadExample, which names its place."""

    @property
    @abc.abstractmethod
    def location(self) -> str:
        """Where the examples are, for messages: the globs of its files, or a folder."""

    @abc.abstractmethod
    def where(self, index: int) -> str:
        """Returns where an example stands, for messages: "file, row 7"."""

    @abc.abstractmethod
    def parts(self) -> list[Part]:
        """Returns the parts in which all examples are read once."""

    @abc.abstractmethod
    def cache_folder(self) -> str:
        """Returns the folder of caches: indexes, copies, tokens, rows."""

    @abc.abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Returns JSON that identifies the examples, without paths of this machine."""

    def has(self, where: str) -> bool:
        """Returns True if the place of an example, as messages have it, is in this source."""
        return where.startswith(self.location)

    def classes_of_labels(self) -> dict[str, tuple[str, ...]]:
        """Returns the names of the classes that labels count, by the labels' names; {} if unknown.
        """
        return {}

    def check(self) -> None:
        """Looks at the files. Raises ConfigError if there are no examples, or files are damaged."""
        for item in self.skip:
            require_choice(f"{type(self).__name__}.skip", item, FAULTS)

    def faults_of_files(self) -> dict[str, int]:
        """Returns how many faults of whole files are skipped, by name."""
        return {}

    def read(self, start: int, stop: int) -> Iterator[tuple[int, Example | BadExample]]:
        """Yields (number, example or BadExample) for a range, in order.

        Sources that read in order faster than by number override it.
        """
        for index in range(start, stop):
            try:
                yield index, self[index]
            except BadExample as error:
                yield index, error

    def made_of(
        self, part: Part, make: Callable[[Example, int], Any], left_out: Counter[str]
    ) -> Iterator[tuple[int, Any]]:
        """Yields (number, `make(example, number)`) of a part.

        Examples with a fault to `skip`, or of which a str is made, are counted by that instead.
        """
        for number, example in self.read(part.start, part.stop):
            try:
                if isinstance(example, BadExample):
                    raise example
                value = make(example, number)
            except BadExample as error:
                if error.fault not in self.skip:
                    raise
                value = error.fault
            if isinstance(value, str):
                left_out[value] += 1
            else:
                yield number, value


@dataclasses.dataclass(eq=False)
class GlobSource(Source):
    """Source over the files that globs name.

    Args:
      files: globs, separated by commas; `**` and `~` work.
      skip: names of FAULTS: examples with one are left out and counted. Without: an error.
      cache_dir: where indexes and what else is derived are kept. None: the folder `.praxis_lite`
        beside the first file.
    """

    files: str
    _: dataclasses.KW_ONLY
    skip: tuple[str, ...] = ()
    cache_dir: str | None = None

    @property
    def location(self) -> str:
        return self.files


@dataclasses.dataclass(eq=False)
class FileSource(GlobSource):
    """Source over files, each with an index.

    An index is made when it is first needed, made again where its file has changed, and compared
    with the file whenever that is opened. The number of an example is its place in the files,
    sorted by name.

    Args:
      files, skip, cache_dir: as of all sources of files.
      make: a function that is called if there are no files, with a folder: it writes them there, or
        returns the examples of the one file that `files` names. Whole, they are moved into the
        folder of the first glob, over no other file. None: no files are an error.
    """

    _: dataclasses.KW_ONLY
    make: Make | None = None

    @abc.abstractmethod
    def index_file(self, path: str) -> Made:
        """Indexes a file: returns JSON values, with "num_examples", and arrays.

        "truncated" among the values says why the file's end cannot be read.
        """

    def open_file(self, index: FileIndex) -> Any:
        """Opens a file, or its copy; it is closed with the last reference to what is returned.

        A subclass that calls `opened` overrides it.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def example(self, index: FileIndex, row: int) -> Example:
        """Returns an example of a file, counted from 0. Raises BadExample."""

    def opened(self, index: FileIndex) -> Any:
        """Returns the result of `open_file`; those of the last files are cached."""
        result = self._open.get(index.path)
        if result is None:
            index.require_unchanged()
            result = self._open[index.path] = self.open_file(index)
            while len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
        return result

    @functools.cached_property
    def _open(self) -> OrderedDict[str, Any]:
        return OrderedDict()

    @functools.cached_property
    def paths(self) -> list[str]:
        """The files, sorted by name. Raises ConfigError if there are none."""
        owner = type(self).__name__
        try:
            return matching_files(self.files, owner)
        except ConfigError:
            if self.make is None:
                raise
        folder = os.path.dirname(os.path.expanduser(self.files.split(",")[0].strip())) or "."
        with kept.locked(os.path.join(folder, ".praxis_lite")):
            with contextlib.suppress(ConfigError):  # Another process may have made them by now.
                return matching_files(self.files, owner)
            _log.info("making %s", self.files)
            make_files(self.files, folder, self.make)
        return matching_files(self.files, owner)

    @functools.cached_property
    def indexes(self) -> list[FileIndex]:
        """Index of each file. Raises BadExample for a truncated file, unless that is skipped."""
        result = indexes_of(self.paths, self.cache_folder(), type(self).__name__, self.index_file)
        for item in result:
            if "truncated" in item.values and "truncated" not in self.skip:
                raise BadExample(
                    "truncated", item.path, f"is cut off or damaged: {item.values['truncated']}",
                    "Make or copy the file again.",
                )
        return result

    @functools.cached_property
    def first_numbers(self) -> np.ndarray:
        """int64[files + 1]: the number of the first example of each file, and that of all."""
        return np.cumsum([0, *(index.num_examples for index in self.indexes)], dtype=np.int64)

    def cache_folder(self) -> str:
        if self.cache_dir is not None:
            return os.path.expanduser(self.cache_dir)
        return os.path.join(os.path.dirname(self.paths[0]), ".praxis_lite")

    def check(self) -> None:
        super().check()
        if not len(self):
            raise ConfigError(
                f"{type(self).__name__}: {self.files!r} has no examples "
                f"({len(self.paths)} files without any). Give files that have some, or leave the "
                "source out."
            )

    def faults_of_files(self) -> dict[str, int]:
        count = sum("truncated" in index.values for index in self.indexes)
        return {"truncated": count} if count else {}

    def __len__(self) -> int:
        return int(self.first_numbers[-1])

    def __getitem__(self, index: int) -> Example:
        file, row = self.place_of(index)
        try:
            return self.example(file, row)
        except OSError as error:
            raise unreadable(file.path, error) from None

    def place_of(self, index: int) -> tuple[FileIndex, int]:
        """Returns the file of an example, and its row there, counted from 0."""
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        file = int(np.searchsorted(self.first_numbers, index, side="right")) - 1
        return self.indexes[file], int(index - self.first_numbers[file])

    def where(self, index: int) -> str:
        file, row = self.place_of(index)
        return f"{file.path}, row {row}"

    def has(self, where: str) -> bool:
        return where.startswith(tuple(self.paths))

    def parts(self) -> list[Part]:
        result, first = [], 0
        for some in small_together(self.indexes, lambda index: index.state[0]):
            # A digest of a large file need not notice what its time of change does.
            names = [
                f"{os.path.basename(index.path)}.{index.digest[:12]}.{index.state[1]:x}"
                for index in some
            ]
            name, count = names[0], sum(index.num_examples for index in some)
            if len(some) > 1:
                name = f"files.{xxhash.xxh3_64_hexdigest(repr(names).encode())}"
            for start, stop in ranges_of_parts(count):
                result.append(Part(first + start, first + stop, f"{name}.{start}"))
            first += count
        return result

    def fingerprint(self) -> dict[str, Any]:
        names = [os.path.basename(path) for path in self.paths]
        counts = Counter(names)
        return {
            "source": type(self).__name__, "skip": sorted(self.skip), **self.settings(),
            "files": {
                name if counts[name] == 1 else f"{number}/{name}": index.digest
                for number, (name, index) in enumerate(zip(names, self.indexes, strict=True))
            },
        }

    def settings(self) -> dict[str, Any]:
        """Returns further settings for the fingerprint; {} unless overridden."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        # A worker process is told the paths, for they are agreed on.
        return settings_alone(self, "paths")


_log = logging.getLogger(__name__)
