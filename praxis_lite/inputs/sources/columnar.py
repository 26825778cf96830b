"""Sources over Parquet and Arrow IPC files."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from praxis_lite.core.errors import ConfigError, Error, did_you_mean, require, shortened
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.inputs.sources.base import Example
from praxis_lite.inputs.sources.copied import BYTES_PER_BATCH, ROWS_PER_BATCH, CopiedFiles
from praxis_lite.inputs.sources.faults import BadExample

if TYPE_CHECKING:
    import pyarrow


@dataclasses.dataclass(eq=False)
class ArrowFiles(CopiedFiles):
    """A source over the rows of Arrow IPC files, in the file or the stream format.

    Args:
      columns: Names of the columns to read; if (), all columns are read.
    """

    columns: tuple[str, ...] = ()

    def check(self) -> None:
        require(
            not isinstance(self.columns, str),
            f"{type(self).__name__}.columns",
            self.columns,
            "a list of column names",
        )
        super().check()

    def batches(self, path: str) -> "tuple[pyarrow.Schema, Iterable[pyarrow.RecordBatch]]":
        """Returns the schema and the validated record batches of a file."""
        arrow, ipc = optional_module("pyarrow", path), optional_module("pyarrow.ipc", path)
        source = arrow.memory_map(path)
        try:
            file = ipc.open_file(source)
            batches = (file.get_batch(k) for k in range(file.num_record_batches))
        except arrow.ArrowInvalid:
            source.seek(0)
            file = batches = ipc.open_stream(source)

        def validated() -> "Iterator[pyarrow.RecordBatch]":
            for batch in batches:
                batch.validate(full=True)  # Reading a damaged batch could crash the process.
                yield batch

        return file.schema, validated()

    def tables(self, path: str) -> "Iterator[pyarrow.Table]":
        pyarrow = optional_module("pyarrow", path)
        with _errors_of_file(path):
            schema, batches = self.batches(path)
            for name in self.columns:
                if name not in schema.names:
                    raise ConfigError(
                        f"{path} has no column {name!r}; its columns are {sorted(schema.names)}. "
                        f"Correct `columns`.{did_you_mean(name, schema.names)}"
                    )
            names = list(self.columns) or schema.names
            # Yield an empty table first, so that the columns of an empty file are checked, too.
            yield _without_encodings(schema.empty_table().select(names))
            for batch in batches:
                yield _without_encodings(pyarrow.Table.from_batches([batch]).select(names))

    @functools.cached_property
    def _columns(self) -> "list[tuple[str, pyarrow.ChunkedArray]]":
        return list(zip(self.table.column_names, self.table.columns, strict=True))

    def __getitem__(self, index: int) -> Example:
        where = self.where(index)
        try:
            return {name: value_of(column[index]) for name, column in self._columns}
        except UnicodeDecodeError as error:
            raise BadExample(
                "not_utf8", f"{where},", f"is not UTF-8: {error}", "Convert the text to UTF-8."
            ) from None
        except (ValueError, TypeError, ArithmeticError) as error:
            raise BadExample(  # For example, a date in the year 100,000.
                "damaged",
                f"{where},",
                f"cannot be read: {shortened(str(error), 300)}",
                "Correct the row, or exclude the column with `columns`.",
            ) from None

    def settings(self) -> dict[str, Any]:
        return {"columns": sorted(self.columns)}


@dataclasses.dataclass(eq=False)
class Parquet(ArrowFiles):
    """A source over the rows of Parquet files.

    Args:
      columns: Names of the columns to read; if (), all columns are read.
    """

    def batches(self, path: str) -> "tuple[pyarrow.Schema, Iterable[pyarrow.RecordBatch]]":
        parquet = optional_module("pyarrow.parquet", path)
        file = parquet.ParquetFile(path, page_checksum_verification=True)
        groups = (file.metadata.row_group(k) for k in range(file.num_row_groups))
        size = sum(group.total_byte_size for group in groups) / max(1, file.metadata.num_rows)
        num_rows = max(1, min(ROWS_PER_BATCH, int(BYTES_PER_BATCH / max(1, size))))
        return file.schema_arrow, file.iter_batches(num_rows, columns=list(self.columns) or None)


def _without_encodings(table: "pyarrow.Table") -> "pyarrow.Table":
    """Removes metadata and dictionary encodings, which may differ between files."""
    types = optional_module("pyarrow.types", "Arrow")
    for number, field in enumerate(table.schema):
        if types.is_dictionary(field.type):
            column = table.column(number).cast(field.type.value_type)
            table = table.set_column(number, field.name, column)
    return table.replace_schema_metadata(None)


@contextlib.contextmanager
def _errors_of_file(path: str) -> Iterator[None]:
    """Converts the errors that Arrow raises to a ConfigError that contains the file's path."""
    try:
        yield
    except Error:
        raise
    except Exception as error:
        raise ConfigError(
            f"{path} cannot be read: {shortened(str(error).rstrip('.'), 300)}. Write or copy it "
            "again, or exclude it from `files`."
        ) from None


def value_of(scalar: Any) -> Any:
    """Converts an Arrow scalar to a Python value, or a list of numbers to a NumPy array."""
    types, kind = optional_module("pyarrow.types", "Arrow"), scalar.type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not is_list or not scalar.is_valid or not types.is_primitive(kind.value_type):
        return without_nulls(scalar.as_py()) if types.is_nested(kind) else scalar.as_py()
    if scalar.values.null_count and not types.is_floating(kind.value_type):
        return scalar.as_py()  # NumPy would convert integers to floats, with NaN for nulls.
    return scalar.values.to_numpy(zero_copy_only=False)


def without_nulls(value: Any) -> Any:
    """Removes null fields from the structs in a nested Arrow value.

    All structs in an Arrow column have the same fields; fields that JSON would omit are null.
    """
    if isinstance(value, list):
        return [without_nulls(child) for child in value]
    if isinstance(value, dict):
        return {name: without_nulls(child) for name, child in value.items() if child is not None}
    return value
