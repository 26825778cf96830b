"""metrics.jsonl as columns of numbers, of a file that may be long and that a run may still write.

Its lines nearly always have the same keys in the same order; then only their numbers are read.
"""

import json
import os
from pathlib import Path
from typing import IO

import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_lite.files.json_text import opened
from praxis_lite.run.trainer.metrics.decimal_numbers import (
    decimal_numbers,
    is_number,
    number_or_nan,
)
from praxis_lite.run.trainer.metrics.json_lines import is_step

# Bytes that are read at once: more would take the system longer to give memory for.
_BLOCK = 1 << 19


class MetricsColumns:
    """The numbers in a file of JSON lines, a column per key.

    Attributes:
      num_unreadable: lines that are no JSON objects with a whole number `step`; they are left out.
    """

    def __init__(self, path: Path):
        self._path = path
        self._forget()

    def read(self) -> bool:
        """Reads the lines that were added since the last call; returns True if there are any.

        A last line without its end is left for the next call. A file that was replaced, as a run
        does that makes steps again, is read anew; one that is gone, or not there yet, has no lines.

        Raises:
          ConfigError: there is something that cannot be read.
        """
        try:
            with opened(self._path) as file:
                status = os.fstat(file.fileno())
                is_another = (status.st_dev, status.st_ino) != self._identity
                if is_another or status.st_size < self._offset:
                    self._forget()
                    self._identity = status.st_dev, status.st_ino
                before = self._offset
                file.seek(before)
                self._read_blocks(file)
                return is_another or self._offset > before
        except FileNotFoundError:
            had_lines = self._offset > 0
            self._forget()
            return had_lines
        except OSError as error:
            raise ConfigError(
                f"{self._path} cannot be read ({error.strerror or error}). A run writes it; take "
                "away what lies in its place."
            ) from None

    def columns(self) -> dict[str, np.ndarray]:
        """Returns the columns by name, each float64 of shape (number of lines,).

        A line that lacks a column, or has no number there, has NaN. A column without any number is
        left out. `step` is always there.
        """
        names = list(dict.fromkeys(["step", *(name for block in self._blocks for name in block)]))
        sizes = [len(block["step"]) for block in self._blocks]
        columns = {}
        for name in names:
            parts = [
                block[name] if name in block else np.full(size, np.nan)
                for block, size in zip(self._blocks, sizes, strict=True)
            ]
            columns[name] = np.concatenate(parts) if parts else np.empty(0)
        return columns

    def _forget(self) -> None:
        self._identity: tuple[int, int] | None = None
        self._offset, self.num_unreadable = 0, 0
        self._blocks: list[dict[str, np.ndarray]] = []

    def _read_blocks(self, file: IO[bytes]) -> None:
        rest = b""
        while data := file.read(_BLOCK):
            text = rest + data
            end = text.rfind(b"\n") + 1
            text, rest = text[:end], text[end:]
            if text:
                block = _of_equal_lines(text)
                if block is None:
                    block = self._of_any_lines(text)
                if len(block["step"]):
                    self._blocks.append(block)
                self._offset += len(text)

    def _of_any_lines(self, text: bytes) -> dict[str, np.ndarray]:
        lines = []
        for part in text.splitlines():
            try:
                line = json.loads(part)
            except (ValueError, RecursionError):
                line = None
            if isinstance(line, dict) and is_step(line.get("step")):
                lines.append({
                    name: number_or_nan(value) for name, value in line.items() if is_number(value)
                })
            else:
                self.num_unreadable += 1
        names = dict.fromkeys(["step", *(name for line in lines for name in line)])
        return {
            name: np.array([line.get(name, np.nan) for line in lines], float) for name in names
        }


def _of_equal_lines(text: bytes) -> dict[str, np.ndarray] | None:
    """Returns the columns of lines with equal keys and plain values, or None if they are others."""
    characters = np.frombuffer(text, np.uint8)
    line_ends = np.flatnonzero(characters == ord("\n"))
    colons = np.flatnonzero(characters == ord(":"))
    ends = np.flatnonzero((characters == ord(",")) | (characters == ord("}")))
    try:
        first_line = json.loads(text[:line_ends[0]])
        shape = len(line_ends), len(first_line)
        colons, ends = colons.reshape(shape), ends.reshape(shape)
    except (ValueError, TypeError, RecursionError):
        return None
    if not isinstance(first_line, dict) or not all(map(is_number, first_line.values())):
        return None
    # A key is between the end of the value before and its colon.
    begins = np.empty_like(ends)
    begins[:, 1:] = ends[:, :-1]
    begins[:, 0] = np.concatenate([[0], line_ends[:-1] + 1])
    sizes = colons - begins
    is_regular = "step" in first_line and np.array_equal(ends[:, -1] + 1, line_ends)
    if not is_regular or (sizes != sizes[0]).any() or (ends < colons + len(": ")).any():
        return None
    for starts, size in zip(begins.T, sizes[0] + len(": "), strict=True):
        # A view of the text whose every element is a word of that size.
        words = np.ndarray(len(text) - size, f"S{size}", text, strides=(1,))[starts]
        if (words != words[0]).any():
            return None
    try:
        numbers = decimal_numbers(text, (colons + len(": ")).ravel(), ends.ravel()).reshape(shape)
    except ValueError:
        return None
    columns = dict(zip(first_line, numbers.T.copy(), strict=True))
    is_whole = (np.abs(columns["step"]) <= 2**53) & (columns["step"] % 1 == 0)
    return columns if is_whole.all() else None
