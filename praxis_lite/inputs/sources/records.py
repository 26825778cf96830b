"""Files of records: TFRecord and ArrayRecord."""

import dataclasses
import functools
import gzip
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from praxis_lite.core.callables import function_name
from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.inputs.base import described
from praxis_lite.inputs.sources.base import Example, RowsOfFiles
from praxis_lite.inputs.sources.copied import FileSource
from praxis_lite.inputs.sources.faults import BadExample
from praxis_lite.inputs.sources.in_place_files import OpenedFiles
from praxis_lite.inputs.sources.tf_example import tf_example

if TYPE_CHECKING:
    from array_record.python.array_record_data_source import ArrayRecordDataSource

_LARGEST = 1 << 31  # Bytes of a record: a tf.train.Example has less.
_LENGTH, _CRC = struct.Struct("<Q"), struct.Struct("<I")
_THREADS = 16  # A file's end is read to count its records.


@dataclasses.dataclass(eq=False)
class ArrayRecords(OpenedFiles):
    """The records of ArrayRecord files, read by the data source that Grain reads them with.

    Args:
      decode: an importable function from a record's bytes to an example. None: each is a
        `tf.train.Example`, whose lists become arrays, of numbers or of bytes.
    """

    decode: Callable[[bytes], Example] | None = None

    @functools.cached_property
    def counts(self) -> list[int]:
        with ThreadPoolExecutor(_THREADS) as pool:
            return [len(file) for file in pool.map(_array_records, self.paths)]

    def open_file(self, path: str) -> "ArrayRecordDataSource":
        return _array_records(path)

    def __getitem__(self, index: int) -> Example:
        file, row = self.place_of(index)
        where = f"{self.paths[file]}, row {row}"
        try:
            record = self.opened(file)[row]
        except RuntimeError as error:
            raise BadExample(
                "damaged", f"{where},", f"cannot be read: {error}", "Make or copy the file again."
            ) from None
        return _decoded(self, record, where)

    def settings(self) -> dict[str, Any]:
        return {"decode": described(self.decode)}


@dataclasses.dataclass(eq=False)
class TfRecords(FileSource):
    """The records of TFRecord files, plain, or compressed as .gz.

    Args:
      decode: as of ArrayRecords.
    """

    needed_package = "google_crc32c"

    decode: Callable[[bytes], Example] | None = None

    def records(self, path: str) -> Iterator[tuple[int, bytes]]:
        row, reason = 0, ""
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
            while True:
                try:
                    header = file.read(12)
                    if not header:
                        return
                    if len(header) < 12 or not _has_sum(header[:8], header[8:], path):
                        break
                    (length,) = _LENGTH.unpack(header[:8])
                    if length > _LARGEST:
                        reason = f": it is said to have {length:,} bytes"
                        break
                    # With its checksum, which is compared when the record is asked for.
                    if len(record := file.read(length + 4)) < length + 4:
                        break
                except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                    reason = f" ({error})"
                    break
                yield row, record
                row += 1
        raise BadExample(
            "truncated", path, f"is cut off or damaged: its record {row:,} cannot be read{reason}",
            "Make or copy the file again; a compressed file's name must end in .gz.",
        )

    def example(self, record: bytes, where: str) -> Example:
        data, checksum = record[:-4], record[-4:]
        if not _has_sum(data, checksum, where):
            raise BadExample(
                "damaged", f"{where},", "does not have the checksum that was written",
                "Make or copy the file again.",
            )
        return _decoded(self, data, where)

    def settings(self) -> dict[str, Any]:
        return {"decode": described(self.decode)}


def _array_records(path: str) -> "ArrayRecordDataSource":
    # Grain's data source, imported from where Grain has it: Grain itself would load JAX.
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    try:
        return ArrayRecordDataSource(path)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as an ArrayRecord file: {shown(str(error), 300)}. Make or copy "
            "it again, or leave it out of files."
        ) from None


def _decoded(source: RowsOfFiles, record: bytes, where: str) -> Example:
    """Returns a record as the source's `decode` returns it, or the features of a tf.train.Example.
    """
    if source.decode is None:
        return _features(record, where)
    try:
        result = source.decode(record)
    except Exception as error:
        error.add_note(f"It was raised for {where}.")
        raise
    if not isinstance(result, Mapping):
        raise ConfigError(
            f"{type(source).__name__}: {function_name(source.decode)} returns a "
            f"{type(result).__name__} for {where}; expected a dict. Return one, by name."
        )
    return result


def _features(record: bytes, where: str) -> Example:
    from google.protobuf.message import DecodeError

    try:
        return tf_example(record)
    except DecodeError:
        raise BadExample(
            "damaged", f"{where},",
            f"is not a tf.train.Example: it begins {shown(repr(record[:24]))}",
            "Set decode to a function from the record's bytes to a dict.",
        ) from None


def _has_sum(data: bytes, expected: bytes, path: str) -> bool:
    crc = optional_module("google_crc32c", path).value(data)
    # As TFRecord masks it, so that a checksum of checksums is not zero.
    return _CRC.pack((((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF) == expected
