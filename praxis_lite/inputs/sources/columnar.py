"""Files of columns: Parquet, and Arrow's own format."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from praxis_lite.core.errors import ConfigError, Error, did_you_mean, require, shown
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.inputs.sources.base import Example
from praxis_lite.inputs.sources.copied import BYTES_PER_BATCH, ROWS_PER_BATCH, CopiedFiles
from praxis_lite.inputs.sources.faults import BadExample

if TYPE_CHECKING:
    import pyarrow


@dataclasses.dataclass(eq=False)
class ArrowFiles(CopiedFiles):
    """The rows of Arrow IPC files, of the file or the stream format, compressed or not.

    Args:
      columns: that an example has; (): all.
    """

    columns: tuple[str, ...] = ()

    def check(self) -> None:
        require(
            not isinstance(self.columns, str), f"{type(self).__name__}.columns", self.columns,
            "a list of names",
        )
        super().check()

    def batches(self, path: str) -> "tuple[pyarrow.Schema, Iterable[pyarrow.RecordBatch]]":
        """Returns the schema and the record batches of a file, valid in all their values."""
        pyarrow, ipc = optional_module("pyarrow", path), optional_module("pyarrow.ipc", path)
        source = pyarrow.memory_map(path)
        try:
            file = ipc.open_file(source)
            found = (file.get_batch(k) for k in range(file.num_record_batches))
        except pyarrow.ArrowInvalid:
            source.seek(0)
            file = found = ipc.open_stream(source)

        def valid() -> "Iterator[pyarrow.RecordBatch]":
            for batch in found:
                batch.validate(full=True)  # Reading a damaged batch could end the process.
                yield batch

        return file.schema, valid()

    def tables(self, path: str) -> "Iterator[pyarrow.Table]":
        pyarrow = optional_module("pyarrow", path)
        with _named(path):
            schema, batches = self.batches(path)
            for name in self.columns:
                if name not in schema.names:
                    raise ConfigError(
                        f"{path} has no column {name!r}; it has {sorted(schema.names)}. Correct "
                        f"columns.{did_you_mean(name, schema.names)}"
                    )
            names = list(self.columns) or schema.names
            # An empty table first, for files without rows have columns, too.
            yield _plain(schema.empty_table().select(names))
            for batch in batches:
                yield _plain(pyarrow.Table.from_batches([batch]).select(names))

    @functools.cached_property
    def _columns(self) -> "list[tuple[str, pyarrow.ChunkedArray]]":
        return list(zip(self.table.column_names, self.table.columns, strict=True))

    def __getitem__(self, index: int) -> Example:
        where = self.where(index)
        try:
            return {name: value_of(column[index]) for name, column in self._columns}
        except UnicodeDecodeError as error:
            raise BadExample(
                "not_utf8", f"{where},", f"is not UTF-8: {error}", "Write its texts in UTF-8."
            ) from None
        except (ValueError, TypeError, ArithmeticError) as error:
            raise BadExample(  # A date of the year 100,000, say.
                "damaged", f"{where},", f"cannot be read: {shown(str(error), 300)}",
                "Correct the row, or leave its column out (columns).",
            ) from None

    def settings(self) -> dict[str, Any]:
        return {"columns": sorted(self.columns)}


@dataclasses.dataclass(eq=False)
class Parquet(ArrowFiles):
    """The rows of Parquet files.

    Args:
      columns: that an example has; (): all.
    """

    def batches(self, path: str) -> "tuple[pyarrow.Schema, Iterable[pyarrow.RecordBatch]]":
        parquet = optional_module("pyarrow.parquet", path)
        file = parquet.ParquetFile(path, page_checksum_verification=True)
        groups = (file.metadata.row_group(k) for k in range(file.num_row_groups))
        size = sum(group.total_byte_size for group in groups) / max(1, file.metadata.num_rows)
        num_rows = max(1, min(ROWS_PER_BATCH, int(BYTES_PER_BATCH / max(1, size))))
        return file.schema_arrow, file.iter_batches(num_rows, columns=list(self.columns) or None)


def _plain(table: "pyarrow.Table") -> "pyarrow.Table":
    """Returns a table without metadata and dictionaries, which differ from file to file."""
    types = optional_module("pyarrow.types", "Arrow")
    for number, field in enumerate(table.schema):
        if types.is_dictionary(field.type):
            column = table.column(number).cast(field.type.value_type)
            table = table.set_column(number, field.name, column)
    return table.replace_schema_metadata(None)


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Names the file in Arrow's errors, which are of many kinds where a file is damaged."""
    try:
        yield
    except Error:
        raise
    except Exception as error:
        raise ConfigError(
            f"{path} cannot be read: {shown(str(error).rstrip('.'), 300)}. Make or copy it again, "
            "or leave it out of files."
        ) from None


def value_of(scalar: Any) -> Any:
    """Returns a cell: a list of numbers as an array, all else as Python has it; None for null."""
    types, kind = optional_module("pyarrow.types", "Arrow"), scalar.type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not is_list or not scalar.is_valid or not types.is_primitive(kind.value_type):
        return without_nulls(scalar.as_py()) if types.is_nested(kind) else scalar.as_py()
    if scalar.values.null_count and not types.is_floating(kind.value_type):
        return scalar.as_py()  # NumPy would make floats of integers, for the missing to be NaN.
    return scalar.values.to_numpy(zero_copy_only=False)


def without_nulls(value: Any) -> Any:
    """Returns a nested value of Arrow without the names that are null.

    In a column of structs every row has all names, with null where JSON would have none.
    """
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return value
