"""Base classes of sources whose rows are first copied into an Arrow file, for random access."""

import abc
import dataclasses
import functools
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import xxhash

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.inputs.sources.base import Example, RowsOfFiles, picklable_state
from praxis_lite.inputs.sources.derived import function_recipe
from praxis_lite.inputs.sources.faults import BadExample

if TYPE_CHECKING:
    import pyarrow

# Maximum size of a record batch in the copy: smaller batches slow down the lookup of a row, and
# larger batches take more memory to write.
ROWS_PER_BATCH, BYTES_PER_BATCH = 4096, 8 << 20


def import_datasets(needed_by: str) -> ModuleType:
    """Imports Hugging Face's `datasets` without its log lines about installed frameworks."""
    # This is the default in `datasets`, but it only takes effect after these lines are logged.
    logging.getLogger("datasets").setLevel(logging.WARNING)
    return optional_module("datasets", needed_by)


@dataclasses.dataclass(eq=False)
class CopiedFiles(RowsOfFiles):
    """Base class of sources whose rows are copied into an Arrow file in the cache folder.

    Hugging Face's `datasets` writes and locks the copy. The copy is memory-mapped, so all processes
    on a host share its pages. The copy is rebuilt when the size or modification time of a file
    changes.
    """

    @abc.abstractmethod
    def tables(self, path: str) -> "Iterator[pyarrow.Table]":
        """Yields the rows in a file as tables; all files must have the same columns."""

    @functools.cached_property
    def copy(self) -> dict[str, Any]:
        """The copy's Arrow files (`paths`), and the `counts` and `digests` of the source files."""
        key = self._key()
        # This is the folder that `datasets` would use. Look for it before importing `datasets`,
        # which takes a second and locks the folder.
        folder = Path(self.cache_folder(), self.name_of_copy, "default", "0.0.0", key)
        if not (folder / "dataset_info.json").exists():
            import_datasets(type(self).__name__)
            from praxis_lite.inputs.sources.arrow_copy import write_copy

            folder = write_copy(self, key)
        try:
            info = json.loads((folder / "dataset_info.json").read_text())
            content = json.loads(info["description"])
        except (OSError, ValueError, KeyError) as error:
            raise self._damaged(error) from None
        return {**content, "paths": sorted(map(str, folder.glob("*.arrow")))}

    @property
    def name_of_copy(self) -> str:
        """The folder name for copies of this class of sources."""
        return type(self).__name__.lower()

    def _key(self) -> str:
        """Returns a hash of everything that determines the copy: files, settings and code."""
        folder = self.cache_folder()
        # Use relative paths, so that a folder can be moved together with its cache.
        files = [
            (os.path.relpath(path, folder), *state)
            for path, state in zip(self.paths, self.states, strict=True)
        ]
        code = [function_recipe(getattr(type(self), name, None)) for name in ("tables", "records")]
        text = json.dumps([self.settings(), code, files], default=repr)
        return xxhash.xxh3_128_hexdigest(text.encode())

    def _damaged(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"The copy of {self.files} in {self.cache_folder()} cannot be read ({error}). Delete "
            "that folder, and launch again to rebuild the copy."
        )

    @property
    def counts(self) -> list[int]:
        return self.copy["counts"]

    @property
    def digests(self) -> list[str]:
        """The hex XXH3 of each file's bytes."""
        return self.copy["digests"]

    @functools.cached_property
    def table(self) -> "pyarrow.Table":
        """The copy, memory-mapped. Raises ConfigError if it is damaged."""
        pyarrow, ipc = optional_module("pyarrow", "Arrow"), optional_module("pyarrow.ipc", "Arrow")
        try:
            table = pyarrow.concat_tables(
                [
                    ipc.open_stream(pyarrow.memory_map(path)).read_all()
                    for path in self.copy["paths"]
                ]
            )
            if table.num_rows != len(self):
                raise OSError(f"it has {table.num_rows:,} rows, expected {len(self):,}")
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise self._damaged(error) from None
        return table

    def check(self) -> None:
        super().check()
        _ = self.table

    def __getstate__(self) -> dict[str, Any]:
        return picklable_state(self, "paths", "states", "copy")


@dataclasses.dataclass(eq=False)
class FileSource(CopiedFiles):
    """Base class of sources over files of records: subclasses split files and decode records."""

    @abc.abstractmethod
    def records(self, path: str) -> Iterator[tuple[int, bytes]]:
        """Yields (row or line number, bytes) for each record in a file.

        Raises:
          BadExample: The rest of the file cannot be read. The rest is treated as a single example,
            which is skipped and counted if the fault is in `skip`.
        """

    @abc.abstractmethod
    def example(self, record: bytes, where: str) -> Example:
        """Decodes the record at location `where`. Raises BadExample if it is invalid."""

    def tables(self, path: str) -> "Iterator[pyarrow.Table]":
        arrow = optional_module("pyarrow", path)
        schema = arrow.schema(
            {"row": arrow.int64(), "record": arrow.binary(), "fault": arrow.string()}
        )
        rows: list[int] = []
        records: list[bytes | None] = []
        faults: list[str | None] = []
        size = 0

        def table() -> "pyarrow.Table":
            return arrow.table([rows, records, faults], schema=schema)

        row = -1
        try:
            for row, record in self.records(path):
                rows.append(row)
                records.append(record)
                faults.append(None)
                size += len(record)
                if len(rows) == ROWS_PER_BATCH or size > BYTES_PER_BATCH:
                    yield table()
                    rows, records, faults, size = [], [], [], 0
        # The rest of the file becomes one row with the fault, which is raised when the row is read.
        except BadExample as error:
            rows.append(row + 1)
            records.append(None)
            faults.append(json.dumps(error.arguments))
        yield table()

    @functools.cached_property
    def _columns(self) -> "dict[str, pyarrow.ChunkedArray]":
        return {name: self.table.column(name) for name in self.table.column_names}

    def check(self) -> None:
        super().check()
        for fault in self._columns["fault"].drop_null().to_pylist():
            error = BadExample(*json.loads(fault))
            if error.fault not in self.skip:
                raise error

    def __getitem__(self, index: int) -> Example:
        where = self.where(index)
        if (record := self._columns["record"][index].as_py()) is None:
            raise BadExample(*json.loads(self._columns["fault"][index].as_py()))
        return self.example(record, where)

    def where(self, index: int) -> str:
        file, _ = self.file_and_row(index)
        return f"{self.paths[file]}, row {self._columns['row'][index].as_py()}"
