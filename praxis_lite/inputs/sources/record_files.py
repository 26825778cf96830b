"""Copies in which any row is found: ArrayRecord files of records, Arrow files of columns."""

import os
from collections.abc import Iterable
from typing import Any

from praxis_lite.errors import ConfigError, not_written

# Records that are compressed together: fewer are read faster, more are smaller.
_GROUP = 16


class RecordFile:
    """The records of an ArrayRecord file, by their numbers.

    Raises:
      RuntimeError: the file is damaged; says how.
    """

    def __init__(self, path: str):
        from array_record.python.array_record_module import ArrayRecordReader

        # Nothing is read ahead: records are asked for in any order.
        self._reader = ArrayRecordReader(path, "readahead_buffer_size:0,max_parallelism:0")
        if not self._reader.ok():  # It would seem to be empty.
            why = "its end is missing or damaged"
            try:
                self._reader.close()
            except RuntimeError as error:
                why = str(error) or why
            raise RuntimeError(why)

    def __len__(self) -> int:
        return self._reader.num_records()

    def __getitem__(self, index: int) -> bytes:
        return self._reader.read([index])[0]


class RecordCopy(RecordFile):
    """The records of an ArrayRecord file that a source made of another file.

    Raises:
      ConfigError: it is gone or damaged; says what to remove.
    """

    def __init__(self, path: str, original: str):
        self._path, self._original = path, original
        try:
            super().__init__(path)
        except RuntimeError as error:
            raise self._damage(error) from None

    def __getitem__(self, index: int) -> bytes:
        try:
            return super().__getitem__(index)
        except RuntimeError as error:
            raise self._damage(error) from None

    def _damage(self, error: RuntimeError) -> ConfigError:
        return ConfigError(
            f"{self._path}, the copy of {self._original}, cannot be read: {error}. Remove the "
            "folder that it is in, and launch again, which makes it anew."
        )


class RecordWriter:
    """Writes records; the file is there when all are written, or not at all."""

    def __init__(self, path: str):
        from array_record.python.array_record_module import ArrayRecordWriter

        self._path, self._partial = path, f"{path}.{os.getpid()}.partial"
        self._writer = ArrayRecordWriter(self._partial, f"group_size:{_GROUP},zstd:3")

    def write(self, record: bytes) -> None:
        self._writer.write(record)

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(self, error: Any, *_: Any) -> None:
        try:
            self._writer.close()
            if error is None:
                os.replace(self._partial, self._path)
            else:
                os.unlink(self._partial)
        except (OSError, RuntimeError, ValueError) as failure:
            if error is None:
                raise not_written(self._path, OSError(0, str(failure))) from None


def remove_copies(folder: str, name: str) -> None:
    """Removes Arrow files whose names begin so: of what a file was, or left by a killed process."""
    for old in os.listdir(folder):
        if old.startswith(name) and ".arrow" in old[len(name) :]:
            os.unlink(os.path.join(folder, old))


def write_arrow(path: str, schema: Any, batches: Iterable[Any], rows_per_batch: int) -> None:
    """Writes record batches into an uncompressed Arrow file, in batches of so many rows or fewer.

    The file is there whole or not at all.
    """
    from pyarrow import ipc

    partial = f"{path}.{os.getpid()}.partial"
    try:
        with ipc.new_file(partial, schema) as writer:
            for batch in batches:
                for first in range(0, batch.num_rows, rows_per_batch):
                    writer.write_batch(batch.slice(first, rows_per_batch))
        os.replace(partial, path)
    except OSError as error:
        if error.errno is None:  # Of the file that is read, not of the disk that is written.
            raise
        raise not_written(path, error) from None
    finally:
        if os.path.exists(partial):
            os.unlink(partial)
