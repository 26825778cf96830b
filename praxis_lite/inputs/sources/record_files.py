"""Copies in which any row is found: ArrayRecord files of records, Arrow files of columns."""

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from praxis_lite.core.errors import ConfigError
from praxis_lite.files.whole_files import not_written
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.inputs.sources import kept
from praxis_lite.inputs.sources.file_index import FileIndex, name_beside, state_of
from praxis_lite.inputs.sources.files.plain import partial_path

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


class PlainFile:
    """A file of which any bytes are read, closed when nothing refers to it."""

    def __init__(self, path: str):
        self._number = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._number)

    def read(self, start: int, stop: int) -> bytes:
        """Returns the bytes from start to stop."""
        return os.pread(self._number, stop - start, start)


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
            f"{self._path}, the copy of {self._original}, cannot be read: {error}. It was whole "
            "when it was opened. Launch again, which makes it anew; and look after the disk."
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


def copy_of(folder: str, index: FileIndex, make: Callable[[str], Any]) -> str:
    """Returns the path of a file's copy, which is made if there is none as it was written.

    Args:
      folder: in which copies are kept.
      make: makes, of the file's path, the copy with `writing_copy`.
    """

    def made(_: list[int]) -> None:
        _log.info("copying %s into %s, to find any row", index.path, folder)
        make(index.path)

    def is_current(_: int, item: kept.Kept) -> bool:
        # A digest of a large file need not notice what its time of change does.
        return item.values.get("state") == list(index.state)

    (result,) = kept.entries(folder, [_name_of(index.path)], made, is_current)
    (path,) = result.files.values()
    return path


@contextlib.contextmanager
def writing_copy(folder: str, path: str, end: str) -> Iterator[str]:
    """Gives a path to write a file's copy at, which is kept if that went well.

    Args:
      end: of the copy's name.
    """
    state, partial = state_of(path), partial_path(folder)
    try:
        yield partial
        kept.write(folder, _name_of(path), {"state": state}, {}, {end: partial})
    finally:
        with contextlib.suppress(OSError):
            os.unlink(partial)


def _name_of(path: str) -> str:
    return f"{name_beside(path)}.copy"


def write_arrow(path: str, schema: Any, batches: Iterable[Any], rows_per_batch: int) -> None:
    """Writes record batches into an uncompressed Arrow file, in batches of so many rows or fewer.

    Raises:
      ConfigError: the disk does not take it.
    """
    ipc = optional_module("pyarrow.ipc", path)
    try:
        # A stream, in which a column's dictionary may change from batch to batch.
        with ipc.new_stream(path, schema) as writer:
            for batch in batches:
                for first in range(0, batch.num_rows, rows_per_batch):
                    writer.write_batch(batch.slice(first, rows_per_batch))
    except OSError as error:
        if error.errno is None:  # Of the file that is read, not of the disk that is written.
            raise
        raise not_written(path, error) from None


_log = logging.getLogger(__name__)
