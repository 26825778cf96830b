"""Copies in which any row is found: ArrayRecord files of records, Arrow files of columns."""

import os
from typing import Any

from praxis_lite.errors import not_written

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
        if not self._reader.ok():
            self._reader.close()  # Says why. Otherwise the file would seem to be empty.

    def __len__(self) -> int:
        return self._reader.num_records()

    def __getitem__(self, index: int) -> bytes:
        return self._reader.read([index])[0]


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


def write_arrow(path: str, parquet: Any, rows_per_batch: int) -> None:
    """Copies a pyarrow ParquetFile into an Arrow file, all of whose batches but the last are full.

    The file is there whole or not at all.
    """
    import pyarrow
    from pyarrow import ipc

    partial, waiting, num_waiting = f"{path}.{os.getpid()}.partial", [], 0
    try:
        with ipc.new_file(partial, parquet.schema_arrow) as writer:
            for batch in parquet.iter_batches(rows_per_batch):
                waiting.append(batch)
                num_waiting += batch.num_rows
                if num_waiting >= rows_per_batch:
                    table = pyarrow.Table.from_batches(waiting).combine_chunks()
                    writer.write_batch(table.slice(0, rows_per_batch).to_batches()[0])
                    waiting = table.slice(rows_per_batch).to_batches()
                    num_waiting -= rows_per_batch
            if num_waiting:
                table = pyarrow.Table.from_batches(waiting).combine_chunks()
                writer.write_batch(table.to_batches()[0])
        os.replace(partial, path)
    except OSError as error:
        raise not_written(path, error) from None
    finally:
        if os.path.exists(partial):
            os.unlink(partial)
