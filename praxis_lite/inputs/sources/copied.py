"""Files whose rows are copied once into an Arrow file, in which any row is found by its number."""

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
from praxis_lite.inputs.sources.base import Example, RowsOfFiles, settings_alone
from praxis_lite.inputs.sources.derived import code_of
from praxis_lite.inputs.sources.faults import BadExample

if TYPE_CHECKING:
    import pyarrow

# Of a batch in the copy. Fewer make more batches to search, more take more memory to write.
ROWS_PER_BATCH, BYTES_PER_BATCH = 4096, 8 << 20


def import_datasets(needed_by: str) -> ModuleType:
    """Returns Hugging Face's `datasets`, imported without its lines on the frameworks it finds."""
    logging.getLogger("datasets").setLevel(logging.WARNING)  # As it does once it is imported.
    return optional_module("datasets", needed_by)


@dataclasses.dataclass(eq=False)
class CopiedFiles(RowsOfFiles):
    """Source over files whose rows are copied into an Arrow file below `cache_dir`.

    Hugging Face's `datasets` writes and locks the copy; it is memory-mapped, so all processes of a
    host share its pages. It is made again if a file has another size or time of change.
    """

    @abc.abstractmethod
    def tables(self, path: str) -> "Iterator[pyarrow.Table]":
        """Yields the rows of a file; all files have the same columns."""

    @functools.cached_property
    def copy(self) -> dict[str, Any]:
        """The `paths` of the copy's Arrow files, and the `counts` and `digests` of the files."""
        key = self._key()
        # Where `datasets` writes it. It takes a second to import, and locks the folder, so it is
        # left out if the copy is there.
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
        """The name of the folder of copies of such files."""
        return type(self).__name__.lower()

    def _key(self) -> str:
        """Returns a hash of what determines the copy: the files, and how they are read."""
        folder = self.cache_folder()
        # Relative paths, for a folder may be moved together with its cache.
        files = [
            (os.path.relpath(path, folder), *state)
            for path, state in zip(self.paths, self.states, strict=True)
        ]
        code = [code_of(getattr(type(self), name, None)) for name in ("tables", "records")]
        text = json.dumps([self.settings(), code, files], default=repr)
        return xxhash.xxh3_128_hexdigest(text.encode())

    def _damaged(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"The copy of {self.files} in {self.cache_folder()} cannot be read ({error}). Delete "
            "that folder, and launch again, which makes the copy again."
        )

    @property
    def counts(self) -> list[int]:
        return self.copy["counts"]

    @property
    def digests(self) -> list[str]:
        """XXH3 of the bytes of each file, in hex."""
        return self.copy["digests"]

    @functools.cached_property
    def table(self) -> "pyarrow.Table":
        """The copy, memory-mapped. Raises ConfigError if it is damaged."""
        pyarrow, ipc = optional_module("pyarrow", "Arrow"), optional_module("pyarrow.ipc", "Arrow")
        try:
            table = pyarrow.concat_tables([
                ipc.open_stream(pyarrow.memory_map(path)).read_all() for path in self.copy["paths"]
            ])
            if table.num_rows != len(self):
                raise OSError(f"it has {table.num_rows:,} rows of {len(self):,}")
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise self._damaged(error) from None
        return table

    def check(self) -> None:
        super().check()
        _ = self.table

    def __getstate__(self) -> dict[str, Any]:
        return settings_alone(self, "paths", "states", "copy")


@dataclasses.dataclass(eq=False)
class FileSource(CopiedFiles):
    """Source over files of records. A format is how a file is cut, and how a record is decoded."""

    @abc.abstractmethod
    def records(self, path: str) -> Iterator[tuple[int, bytes]]:
        """Yields (number for messages, bytes) of each record of a file.

        Raises:
          BadExample: the rest of the file cannot be read. It stands for that rest: an error, or
            counted if its fault is in `skip`.
        """

    @abc.abstractmethod
    def example(self, record: bytes, where: str) -> Example:
        """Returns the example of a record. Raises BadExample, which names the place `where`."""

    def tables(self, path: str) -> "Iterator[pyarrow.Table]":
        pyarrow = optional_module("pyarrow", path)
        schema = pyarrow.schema({
            "row": pyarrow.int64(), "record": pyarrow.binary(), "fault": pyarrow.string()
        })
        rows, records, faults, size = [], [], [], 0

        def table() -> "pyarrow.Table":
            return pyarrow.table([rows, records, faults], schema=schema)

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
        except BadExample as error:
            rows.append(row + 1)
            records.append(None)
            faults.append(json.dumps(error.given))
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
        file, _ = self.place_of(index)
        return f"{self.paths[file]}, row {self._columns['row'][index].as_py()}"
