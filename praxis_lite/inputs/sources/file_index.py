"""Index of a file of examples, cached beside it: their places, and a digest of the bytes.

An index is made once, and made again when its file has another size or another time of change. The
indexes of small files are cached together.
"""

import functools
import itertools
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import xxhash

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs.processes.all_cores import on_all_cores
from praxis_lite.inputs.sources import kept

_BLOCK = 1 << 20
_MOST_BLOCKS = 64  # Of a larger file so many blocks are hashed, evenly spread.
_FEW = 100
_SMALL, _MOST_TOGETHER = 1 << 20, 16 << 20  # Bytes.
_Item = TypeVar("_Item")
_State = tuple[int, int]  # Size and time of change.
Made = tuple[dict[str, Any], dict[str, np.ndarray]]


class FileIndex(NamedTuple):
    """Where the examples of a file lie.

    Attributes:
      digest: XXH3 of the file's bytes, in hex; of a file above 64 MiB, of its size and 64 blocks.
      values, arrays: what the source keeps; "num_examples" is among the values.
    """

    path: str
    digest: str
    state: _State
    values: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @property
    def num_examples(self) -> int:
        return self.values["num_examples"]

    def require_unchanged(self) -> None:
        """Raises ConfigError, with the name, if the file is gone or no longer what was indexed."""
        state = state_of(self.path)
        if state != self.state:
            raise ConfigError(
                f"{self.path} has changed while it was in use: its index is of {self.state[0]:,} "
                f"bytes, and it has {state[0]:,} now, or another time of change. Put the file "
                "back; or launch again, which makes the index anew and compares the data with "
                "the checkpoint's."
            )

    def require_rows(self, found: int, expected: int | None = None) -> None:
        """Raises ConfigError if the file, or a part of it, has not as many rows as expected.

        Args:
          expected: None: all examples of the index.
        """
        expected = self.num_examples if expected is None else expected
        if found != expected:
            raise ConfigError(
                f"{self.path} has {found:,} rows where {expected:,} are expected, as it says of "
                "itself or was indexed. Make or copy it again, or leave it out of files."
            )


def name_beside(path: str) -> str:
    """Returns a name for a file that is unique among files of all folders."""
    folder = os.fsencode(os.path.dirname(os.path.abspath(path)))
    where = xxhash.xxh3_64_hexdigest(folder)[:8]
    return f"{os.path.basename(path)}.{where}"


def indexes_of(
    paths: Sequence[str], folder: str, kind: str, make: Callable[[str], Made]
) -> list[FileIndex]:
    """Returns the index of each file, read from `folder`, or made, by all cores, and written there.

    Args:
      kind: of the source: indexes of two kinds of the same file are two.
      make: returns, of a path, the values and the arrays to keep.

    Raises:
      ConfigError: a file or the folder cannot be read or written; and what `make` raises.
    """

    states = [state_of(path) for path in paths]
    groups = small_together(list(zip(paths, states, strict=True)), lambda item: item[1][0])
    jobs = [_Job(folder, kind, tuple(path for path, _ in group)) for group in groups]

    def made(numbers: list[int]) -> None:
        missing = [jobs[number] for number in numbers]
        sizes = [sum(state[0] for _, state in groups[number]) for number in numbers]
        count = sum(len(job.paths) for job in missing)
        on_all_cores(functools.partial(_make, make), missing, sizes, f"indexing {count} files", "B")

    def is_current(number: int, item: kept.Kept) -> bool:
        every = _unpacked(item)
        return len(every) == len(groups[number]) and all(
            _is_of(values, state)
            for (values, _), (_, state) in zip(every, groups[number], strict=True)
        )

    result = kept.entries(folder, [job.name() for job in jobs], made, is_current)
    every = itertools.chain.from_iterable(map(_unpacked, result))
    return [
        FileIndex(path, values["digest"], tuple(values["state"]), values, arrays)
        for path, (values, arrays) in zip(paths, every, strict=True)
    ]


def small_together(items: Sequence[_Item], size_of: Callable[[_Item], int]) -> list[list[_Item]]:
    """Groups small neighbouring items into lists, in the same order.

    Thousands of small files so have some cached files, and not thousands. Up to 100 items are
    apart, so that only what is changed is made again.

    Args:
      size_of: returns the bytes of an item; below 1 MiB it is small, and a list has 16 MiB at most.
    """
    if len(items) <= _FEW:
        return [[item] for item in items]
    lists, size = [], math.inf  # Of the last list; infinite if nothing is to be added to it.
    for item in items:
        own = size_of(item)
        if own < _SMALL and size + own <= _MOST_TOGETHER:
            lists[-1].append(item)
            size += own
        else:
            lists.append([item])
            size = own if own < _SMALL else math.inf
    return lists


class _Job(NamedTuple):
    """Files that share one cache entry."""

    folder: str
    kind: str
    paths: tuple[str, ...]

    def name(self) -> str:
        names = [name_beside(path) for path in self.paths]
        if len(names) == 1:
            return f"{names[0]}.{self.kind}"
        return f"files.{xxhash.xxh3_64_hexdigest(repr(names).encode())}.{self.kind}"


def _make(make: Callable[[str], Made], job: _Job) -> None:
    old = kept.read(job.folder, job.name(), [])
    before = [values for values, _ in _unpacked(old)] if old is not None else []
    made = []
    for path, values in itertools.zip_longest(job.paths, before[: len(job.paths)]):
        state = state_of(path)
        if values is not None and not _is_of(values, state):
            _log.info("%s has changed; its index is made again", path)
        try:
            values, arrays = make(path)
        except OSError as error:
            raise unreadable(path, error) from None
        made.append(({"state": state, "digest": digest_of_file(path), **values}, arrays))
        if state_of(path) != state:
            raise ConfigError(f"{path} changed while its index was made. Launch again.")
    kept.write(job.folder, job.name(), *_packed(made))


def _packed(made: Sequence[Made]) -> Made:
    """Returns the values and arrays of files as those of one entry."""
    if len(made) == 1:
        return made[0]
    files, data, end = [], [np.empty(0, np.uint8)], 0
    for values, arrays in made:
        places = {}
        for key, array in arrays.items():
            data.append(np.frombuffer(array.tobytes(), np.uint8))
            places[key] = [array.dtype.str, list(array.shape), end, end + array.nbytes]
            end += array.nbytes
        files.append({"values": values, "arrays": places})
    return {"files": files}, {"data": np.concatenate(data)}


def _unpacked(item: kept.Kept) -> list[Made]:
    """Returns the values and arrays of each file of an entry."""
    if "files" not in item.values:
        return [(item.values, item.arrays)]
    data = item.arrays["data"]
    return [
        (file["values"], {
            key: data[start:stop].view(dtype).reshape(shape)
            for key, (dtype, shape, start, stop) in file["arrays"].items()
        })
        for file in item.values["files"]
    ]


def _is_of(values: Mapping[str, Any], state: _State) -> bool:
    """Returns True if these are an index's values of a file with this size and time of change."""
    return (
        values.get("state") == list(state)
        and isinstance(values.get("digest"), str)
        and type(values.get("num_examples")) is int
        and values["num_examples"] >= 0
    )


def digest_of_file(path: str) -> str:
    """Returns XXH3, in hex, of a file's size and bytes; of 64 blocks of it above 64 MiB."""
    size = os.path.getsize(path)
    digest = xxhash.xxh3_128(str(size).encode())
    places = range(0, size, _BLOCK)
    if len(places) > _MOST_BLOCKS:
        places = [(size - _BLOCK) * k // (_MOST_BLOCKS - 1) for k in range(_MOST_BLOCKS)]
    with open(path, "rb") as file:
        for place in places:
            file.seek(place)
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def state_of(path: str) -> _State:
    """Returns a file's size and time of change. Raises ConfigError if it is gone."""
    try:
        result = os.stat(path)
    except OSError as error:
        raise unreadable(path, error) from None
    return result.st_size, result.st_mtime_ns


def unreadable(path: str, error: OSError) -> ConfigError:
    """Returns the error for a file that is gone, or may not be read."""
    return ConfigError(
        f"The file {path} cannot be read: {error.strerror or error}. Put it back, or leave it out "
        "of files."
    )


_log = logging.getLogger(__name__)
