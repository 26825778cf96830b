"""Sources over NumPy files: each row of the arrays is an example."""

import dataclasses
import math
import tokenize
import zipfile
import zlib
from typing import IO, Any

import numpy as np

from praxis_lite.core.errors import ConfigError, few, format_bytes, shown
from praxis_lite.inputs.sources.base import Example, FileSource
from praxis_lite.inputs.sources.file_index import FileIndex, Made

_MAGIC = b"\x93NUMPY"
# Of damage NumPy raises whatever comes of evaluating a header.
_DAMAGED = (
    ValueError, OSError, EOFError, LookupError, TypeError, SyntaxError, MemoryError, RuntimeError,
    ArithmeticError, AttributeError, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)
# More, of so much less that is compressed, is taken for a bomb.
_MOST_UNPACKED, _MOST_TIMES = 1 << 30, 100


@dataclasses.dataclass(eq=False)
class NpyFiles(FileSource):
    """The rows of .npy files, memory-mapped, or of the arrays of .npz files, read when needed.

    Args:
      name: what the array of a .npy file is called in an example.
    """

    name: str = "x"

    def index_file(self, path: str) -> Made:
        counts = {name: len(item) if item.ndim else 0 for name, item in self._arrays(path).items()}
        if len(set(counts.values())) != 1:
            text = few([f"{name!r}: {count}" for name, count in counts.items()], 10)
            raise ConfigError(
                f"{path} has arrays of {{{shown(text, 500)}}} rows; wanted are arrays of the same "
                "first dimension, of which an example is a row. Write them so."
            )
        return {"num_examples": next(iter(counts.values()))}, {}

    def example(self, index: FileIndex, row: int) -> Example:
        return {name: np.array(item[row]) for name, item in self.opened(index).items()}

    def open_file(self, index: FileIndex) -> dict[str, np.ndarray]:
        arrays = self._arrays(index.path)
        for array in arrays.values():
            index.require_rows(len(array) if array.ndim else 0)
        return arrays

    def _arrays(self, path: str) -> dict[str, np.ndarray]:
        try:
            with open(path, "rb") as opened:
                if zipfile.is_zipfile(opened):
                    with zipfile.ZipFile(opened) as file:
                        return {
                            item.filename.removesuffix(".npy"): _member(file, item)
                            for item in file.infolist()
                        }
                opened.seek(0)
                if opened.read(len(_MAGIC)) != _MAGIC:
                    raise ValueError("it begins as neither .npy nor .npz")
            return {self.name: np.asarray(np.lib.format.open_memmap(path, mode="r"))}
        except _DAMAGED as error:
            raise ConfigError(
                f"{path} is no whole file of arrays ({shown(str(error), 300)}). Write it with "
                "np.save or np.savez, of numbers, not objects; or leave it out of files."
            ) from None

    def settings(self) -> dict[str, Any]:
        return {"name": self.name}


def _member(file: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """Reads an array of a .npz. Raises ValueError if its header gives another size than it has."""
    if info.file_size > _MOST_UNPACKED and info.file_size > _MOST_TIMES * info.compress_size:
        raise ValueError(
            f"{info.filename} has {format_bytes(info.file_size)} packed into "
            f"{format_bytes(info.compress_size)}; a file of zeros is written with np.savez"
        )
    with file.open(info) as member:
        size = _header_size(member)
    if size != info.file_size:
        raise ValueError(f"{info.filename} has {info.file_size:,} bytes; its header says {size:,}")
    with file.open(info) as member:
        return np.lib.format.read_array(member, allow_pickle=False)


def _header_size(member: IO[bytes]) -> int:
    """Returns the bytes of a file with such a header and the array that it describes."""
    version = np.lib.format.read_magic(member)
    read = (
        np.lib.format.read_array_header_1_0 if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = read(member)
    if dtype.hasobject:
        raise ValueError("it holds objects")
    return member.tell() + math.prod(shape) * dtype.itemsize
