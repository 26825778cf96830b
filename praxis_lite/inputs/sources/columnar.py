"""Files of columns: Parquet, and Arrow's own format."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from praxis_lite.core.errors import ConfigError, did_you_mean, few, require, shown
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.inputs.sources.base import Example, FileSource
from praxis_lite.inputs.sources.faults import BadExample
from praxis_lite.inputs.sources.file_index import FileIndex, Made
from praxis_lite.inputs.sources.record_files import copy_of, write_arrow, writing_copy

# Rows of a copy that are found together: fewer are found faster, more make fewer batches.
_ROWS_PER_BATCH = 256
# How a stream of Arrow ends: a message of no bytes.
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class Batches(NamedTuple):
    """Record batches of a file that is mapped into memory, and the rows up to the end of each."""

    batches: list[Any]
    stops: np.ndarray

    def place_of(self, row: int) -> tuple[int, int]:
        """Returns the batch of a row, and the row's place in it."""
        batch = int(np.searchsorted(self.stops, row, side="right"))
        return batch, row - (int(self.stops[batch - 1]) if batch else 0)


@dataclasses.dataclass(eq=False)
class ArrowFiles(FileSource):
    """The rows of Arrow IPC files, of the file or the stream format, memory-mapped.

    A compressed file, as Feather mostly is, is copied once, uncompressed, beside its index.

    Args:
      columns: that an example has; (): all.
    """

    columns: tuple[str, ...] = ()

    def index_file(self, path: str) -> Made:
        pyarrow = optional_module("pyarrow", path)
        before = pyarrow.total_allocated_bytes()
        batches = mapped(path).batches
        # Batches that are not compressed lie in the file, which is mapped.
        allocated = pyarrow.total_allocated_bytes() - before
        for batch in batches:
            validate(batch, path)
        return {
            "num_examples": sum(item.num_rows for item in batches),
            "columns": _distinct(batches[0].schema.names, path) if batches else [],
            "is_copied": 2 * allocated > sum(element.nbytes for element in batches),
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
        batches, is_valid = self.opened(index)
        batch, within = batches.place_of(row)
        if not is_valid[batch]:
            validate(batches.batches[batch], index.path)
            is_valid[batch] = True
        return row_of(batches.batches[batch], within, self._names(index), index.path, row)

    def _names(self, index: FileIndex) -> tuple[str, ...]:
        """Returns the columns of an example. Raises ConfigError for a missing column."""
        known = index.values["columns"]
        for name in self.columns:
            if name not in known:
                raise ConfigError(
                    f"{index.path} has no column {name!r}; it has {sorted(known)}. Correct "
                    f"columns.{did_you_mean(name, known)}"
                )
        return self.columns or known

    def open_file(self, index: FileIndex) -> tuple[Batches, np.ndarray]:
        """Returns a file's batches, and bool[batches]: those that are known to be sound."""
        is_copied, path = index.values["is_copied"], index.path
        if is_copied:
            path = copy_of(self.cache_folder(), index, self._copy)
        result = mapped(path)
        index.require_rows(int(result.stops[-1]) if result.batches else 0)
        return result, np.full(len(result.batches), is_copied)

    def _copy(self, path: str) -> None:
        """Writes an uncompressed copy of a file."""
        batches = mapped(path).batches
        for batch in batches:
            validate(batch, path)
        self._write_copy(path, batches[0].schema, batches)

    def _write_copy(self, path: str, schema: Any, batches: Iterable[Any]) -> None:
        with writing_copy(self.cache_folder(), path, "arrow") as copy:
            write_arrow(copy, schema, batches, _ROWS_PER_BATCH)

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
            result = file.metadata
            sizes = [result.row_group(k).num_rows for k in range(result.num_row_groups)]
            values = {
                "num_examples": sum(sizes), "is_copied": True,
                "columns": _distinct(file.schema_arrow.names, path),
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
                        yield number, row_of(batch, within, names, index.path, row)
                    except BadExample as error:
                        yield number, error
                    number, row = number + 1, row + 1
                skipped = max(0, skipped - batch.num_rows)

    def _group(self, index: FileIndex, group: int, is_last: bool) -> list[Any]:
        """Returns a row group as record batches; it is kept for the next part, unless `is_last`."""
        key = (index.path, group)
        result = self._last_group.pop(key, None)
        self._last_group.clear()
        if result is None:
            index.require_unchanged()
            with _parquet(index.path) as file:
                table = file.read_row_group(group, columns=list(self.columns) or None)
            stops = index.arrays["group_stops"]
            index.require_rows(table.num_rows, int(np.diff(stops, prepend=0)[group]))
            result = table.to_batches()
        if not is_last:
            self._last_group[key] = result
        return result

    @functools.cached_property
    def _last_group(self) -> dict[tuple[str, int], list[Any]]:
        """The row group that was read last, if parts of it were not asked for yet."""
        return {}

    def _copy(self, path: str) -> None:
        with _parquet(path) as file:
            self._write_copy(path, file.schema_arrow, file.iter_batches(_ROWS_PER_BATCH))


def _distinct(names: Sequence[str], path: str) -> list[str]:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"{path} has several columns named {few(twice)}; an example has one value by each "
            "name. Write it with other names."
        )
    return list(names)


def validate(batch: Any, path: str) -> None:
    """Raises ConfigError, with the file's name, if reading a batch could end the process."""
    with _named(path, "Arrow"):
        batch.validate(full=True)


def mapped(path: str) -> Batches:
    """Returns the batches of an Arrow file. Raises ConfigError if it is none."""
    pyarrow, ipc = optional_module("pyarrow", path), optional_module("pyarrow.ipc", path)
    with _named(path, "Arrow"):
        source = pyarrow.memory_map(path)
        try:
            file = ipc.open_file(source)
            batches = [file.get_batch(k) for k in range(file.num_record_batches)]
        except pyarrow.ArrowInvalid:
            source.seek(0)
            batches = list(ipc.open_stream(source))
            source.seek(max(0, source.size() - len(_END_OF_STREAM)))
            if source.read() != _END_OF_STREAM:
                raise OSError("the stream does not end as one does") from None
        for batch in batches[:1]:
            _ = batch.schema.names  # They may be no UTF-8.
    return Batches(batches, np.cumsum([item.num_rows for item in batches], dtype=np.int64))


@contextlib.contextmanager
def _parquet(path: str) -> Iterator[Any]:
    parquet = optional_module("pyarrow.parquet", path)
    with (
        _named(path, "Parquet"),
        parquet.ParquetFile(path, page_checksum_verification=True) as file,
    ):
        yield file


@contextlib.contextmanager
def _named(path: str, kind: str) -> Iterator[None]:
    """Names the file in errors of Arrow's."""
    pyarrow = optional_module("pyarrow", path)
    try:
        yield
    except ConfigError:
        raise
    # Arrow raises whatever comes of damage: a name of a column that is not UTF-8 is a ValueError.
    except (
        pyarrow.ArrowException, OSError, ValueError, TypeError, LookupError, ArithmeticError,
        MemoryError, RuntimeError,
    ) as error:
        raise ConfigError(
            f"{path} is no whole {kind} file: {shown(str(error).rstrip('.'), 300)}. Make or copy "
            "it again, or leave it out of files."
        ) from None


def row_of(batch: Any, within: int, names: Sequence[str], path: str, row: int) -> Example:
    """Returns a row of a batch. Raises BadExample, which names the file, for what Python lacks."""
    pyarrow = optional_module("pyarrow", path)
    try:
        columns = {name: batch.column(name) for name in names}
        # An extension's values are those that it is stored as.
        return {name: _value(getattr(x, "storage", x)[within]) for name, x in columns.items()}
    except UnicodeDecodeError as error:
        raise BadExample(
            "not_utf8", f"{path}, row {row},", f"is not UTF-8: {error}",
            "Write its texts in UTF-8.",
        ) from None
    except (pyarrow.ArrowException, ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise BadExample(  # A date of the year 100,000, say.
            "damaged", f"{path}, row {row},", f"cannot be read: {shown(str(error), 300)}",
            "Mend the row, or leave its column out (columns).",
        ) from None


def _value(scalar: Any) -> Any:
    """Returns a cell: a list of numbers as an array, all else as Python has it; None is None."""
    types, kind = optional_module("pyarrow.types", "Arrow"), scalar.type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not is_list or not scalar.is_valid or not types.is_primitive(kind.value_type):
        return without_nulls(scalar.as_py()) if types.is_nested(kind) else scalar.as_py()
    if scalar.values.null_count and not types.is_floating(kind.value_type):
        return scalar.as_py()  # NumPy would make floats of integers, for the missing to be NaN.
    return scalar.values.to_numpy(zero_copy_only=False)


def without_nulls(value: Any) -> Any:
    """Returns a nested value of Arrow without the names that are null.

    Of a struct every row has all names, and null stands where JSON would have none.
    """
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return value

