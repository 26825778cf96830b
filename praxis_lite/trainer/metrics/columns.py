"""Reads metrics.jsonl and eval_metrics.jsonl as columns of numbers, even while the files grow."""

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
from praxis_lite.trainer.metrics.json_lines import is_step, restore_non_finite

__all__ = ("MetricsColumns", "columns_by_dataset")

Columns = dict[str, np.ndarray]

# Bytes per read. Larger buffers are slower, because the system must map new memory for each buffer.
_BLOCK_BYTES = 1 << 19
# Number of bytes before the last position that are compared to detect a rewritten file.
_TAIL_BYTES = 256


class MetricsColumns:
    """The numbers in a file of JSON lines, with one column per key.

    Attributes:
      num_unreadable: Number of lines ignored because they are not JSON objects with an integer
        `step`.
    """

    _identity: tuple[int, int] | None
    _offset: int
    _tail: bytes

    def __init__(self, path: Path):
        self._path = path
        self._reset()

    def read(self) -> bool:
        """Reads the lines added since the last call.

        An incomplete last line is read by a later call. A file that was replaced or truncated, for
        example by a run that recomputes steps, is read again from the start. A missing file is
        treated as empty.

        Returns:
          Whether the columns have changed.

        Raises:
          ConfigError: The file exists but cannot be read.
        """
        try:
            with opened(self._path) as file:
                status = os.fstat(file.fileno())
                # A replaced file has another inode, or other bytes before the current offset.
                is_replaced = (status.st_dev, status.st_ino) != self._identity
                file.seek(max(0, self._offset - _TAIL_BYTES))
                is_replaced = is_replaced or file.read(_TAIL_BYTES)[: len(self._tail)] != self._tail
                if is_replaced or status.st_size < self._offset:
                    self._reset()
                    self._identity = status.st_dev, status.st_ino
                start = self._offset
                file.seek(start)
                self._read_blocks(file)
                return is_replaced or self._offset > start
        except FileNotFoundError:
            had_lines = self._offset > 0
            self._reset()
            return had_lines
        except OSError as error:
            raise ConfigError(
                f"{self._path} cannot be read ({error.strerror or error}). Fix its permissions, or "
                "remove it if it is not a file written by a run."
            ) from None

    def columns(self) -> Columns:
        """Returns the columns, keyed by name, as float64[num_lines]; "step" is int64[num_lines].

        Missing values and values that are not numbers are NaN. Columns without any numbers are
        omitted, except "step".
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

    def _reset(self) -> None:
        self._identity = None
        self._offset, self._tail, self.num_unreadable = 0, b"", 0
        self._blocks: list[Columns] = []

    def _read_blocks(self, file: IO[bytes]) -> None:
        partial: list[bytes] = []  # The beginning of a line that continues in the next block.
        while data := file.read(_BLOCK_BYTES):
            end = data.rfind(b"\n") + 1
            if end:
                self._add_block(b"".join([*partial, data[:end]]))
                partial = [data[end:]]
            else:
                partial.append(data)

    def _add_block(self, text: bytes) -> None:
        """Parses complete lines and adds their columns."""
        block = _parse_uniform_lines(text)
        if block is None:
            block = self._parse_lines(text)
        if len(block["step"]):
            self._blocks.append(block)
        self._offset += len(text)
        self._tail = (self._tail + text if len(text) < _TAIL_BYTES else text)[-_TAIL_BYTES:]

    def _parse_lines(self, text: bytes) -> Columns:
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
    """Reads the columns of a file once; see `MetricsColumns.columns` and `read`."""
    metrics = MetricsColumns(path)
    metrics.read()
    return metrics.columns()


def columns_of(lines: Sequence[Mapping[str, Any]]) -> Columns:
    """Returns the columns of parsed lines; see `MetricsColumns.columns`."""
    names = dict.fromkeys(
        name for line in lines for name, value in line.items() if _is_number(value)
    )
    columns = {name: np.array([_number(line.get(name)) for line in lines]) for name in names}
    return columns | {"step": np.array([line["step"] for line in lines], np.int64)}


def columns_by_dataset(lines: Sequence[Mapping[str, Any]]) -> dict[str, Columns]:
    """Returns the columns of evaluation lines, keyed by dataset and sorted by step.

    The file may not be sorted, because other processes append evaluations of earlier steps.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for line in sorted(lines, key=lambda line: line["step"]):
        groups.setdefault(str(line.get("dataset", "")), []).append(line)
    return {dataset: columns_of(group) for dataset, group in groups.items()}


def _parse_uniform_lines(text: bytes) -> Columns | None:
    """Returns the columns of lines with identical keys and only numbers, or None for other lines.

    This is the fast path for metrics.jsonl: parsing all lines as a single JSON array takes a third
    of the time of parsing each line.
    """
    try:
        lines = orjson.loads(b"[" + text[:-1].replace(b"\n", b",") + b"]")
        names = list(lines[0])
        rows = np.array(list(map(operator.itemgetter(*names), lines)))
        # `itemgetter` fails if a line lacks a key, and the lengths show whether it has other keys.
        is_regular = set(map(len, lines)) == {len(names)} and len(lines) == text.count(b"\n")
    except (ValueError, LookupError, TypeError):
        return None
    has_steps = all(is_step(line.get("step")) for line in lines)
    if not (is_regular and has_steps and rows.dtype.kind in "iuf"):
        return None
    columns = dict(zip(names, rows.reshape(len(lines), -1).astype(float).T.copy(), strict=True))
    return columns | {"step": columns["step"].astype(np.int64)}


def _is_number(value: object) -> bool:
    return isinstance(restore_non_finite(value), int | float)


def _number(value: object) -> float:
    """Converts a value in a line to a float, or to NaN if it is not a number."""
    number = restore_non_finite(value)
    if not isinstance(number, int | float):
        return np.nan
    try:
        return float(number)
    except OverflowError:  # An int outside the range of float64.
        return np.inf if number > 0 else -np.inf
