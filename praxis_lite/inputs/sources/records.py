"""Files of records: TFRecord and ArrayRecord."""

import dataclasses
import gzip
import os
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from praxis_lite.core.callables import function_name
from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.inputs.base import described
from praxis_lite.inputs.sources.base import Example, FileSource
from praxis_lite.inputs.sources.faults import BadExample
from praxis_lite.inputs.sources.file_index import FileIndex, Made
from praxis_lite.inputs.sources.record_files import (
    PlainFile,
    RecordCopy,
    RecordFile,
    RecordWriter,
    copy_of,
    writing_copy,
)
from praxis_lite.inputs.tf.tf_example import tf_example

_LARGEST = 1 << 31  # Bytes of a record: a tf.train.Example has less.
_LENGTH, _CRC = struct.Struct("<Q"), struct.Struct("<I")


@dataclasses.dataclass(eq=False)
class ArrayRecords(FileSource):
    """The records of ArrayRecord files.

    Args:
      decode: an importable function from a record's bytes to an example. None: each is a
        `tf.train.Example`, whose lists become arrays, of numbers or of bytes.
    """

    decode: Callable[[bytes], Example] | None = None

    def index_file(self, path: str) -> Made:
        return {"num_examples": len(_record_file(path))}, {}

    def example(self, index: FileIndex, row: int) -> Example:
        record, where = self._record(index, row), f"{index.path}, row {row}"
        if self.decode is None:
            return _features(record, where)
        try:
            result = self.decode(record)
        except Exception as error:
            error.add_note(f"It was raised for {where}.")
            raise
        if not isinstance(result, Mapping):
            raise ConfigError(
                f"{type(self).__name__}: {function_name(self.decode)} returns a "
                f"{type(result).__name__} for {where}; wanted is a dict. Return one, by name."
            )
        return result

    def open_file(self, index: FileIndex) -> Any:
        file = _record_file(index.path)
        index.require_rows(len(file))
        return file

    def _record(self, index: FileIndex, row: int) -> bytes:
        try:
            return self.opened(index)[row]
        except RuntimeError as error:
            raise BadExample(
                "damaged", f"{index.path}, row {row},", f"cannot be read: {error}",
                "Make or copy the file again.",
            ) from None

    def settings(self) -> dict[str, Any]:
        return {"decode": described(self.decode)}


@dataclasses.dataclass(eq=False)
class TfRecords(ArrayRecords):
    """The records of TFRecord files, plain, or compressed as .gz.

    The checksum of each record is compared when it is read. A compressed file cannot be read from
    its middle: its records are copied once into an ArrayRecord file beside the index.
    """

    def index_file(self, path: str) -> Made:
        starts, values = [0], {}
        if path.endswith(".gz"):
            with (
                gzip.open(path, "rb") as file,
                writing_copy(self.cache_folder(), path, "array_record") as copy,
                RecordWriter(copy) as writer,
            ):
                try:
                    while (record := _next_record(file, path, len(starts) - 1)) is not None:
                        writer.write(record)
                        starts.append(0)
                except (EOFError, OSError, zlib.error) as error:
                    values["truncated"] = f"after record {len(starts) - 1:,} ({error})"
            return {"num_examples": len(starts) - 1, **values}, {}
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            while starts[-1] < size:
                file.seek(starts[-1])
                header = file.read(12)
                if len(header) == 12:
                    (length,) = _LENGTH.unpack(header[:8])
                    _require_sum(header[:8], header[8:], path, len(starts) - 1)
                if len(header) < 12 or starts[-1] + 16 + length > size:
                    values["truncated"] = f"its record {len(starts) - 1:,} is not whole"
                    break
                starts.append(starts[-1] + 16 + length)
        return {"num_examples": len(starts) - 1, **values}, {"starts": np.array(starts, np.int64)}

    def open_file(self, index: FileIndex) -> RecordFile | PlainFile:
        if index.path.endswith(".gz"):
            copy = copy_of(self.cache_folder(), index, self.index_file)
            return RecordCopy(copy, index.path)
        return PlainFile(index.path)

    def _record(self, index: FileIndex, row: int) -> bytes:
        file = self.opened(index)
        if isinstance(file, RecordFile):
            return file[row]
        start, stop = index.arrays["starts"][row : row + 2].tolist()
        data = file.read(start, stop)
        _require_sum(data[12:-4], data[-4:], index.path, row)
        return data[12:-4]


def _record_file(path: str) -> RecordFile:
    try:
        return RecordFile(path)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{path} is no whole ArrayRecord file: {shown(str(error), 300)}. Make or copy it "
            "again, or leave it out of files."
        ) from None


def _features(record: bytes, where: str) -> Example:
    from google.protobuf.message import DecodeError

    try:
        return tf_example(record)
    except DecodeError:
        raise BadExample(
            "damaged", f"{where},", f"is no tf.train.Example: it begins {shown(repr(record[:24]))}",
            "Set decode to a function from the record's bytes to a dict.",
        ) from None


def _next_record(file: Any, path: str, number: int) -> bytes | None:
    """Returns the next record, or None at the end. Raises EOFError if the file is cut off."""
    header = file.read(12)
    if not header:
        return None
    if len(header) < 12:
        raise EOFError("it ends within a record")
    (length,) = _LENGTH.unpack(header[:8])
    _require_sum(header[:8], header[8:], path, number)
    if length > _LARGEST:
        raise BadExample(
            "damaged", f"{path}, row {number},", f"has {length:,} bytes, it says; wanted are at "
            f"most {_LARGEST:,}", "Make or copy the file again.",
        )
    data = file.read(length + 4)
    if len(data) < length + 4:
        raise EOFError("it ends within a record")
    _require_sum(data[:-4], data[-4:], path, number)
    return data[:-4]


def _require_sum(data: bytes, expected: bytes, path: str, number: int) -> None:
    actual = optional_module("google_crc32c", path).value(data)
    # As TFRecord masks it, so that a checksum of checksums is none of zeros.
    masked = (((actual >> 15) | (actual << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    if _CRC.pack(masked) != expected:
        raise BadExample(
            "damaged", f"{path}, row {number},", "does not have the checksum that was written",
            "Make or copy the file again; a compressed file's name must end in .gz.",
        )
