"""metrics.jsonl and eval_metrics.jsonl as columns of numbers, also while the files grow."""

import json
import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.file_reading import opened
from praxis_lite.trainer.metrics.json_lines import is_step, with_non_finite

__all__ = ("MetricsColumns", "columns_by_dataset")

Columns = dict[str, np.ndarray]

# Bytes that are read at once: more would take the system longer to give memory for.
_BLOCK = 1 << 19
_END = 256  # Bytes that are compared, to see whether a file that has grown was cut before.


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

        A last line without its end is left for the next call. A file that was replaced or cut, as
        a run does that recomputes steps, is read anew; one that is gone, or not there yet, has no
        lines.

        Raises:
          ConfigError: there is something that cannot be read.
        """
        try:
            with opened(self._path) as file:
                status = os.fstat(file.fileno())
                is_another = (status.st_dev, status.st_ino) != self._identity
                file.seek(max(0, self._offset - _END))
                is_another = is_another or file.read(_END)[: len(self._end)] != self._end
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
                f"{self._path} cannot be read ({error.strerror or error}). A run writes it; "
                "remove what is in its place."
            ) from None

    def columns(self) -> Columns:
        """Returns the columns by name, each of shape (number of lines,): float64, "step" int64.

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
            columns[name] = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return columns

    def _forget(self) -> None:
        self._identity: tuple[int, int] | None = None
        self._offset, self._end, self.num_unreadable = 0, b"", 0
        self._blocks: list[Columns] = []

    def _read_blocks(self, file: IO[bytes]) -> None:
        rest: list[bytes] = []  # Of a line that continues in the next block.
        while data := file.read(_BLOCK):
            end = data.rfind(b"\n") + 1
            if end:
                self._take(b"".join([*rest, data[:end]]))
                rest = [data[end:]]
            else:
                rest.append(data)

    def _take(self, text: bytes) -> None:
        block = _of_equal_lines(text)
        if block is None:
            block = self._of_any_lines(text)
        if len(block["step"]):
            self._blocks.append(block)
        self._offset += len(text)
        self._end = (self._end + text)[-_END:] if len(text) < _END else text[-_END:]

    def _of_any_lines(self, text: bytes) -> Columns:
        lines = []
        for part in text.splitlines():
            try:
                line = json.loads(part)
            except (ValueError, RecursionError):
                line = None
            if isinstance(line, dict) and is_step(line.get("step")):
                lines.append(line)
            else:
                self.num_unreadable += 1
        return columns_of(lines)


def columns_in(path: Path) -> Columns:
    """Returns the columns of a file, as `MetricsColumns.columns`; raises ConfigError as `read`."""
    metrics = MetricsColumns(path)
    metrics.read()
    return metrics.columns()


def columns_of(lines: Sequence[Mapping[str, Any]]) -> Columns:
    """Returns the columns of lines, as `MetricsColumns.columns`."""
    names = dict.fromkeys(
        name for line in lines for name, value in line.items() if _is_number(value)
    )
    columns = {name: np.array([_number(line.get(name)) for line in lines]) for name in names}
    return columns | {"step": np.array([line["step"] for line in lines], np.int64)}


def columns_by_dataset(lines: Sequence[Mapping[str, Any]]) -> dict[str, Columns]:
    """Returns the columns of the lines of each dataset, in the order of their steps.

    Another process may have added lines of earlier steps later.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for line in sorted(lines, key=lambda line: line["step"]):
        groups.setdefault(str(line.get("dataset", "")), []).append(line)
    return {dataset: columns_of(group) for dataset, group in groups.items()}


def _of_equal_lines(text: bytes) -> Columns | None:
    """Returns the columns of lines that have the same keys, and numbers; None for others."""
    try:
        # In one call: a third of the time that a call per line takes.
        lines = orjson.loads(b"[" + text[:-1].replace(b"\n", b",") + b"]")
        names = list(lines[0])
        rows = np.array(list(map(operator.itemgetter(*names), lines)))
        is_regular = set(map(len, lines)) == {len(names)} and len(lines) == text.count(b"\n")
    except (ValueError, LookupError, TypeError):
        return None
    has_steps = all(is_step(line.get("step")) for line in lines)
    if not (is_regular and has_steps and rows.dtype.kind in "iuf"):
        return None
    columns = dict(zip(names, rows.reshape(len(lines), -1).astype(float).T.copy(), strict=True))
    return columns | {"step": columns["step"].astype(np.int64)}


def _is_number(value: object) -> bool:
    return isinstance(with_non_finite(value), int | float)


def _number(value: object) -> float:
    """Returns a value in a line as a float, NaN if it is no number."""
    if not _is_number(value):
        return np.nan
    try:
        return float(with_non_finite(value))
    except OverflowError:  # An int beyond all floats.
        return np.inf if value > 0 else -np.inf
