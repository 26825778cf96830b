"""Files of records: TFRecord and ArrayRecord."""

import dataclasses
import functools
import gzip
import os
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from praxis_lite.errors import ConfigError
from praxis_lite.inputs.base import described
from praxis_lite.inputs.sources.base import Example, FileSource
from praxis_lite.inputs.sources.faults import BadExample
from praxis_lite.inputs.sources.file_index import FileIndex, Made, name_beside
from praxis_lite.inputs.sources.record_files import RecordFile, RecordWriter

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
        try:
            return {"num_examples": len(RecordFile(path))}, {}
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"{path} is no whole ArrayRecord file: {error}. Make or copy it again, or leave "
                "it out of files."
            ) from None

    def example(self, index: FileIndex, row: int) -> Example:
        if index.path not in self._open:
            index.require_unchanged()
            self._open[index.path] = self._opened(index.path)
        return (self.decode or tf_example)(self._record(index, row))

    def _opened(self, path: str) -> Any:
        return RecordFile(path)

    def _record(self, index: FileIndex, row: int) -> bytes:
        return self._open[index.path][row]

    @functools.cached_property
    def _open(self) -> dict[str, Any]:
        return {}

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
            with gzip.open(path, "rb") as file, RecordWriter(self._copy_of(path)) as copy:
                try:
                    while (record := _next_record(file, path, len(starts) - 1)) is not None:
                        copy.write(record)
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

    def _opened(self, path: str) -> Any:
        if path.endswith(".gz"):
            return RecordFile(self._copy_of(path))
        return os.open(path, os.O_RDONLY)

    def _record(self, index: FileIndex, row: int) -> bytes:
        file = self._open[index.path]
        if isinstance(file, RecordFile):
            return file[row]
        start, stop = index.arrays["starts"][row : row + 2].tolist()
        data = os.pread(file, stop - start, start)
        _require_sum(data[12:-4], data[-4:], index.path, row)
        return data[12:-4]

    def _copy_of(self, path: str) -> str:
        return os.path.join(self.cache_folder(), f"{name_beside(path)}.array_record")


def tf_example(record: bytes) -> Example:
    """Returns the features of a serialized tf.train.Example: int64, float32 or object (bytes)."""
    from praxis_lite.inputs.tf.tensorflow_import import tensorflow

    parsed = tensorflow("TfRecords without decode", None).train.Example.FromString(record)
    found = {}
    for name, feature in parsed.features.feature.items():
        kind = feature.WhichOneof("kind")
        if kind == "int64_list":
            found[name] = np.array(feature.int64_list.value, np.int64)
        elif kind == "float_list":
            found[name] = np.array(feature.float_list.value, np.float32)
        else:
            values = list(feature.bytes_list.value)
            found[name] = values[0] if len(values) == 1 else values
    return found


def _next_record(file: Any, path: str, number: int) -> bytes | None:
    """Returns the next record, or None at the end. Raises EOFError if the file is cut off."""
    header = file.read(12)
    if not header:
        return None
    if len(header) < 12:
        raise EOFError("it ends within a record")
    (length,) = _LENGTH.unpack(header[:8])
    _require_sum(header[:8], header[8:], path, number)
    data = file.read(length + 4)
    if len(data) < length + 4:
        raise EOFError("it ends within a record")
    _require_sum(data[:-4], data[-4:], path, number)
    return data[:-4]


def _require_sum(data: bytes, wanted: bytes, path: str, number: int) -> None:
    import google_crc32c

    found = google_crc32c.value(data)
    # As TFRecord masks it, so that a checksum of checksums is none of zeros.
    masked = (((found >> 15) | (found << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    if masked != _CRC.unpack(wanted)[0]:
        raise BadExample(
            "damaged", f"{path}, row {number},", "does not have the checksum that was written",
            "Make or copy the file again; a compressed file's name must end in .gz.",
        )
