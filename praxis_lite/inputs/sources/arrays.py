"""Files of NumPy arrays, of which an example is a row."""

import dataclasses
import functools
import zipfile
import zlib
from typing import Any

import numpy as np

from praxis_lite.errors import ConfigError
from praxis_lite.inputs.sources.base import Example, FileSource
from praxis_lite.inputs.sources.file_index import FileIndex, Made


@dataclasses.dataclass(eq=False)
class NpyFiles(FileSource):
    """The rows of .npy files, memory-mapped, or of the arrays of .npz files, read when needed.

    Args:
      name: what the array of a .npy file is called in an example.
    """

    name: str = "x"

    def index_file(self, path: str) -> Made:
        counts = {name: len(one) if one.ndim else 0 for name, one in self._arrays(path).items()}
        if len(set(counts.values())) != 1:
            raise ConfigError(
                f"{path} has arrays of {counts} rows; wanted are arrays of the same first "
                "dimension, of which an example is a row. Write them so."
            )
        return {"num_examples": next(iter(counts.values()))}, {}

    def example(self, index: FileIndex, row: int) -> Example:
        if index.path not in self._open:
            index.require_unchanged()
            self._open[index.path] = self._arrays(index.path)
        return {name: np.array(one[row]) for name, one in self._open[index.path].items()}

    @functools.cached_property
    def _open(self) -> dict[str, dict[str, np.ndarray]]:
        return {}

    def _arrays(self, path: str) -> dict[str, np.ndarray]:
        try:
            if not path.endswith(".npz") and not zipfile.is_zipfile(path):
                return {self.name: np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))}
            with open(path, "rb") as opened:
                file = np.load(opened, allow_pickle=False)
                if isinstance(file, np.ndarray):  # Of a wrong name.
                    return {self.name: file}
                return {name: file[name] for name in file.files}
        except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            raise ConfigError(
                f"{path} is no whole file of arrays ({error}). Write it with np.save or np.savez, "
                "of numbers, not objects; or leave it out of files."
            ) from None

    def settings(self) -> dict[str, Any]:
        return {"name": self.name}
