"""What is known of a file of examples, kept beside it: where they lie, and a digest of its bytes.

An index is made once, and made again when its file has another size or another time of change.
"""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from praxis_lite.errors import ConfigError
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
        found = _state(self.path)
        if found != self.state:
            raise ConfigError(
                f"{self.path} has changed while it was in use: its index is of {self.state[0]:,} "
                f"bytes, and it has {found[0]:,} now, or another time of change. Put the file "
                "back; or launch again, which makes the index anew and compares the data with "
                "the checkpoint's."
            )


def name_beside(path: str) -> str:
    """Returns what a file is called in a folder of files with any folder of their own."""
    where = xxhash.xxh3_64_hexdigest(os.path.dirname(os.path.abspath(path)).encode())[:8]
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
    found = [_kept(folder, kind, path) for path in paths]
    if None not in found:
        return found
    with kept.locked(folder):
        # Another process may have made some by now.
        found = [_kept(folder, kind, path) for path in paths]
        missing = [path for path, one in zip(paths, found, strict=True) if one is None]
        sizes = [os.path.getsize(path) for path in missing]
        on_all_cores(
            _Make(folder, kind, make), missing, sizes, f"indexing {len(missing)} files", "B"
        )
        found = [one or _kept(folder, kind, path) for path, one in zip(paths, found, strict=True)]
    for path, one in zip(paths, found, strict=True):
        if one is None:
            raise ConfigError(f"{path} changed while its index was made. Launch again.")
    return found


class _Make(NamedTuple):
    folder: str
    kind: str
    make: Callable[[str], Made]

    def __call__(self, path: str) -> None:
        state = _state(path)
        old = kept.read(self.folder, f"{name_beside(path)}.{self.kind}")
        if old is not None:
            _log.info("%s has changed; its index is made again", path)
        values, arrays = self.make(path)
        values = {"state": state, "digest": digest_of_file(path), **values}
        kept.write(self.folder, f"{name_beside(path)}.{self.kind}", values, arrays)


def _kept(folder: str, kind: str, path: str) -> FileIndex | None:
    """Returns what is kept of a file as it is now, or None."""
    state, found = _state(path), kept.read(folder, f"{name_beside(path)}.{kind}")
    if found is None or tuple(found[0]["state"]) != state:
        return None
    values, arrays = found
    return FileIndex(path, values["digest"], state, values, arrays)


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


def _state(path: str) -> _State:
    try:
        found = os.stat(path)
    except OSError as error:
        raise ConfigError(
            f"The file {path} cannot be read: {error.strerror}. Put it back, or leave it out of "
            "files."
        ) from None
    return found.st_size, found.st_mtime_ns


_log = logging.getLogger(__name__)
