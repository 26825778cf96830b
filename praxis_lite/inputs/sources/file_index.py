"""Index of a file of examples, cached beside it: their places, and a digest of the bytes.

An index is made once, and made again when its file has another size or another time of change.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs.processes.all_cores import on_all_cores
from praxis_lite.inputs.sources import kept

_BLOCK = 1 << 20
_MOST_BLOCKS = 64  # Of a larger file so many blocks are hashed, evenly spread.
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

    def made(numbers: list[int]) -> None:
        missing = [paths[number] for number in numbers]
        sizes = [os.path.getsize(path) for path in missing]
        on_all_cores(
            _Make(folder, kind, make), missing, sizes, f"indexing {len(missing)} files", "B"
        )

    result = kept.entries(
        folder, [f"{name_beside(path)}.{kind}" for path in paths], made,
        lambda number, item: _is_of(item.values, state_of(paths[number])),
    )
    return [
        FileIndex(path, one.values["digest"], tuple(one.values["state"]), one.values, one.arrays)
        for path, one in zip(paths, result, strict=True)
    ]


class _Make(NamedTuple):
    folder: str
    kind: str
    make: Callable[[str], Made]

    def __call__(self, path: str) -> None:
        state, name = state_of(path), f"{name_beside(path)}.{self.kind}"
        old = kept.read(self.folder, name, [])
        if old is not None and not _is_of(old.values, state):
            _log.info("%s has changed; its index is made again", path)
        try:
            values, arrays = self.make(path)
        except OSError as error:
            raise unreadable(path, error) from None
        values = {"state": state, "digest": digest_of_file(path), **values}
        if state_of(path) != state:
            raise ConfigError(f"{path} changed while its index was made. Launch again.")
        kept.write(self.folder, name, values, arrays)


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
