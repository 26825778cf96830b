"""Files of columns: Parquet, and Arrow's own format."""

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from praxis_lite.errors import ConfigError, did_you_mean, require
from praxis_lite.inputs.sources import kept
from praxis_lite.inputs.sources.base import Example, FileSource
from praxis_lite.inputs.sources.faults import BadExample
from praxis_lite.inputs.sources.file_index import FileIndex, Made, name_beside
from praxis_lite.inputs.sources.record_files import remove_copies, write_arrow

# Rows of a copy that are found together: fewer are found faster, more make fewer batches.
_ROWS_PER_BATCH = 256
# How a stream of Arrow ends: a message of no bytes.
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class _Batches(NamedTuple):
    """Record batches of a file that is mapped into memory, and the rows up to the end of each."""

    batches: list[Any]
    stops: np.ndarray


@dataclasses.dataclass(eq=False)
class ArrowFiles(FileSource):
    """The rows of Arrow IPC files, of the file or the stream format, memory-mapped.

    A compressed file, as Feather mostly is, is copied once, uncompressed, beside its index.

    Args:
      columns: that an example has; (): all.
    """

    columns: tuple[str, ...] = ()

    def index_file(self, path: str) -> Made:
        import pyarrow

        before = pyarrow.total_allocated_bytes()
        batches = _mapped(path).batches
        # Batches that are not compressed lie in the file, which is mapped.
        allocated = pyarrow.total_allocated_bytes() - before
        with _named(path, "Arrow"):
            for one in batches:
                one.validate(full=True)  # Damaged offsets would end the process.
        return {
            "num_examples": sum(one.num_rows for one in batches),
            "columns": batches[0].schema.names if batches else [],
            "is_copied": 2 * allocated > sum(one.nbytes for one in batches),
        }, {}

    def check(self) -> None:
        require(
            not isinstance(self.columns, str), f"{type(self).__name__}.columns", self.columns,
            "a list of names",
        )
        for index in self.indexes:
            if index.num_examples:
                self._names(index)
        super().check()

    def example(self, index: FileIndex, row: int) -> Example:
        batches, stops = self._opened(index)
        batch = int(np.searchsorted(stops, row, side="right"))
        before = int(stops[batch - 1]) if batch else 0
        return _row(batches[batch], row - before, self._names(index), index, row)

    def _names(self, index: FileIndex) -> tuple[str, ...]:
        """Returns the columns of an example. Raises ConfigError if the file lacks one."""
        known = index.values["columns"]
        for name in self.columns:
            if name not in known:
                raise ConfigError(
                    f"{index.path} has no column {name!r}; it has {sorted(known)}. Correct "
                    f"columns.{did_you_mean(name, known)}"
                )
        return self.columns or known

    def _opened(self, index: FileIndex) -> _Batches:
        if index.path not in self._open:
            index.require_unchanged()
            is_copied = index.values["is_copied"]
            self._open[index.path] = _mapped(self._copy_of(index) if is_copied else index.path)
        return self._open[index.path]

    @functools.cached_property
    def _open(self) -> dict[str, _Batches]:
        return {}

    def _copy_of(self, index: FileIndex) -> str:
        """Returns the path of an uncompressed copy of a file, which is made if there is none."""
        folder, name = self.cache_folder(), f"{name_beside(index.path)}."
        # A digest of a large file need not notice what its time of change does.
        copy = os.path.join(folder, f"{name}{index.digest[:12]}.{index.state[1]:x}.arrow")
        if os.path.exists(copy):
            return copy
        with kept.locked(folder):
            if not os.path.exists(copy):
                _log.info("copying %s into %s, to find any row", index.path, copy)
                remove_copies(folder, name)
                self._copy(index.path, copy)
        return copy

    def _copy(self, path: str, copy: str) -> None:
        batches = _mapped(path).batches
        write_arrow(copy, batches[0].schema, batches, _ROWS_PER_BATCH)

    def settings(self) -> dict[str, Any]:
        return {"columns": sorted(self.columns)}


@dataclasses.dataclass(eq=False)
class Parquet(ArrowFiles):
    """The rows of Parquet files.

    A row of Parquet is found only by reading its whole row group. So where rows are asked for in
    any order, a file is copied once, uncompressed, into an Arrow file beside its index.

    Args:
      columns: that an example has; (): all.
    """

    def index_file(self, path: str) -> Made:
        with _parquet(path) as file:
            found = file.metadata
            sizes = [found.row_group(k).num_rows for k in range(found.num_row_groups)]
            values = {
                "num_examples": found.num_rows, "columns": file.schema_arrow.names,
                "is_copied": True,
            }
        return values, {"group_stops": np.cumsum(sizes, dtype=np.int64)}

    def read(self, start: int, stop: int) -> Iterator[tuple[int, Example | BadExample]]:
        number = start
        while number < stop:
            index, row = self.place_of(number)
            stops = index.arrays["group_stops"]
            group = int(np.searchsorted(stops, row, side="right"))
            skipped = row - (int(stops[group - 1]) if group else 0)
            end_of_group = number + int(stops[group]) - row
            end = min(stop, end_of_group)
            names = self._names(index)
            for batch in self._group(index, group, is_last=end == end_of_group):
                for within in range(skipped, min(batch.num_rows, skipped + end - number)):
                    try:
                        yield number, _row(batch, within, names, index, row)
                    except BadExample as error:
                        yield number, error
                    number, row = number + 1, row + 1
                skipped = max(0, skipped - batch.num_rows)

    def _group(self, index: FileIndex, group: int, is_last: bool) -> list[Any]:
        """Returns a row group as record batches; it is kept for the next part, unless `is_last`."""
        key = (index.path, group)
        found = self._last_group.pop(key, None)
        self._last_group.clear()
        if found is None:
            index.require_unchanged()
            with _parquet(index.path) as file:
                table = file.read_row_group(group, columns=list(self.columns) or None)
            found = table.to_batches()
        if not is_last:
            self._last_group[key] = found
        return found

    @functools.cached_property
    def _last_group(self) -> dict[tuple[str, int], list[Any]]:
        """The row group that was read last, if parts of it were not asked for yet."""
        return {}

    def _copy(self, path: str, copy: str) -> None:
        with _parquet(path) as file:
            batches = file.iter_batches(_ROWS_PER_BATCH)
            write_arrow(copy, file.schema_arrow, batches, _ROWS_PER_BATCH)


def _mapped(path: str) -> _Batches:
    import pyarrow
    from pyarrow import ipc

    with _named(path, "Arrow"):
        mapped = pyarrow.memory_map(path)
        try:
            file = ipc.open_file(mapped)
            batches = [file.get_batch(k) for k in range(file.num_record_batches)]
        except pyarrow.ArrowInvalid:
            mapped.seek(0)
            batches = list(ipc.open_stream(mapped))
            mapped.seek(max(0, mapped.size() - len(_END_OF_STREAM)))
            if mapped.read() != _END_OF_STREAM:
                raise OSError("the stream does not end as one does") from None
    return _Batches(batches, np.cumsum([one.num_rows for one in batches], dtype=np.int64))


@contextlib.contextmanager
def _parquet(path: str) -> Iterator[Any]:
    import pyarrow.parquet

    with (
        _named(path, "Parquet"),
        pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file,
    ):
        yield file


@contextlib.contextmanager
def _named(path: str, kind: str) -> Iterator[None]:
    """Names the file in errors of Arrow's."""
    import pyarrow

    try:
        yield
    except ConfigError:
        raise
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(
            f"{path} is no whole {kind} file: {str(error).rstrip('.')}. Make or copy it again, or "
            "leave it out of files."
        ) from None


def _row(
    batch: Any, within: int, names: tuple[str, ...], index: FileIndex, row: int
) -> Example:
    try:
        return {name: _value(batch.column(name)[within]) for name in names}
    except UnicodeDecodeError as error:
        raise BadExample(
            "not_utf8", f"{index.path}, row {row},", f"is not UTF-8: {error}",
            "Write its texts in UTF-8.",
        ) from None


def _value(scalar: Any) -> Any:
    """Returns a cell: a list of numbers as an array, all else as Python has it."""
    from pyarrow import types

    kind = scalar.type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if is_list and scalar.is_valid and types.is_primitive(kind.value_type):
        return scalar.values.to_numpy(zero_copy_only=False)
    return scalar.as_py()


_log = logging.getLogger(__name__)
