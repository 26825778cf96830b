"""Sources over NumPy files: each row of the arrays is an example."""

import dataclasses
import functools
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError, few, shown
from praxis_lite.inputs.sources.base import Example
from praxis_lite.inputs.sources.in_place_files import OpenedFiles


@dataclasses.dataclass(eq=False)
class NpyFiles(OpenedFiles):
    """The rows of .npy files, memory-mapped, or of the arrays of .npz files, read when needed.

    Args:
      name: the name of the array of a .npy file in an example.
    """

    name: str = "x"

    @functools.cached_property
    def counts(self) -> list[int]:
        return [self._count(path) for path in self.paths]

    def _count(self, path: str) -> int:
        counts = {
            name: len(item) if item.ndim else 0 for name, item in self.open_file(path).items()
        }
        if len(set(counts.values())) != 1:
            text = few([f"{name!r}: {count}" for name, count in counts.items()], 10)
            raise ConfigError(
                f"{path} has arrays of {{{shown(text, 500)}}} rows; expected arrays with the same "
                "first dimension, whose rows are examples. Write them so."
            )
        return next(iter(counts.values()))

    def open_file(self, path: str) -> dict[str, np.ndarray]:
        try:
            with open(path, "rb") as file:
                if file.read(2) == b"PK":  # A .npz, which is a zip file.
                    file.seek(0)
                    with np.load(file, allow_pickle=False) as arrays:
                        return dict(arrays)
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            return {self.name: np.asarray(array)}  # No np.memmap, whose slices are slow.
        except Exception as error:  # NumPy raises errors of many kinds where a file is damaged.
            raise ConfigError(
                f"{path} cannot be read as an array ({shown(str(error), 300)}). Write it with "
                "np.save or np.savez, of numbers, not objects; or leave it out of files."
            ) from None

    def __getitem__(self, index: int) -> Example:
        file, row = self.place_of(index)
        return {name: np.array(item[row]) for name, item in self.opened(file).items()}

    def settings(self) -> dict[str, Any]:
        return {"name": self.name}
