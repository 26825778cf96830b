"""Files of columns: Parquet, and Arrow's own format."""

import dataclasses
import functools
import logging
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from praxis_lite.errors import ConfigError, did_you_mean
from praxis_lite.inputs.sources import kept
from praxis_lite.inputs.sources.base import Example, FileSource
from praxis_lite.inputs.sources.faults import BadExample
from praxis_lite.inputs.sources.file_index import FileIndex, Made, name_beside
from praxis_lite.inputs.sources.record_files import write_arrow

# Rows of a copy that are found together: fewer are found faster, more make fewer batches.
_ROWS_PER_BATCH = 256


@dataclasses.dataclass(eq=False)
class ArrowFiles(FileSource):
    """The rows of Arrow IPC files, of the file or the stream format, memory-mapped.

    Args:
      columns: that an example has; (): all.
    """

    columns: tuple[str, ...] = ()

    def index_file(self, path: str) -> Made:
        counts = [batch.num_rows for batch in _batches(path)]
        return {"num_examples": sum(counts)}, {"stops": np.cumsum(counts, dtype=np.int64)}

    def example(self, index: FileIndex, row: int) -> Example:
        batch = int(np.searchsorted(index.arrays["stops"], row, side="right"))
        before = int(index.arrays["stops"][batch - 1]) if batch else 0
        return self._row(self._opened(index)[batch], row - before, index.path)

    def _opened(self, index: FileIndex) -> list[Any]:
        """Returns the record batches of a file, which is mapped into memory and not read."""
        if index.path not in self._open:
            index.require_unchanged()
            self._open[index.path] = _batches(index.path)
        return self._open[index.path]

    @functools.cached_property
    def _open(self) -> dict[str, list[Any]]:
        return {}

    def _row(self, batch: Any, row: int, path: str) -> Example:
        names = self.columns or batch.schema.names
        if missing := [name for name in names if name not in batch.schema.names]:
            raise ConfigError(
                f"{path} has no column {missing[0]!r}; it has {sorted(batch.schema.names)}. "
                f"Correct columns.{did_you_mean(missing[0], batch.schema.names)}"
            )
        return {name: _value(batch.column(name)[row]) for name in names}

    def settings(self) -> dict[str, Any]:
        return {"columns": sorted(self.columns)}


@dataclasses.dataclass(eq=False)
class Parquet(ArrowFiles):
    """The rows of Parquet files.

    A row of Parquet is found only by reading its whole row group. So where rows are asked for in
    any order, a file is copied once, uncompressed, into an Arrow file beside its index.
    """

    def index_file(self, path: str) -> Made:
        with _parquet(path) as file:
            sizes = [
                file.metadata.row_group(k).num_rows for k in range(file.metadata.num_row_groups)
            ]
            return {"num_examples": file.metadata.num_rows}, {
                "group_stops": np.cumsum(sizes, dtype=np.int64)
            }

    def read(self, start: int, stop: int) -> Iterator[tuple[int, Example | BadExample]]:
        number = start
        while number < stop:
            index, row = self.place_of(number)
            stops = index.arrays["group_stops"]
            group = int(np.searchsorted(stops, row, side="right"))
            first = int(stops[group - 1]) if group else 0
            index.require_unchanged()
            with _parquet(index.path) as file:
                (rows,) = file.read_row_group(group).combine_chunks().to_batches() or (None,)
            for within in range(row - first, int(stops[group]) - first):
                if number >= stop:
                    return
                yield number, self._row(rows, within, index.path)
                number += 1

    def example(self, index: FileIndex, row: int) -> Example:
        return self._row(
            self._opened(index)[row // _ROWS_PER_BATCH], row % _ROWS_PER_BATCH, index.path
        )

    def _opened(self, index: FileIndex) -> list[Any]:
        if index.path not in self._open:
            index.require_unchanged()
            copy = os.path.join(
                self.cache_folder(), f"{name_beside(index.path)}.{index.digest[:12]}.arrow"
            )
            if not os.path.exists(copy):
                with kept.locked(self.cache_folder()):
                    if not os.path.exists(copy):
                        _log.info("copying %s into %s, to find any row", index.path, copy)
                        with _parquet(index.path) as file:
                            write_arrow(copy, file, _ROWS_PER_BATCH)
            self._open[index.path] = _batches(copy)
        return self._open[index.path]


def _batches(path: str) -> list[Any]:
    import pyarrow
    from pyarrow import ipc

    mapped = pyarrow.memory_map(path)
    try:
        try:
            file = ipc.open_file(mapped)
            return [file.get_batch(k) for k in range(file.num_record_batches)]
        except pyarrow.ArrowInvalid:
            mapped.seek(0)
            return list(ipc.open_stream(mapped))
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ConfigError(
            f"{path} is no whole Arrow file: {error}. Make or copy it again, or leave it out of "
            "files."
        ) from None


def _parquet(path: str) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ConfigError(
            f"{path} is no whole Parquet file: {error}. Make or copy it again, or leave it out "
            "of files."
        ) from None


def _value(scalar: Any) -> Any:
    """Returns a cell: a list of numbers as an array, all else as Python has it."""
    import pyarrow

    kind = scalar.type
    is_list = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)
    if is_list and scalar.is_valid and pyarrow.types.is_primitive(kind.value_type):
        return scalar.values.to_numpy(zero_copy_only=False)
    return scalar.as_py()


_log = logging.getLogger(__name__)
