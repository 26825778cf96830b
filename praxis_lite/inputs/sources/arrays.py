"""A source over NumPy files, with one example per row of their arrays."""

import dataclasses
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError, first_few, shortened
from praxis_lite.inputs.sources.base import Example
from praxis_lite.inputs.sources.in_place_files import OpenedFiles


@dataclasses.dataclass(eq=False)
class NpyFiles(OpenedFiles):
    """The rows of .npy files (memory-mapped), or of the arrays in .npz files.

    Args:
      name: Key in each example for the row from a .npy file.
    """

    name: str = "x"

    def num_rows(self, opened: dict[str, np.ndarray], path: str) -> int:
        counts = {name: len(array) if array.ndim else 0 for name, array in opened.items()}
        if len(set(counts.values())) != 1:
            text = first_few([f"{name!r}: {count}" for name, count in counts.items()], 10)
            raise ConfigError(
                f"{path} contains arrays with different numbers of rows "
                f"{{{shortened(text, 500)}}}; expected the same first dimension in all arrays, "
                "with one example per row. Save the arrays again."
            )
        return next(iter(counts.values()))

    def open_file(self, path: str) -> dict[str, np.ndarray]:
        try:
            with open(path, "rb") as file:
                if file.read(2) == b"PK":  # A .npz file, which is a zip file.
                    file.seek(0)
                    with np.load(file, allow_pickle=False) as arrays:
                        return dict(arrays)
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            return {self.name: np.asarray(array)}  # Slices of an np.memmap are slow.
        except Exception as error:  # NumPy raises many kinds of errors for damaged files.
            raise ConfigError(
                f"{path} cannot be read as an array ({shortened(str(error), 300)}). Save an array "
                "of numbers with np.save or np.savez, or exclude the file from `files`."
            ) from None

    def __getitem__(self, index: int) -> Example:
        file, row = self.file_and_row(index)
        return {name: np.array(array[row]) for name, array in self.opened(file).items()}

    def settings(self) -> dict[str, Any]:
        return {"name": self.name}
