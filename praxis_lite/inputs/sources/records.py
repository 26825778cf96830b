"""Sources over TFRecord and ArrayRecord files."""

import dataclasses
import functools
import gzip
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from praxis_lite.core.callables import function_name
from praxis_lite.core.errors import ConfigError, shortened
from praxis_lite.host.file_reading import has_extension
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.inputs.base import fingerprint_json
from praxis_lite.inputs.sources.base import Example
from praxis_lite.inputs.sources.copied import FileSource
from praxis_lite.inputs.sources.faults import BadExample
from praxis_lite.inputs.sources.in_place_files import OpenedFiles

_MAX_RECORD_BYTES = 1 << 31  # The size limit for a protocol buffer such as tf.train.Example.
_LENGTH, _CRC = struct.Struct("<Q"), struct.Struct("<I")


@dataclasses.dataclass(eq=False)
class ArrayRecords(OpenedFiles):
    """The records of ArrayRecord files, read with the library that Grain uses.

    Args:
      decode: Importable function from a record's bytes to an example. If None, records are parsed
        as `tf.train.Example`: numbers become arrays, and a bytes feature becomes bytes, or a list
        unless it has exactly one value.
    """

    needed_package = "array_record"

    decode: Callable[[bytes], Example] | None = None

    num_counting_threads = 16

    def open_file(self, path: str) -> Any:
        # Importing this class from Grain would also import JAX.
        module = optional_module("array_record.python.array_record_data_source", "ArrayRecords")
        try:
            return module.ArrayRecordDataSource(path)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"{path} cannot be read as an ArrayRecord file: {shortened(str(error), 300)}. "
                "Write or copy it again, or exclude it from `files`."
            ) from None

    def num_rows(self, opened: Any, path: str) -> int:
        return len(opened)

    def __getitem__(self, index: int) -> Example:
        file, row = self.file_and_row(index)
        where = f"{self.paths[file]}, row {row}"
        try:
            record = self.opened(file)[row]
        except RuntimeError as error:
            raise BadExample(
                "damaged", f"{where},", f"cannot be read: {error}", "Write or copy the file again."
            ) from None
        return _decode(self, record, where)

    def settings(self) -> dict[str, Any]:
        return {"decode": fingerprint_json(self.decode)}


@dataclasses.dataclass(eq=False)
class TfRecords(FileSource):
    """The records of TFRecord files, uncompressed or gzipped (.gz).

    Args:
      decode: Importable function from a record's bytes to an example. If None, records are parsed
        as `tf.train.Example`: numbers become arrays, and a bytes feature becomes bytes, or a list
        unless it has exactly one value.
    """

    needed_package = "google_crc32c"

    decode: Callable[[bytes], Example] | None = None

    def records(self, path: str) -> Iterator[tuple[int, bytes]]:
        row, reason = 0, ""
        with (gzip.open if has_extension(path, ".gz") else open)(path, "rb") as file:
            while True:
                try:
                    # The length of the record in 8 bytes, and its checksum in 4.
                    header = file.read(12)
                    if not header:
                        return
                    if len(header) < 12 or not _has_checksum(header[:8], header[8:], path):
                        break
                    (length,) = _LENGTH.unpack(header[:8])
                    if length > _MAX_RECORD_BYTES:
                        reason = f": its header has a length of {length:,} bytes"
                        break
                    # Include the record's checksum, which `example` verifies.
                    if len(record := file.read(length + 4)) < length + 4:
                        break
                except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                    reason = f" ({error})"
                    break
                yield row, record
                row += 1
        raise BadExample(
            "truncated",
            path,
            f"is truncated or damaged: record {row:,} cannot be read{reason}",
            "Write or copy the file again. Names of gzipped files must end in .gz.",
        )

    def example(self, record: bytes, where: str) -> Example:
        data, checksum = record[:-4], record[-4:]
        if not _has_checksum(data, checksum, where):
            raise BadExample(
                "damaged",
                f"{where},",
                "does not match its checksum",
                "Write or copy the file again.",
            )
        return _decode(self, data, where)

    def settings(self) -> dict[str, Any]:
        return {"decode": fingerprint_json(self.decode)}


def _decode(source: ArrayRecords | TfRecords, record: bytes, where: str) -> Example:
    """Decodes a record with the source's `decode`, or parses it as a tf.train.Example."""
    if source.decode is None:
        return _parse_tf_example(record, where)
    try:
        example = source.decode(record)
    except Exception as error:
        error.add_note(f"It was raised for {where}.")
        raise
    if not isinstance(example, Mapping):
        raise ConfigError(
            f"{type(source).__name__}: {function_name(source.decode)} returns a "
            f"{type(example).__name__} for {where}; expected a dict."
        )
    return example


def _parse_tf_example(record: bytes, where: str) -> Example:
    """Parses a serialized tf.train.Example without tensorflow.

    Returns:
      The features, keyed by name. Numbers are int64 or float32 arrays. A bytes feature is bytes if
      it has exactly one value, and a list of bytes otherwise.
    """
    from google.protobuf.message import DecodeError

    try:
        message = _tf_example_class().FromString(record)
    except DecodeError:
        raise BadExample(
            "damaged",
            f"{where},",
            f"is not a tf.train.Example: it starts with {shortened(repr(record[:24]))}",
            "Set `decode` to a function that returns a dict from the record's bytes.",
        ) from None
    features: dict[str, Any] = {}
    for name, feature in message.features.feature.items():
        kind = feature.WhichOneof("kind")
        values = getattr(feature, kind).value if kind else []
        if kind == "int64_list":
            features[name] = np.array(values, np.int64)
        elif kind == "float_list":
            features[name] = np.array(values, np.float32)
        else:
            features[name] = values[0] if len(values) == 1 else list(values)
    return features


# The messages in tensorflow's example.proto and feature.proto, as a FileDescriptorProto. A field
# `map<string, Feature>` is a repeated message with a key and a value.
_TF_EXAMPLE = """
name: "example.proto" package: "tensorflow" syntax: "proto3"
message_type { name: "BytesList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type { name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 oneof_index: 0 type_name: ".tensorflow.BytesList" }
  field { name: "float_list" number: 2 oneof_index: 0 type_name: ".tensorflow.FloatList" }
  field { name: "int64_list" number: 3 oneof_index: 0 type_name: ".tensorflow.Int64List" } }
message_type { name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED
    type_name: ".tensorflow.Features.FeatureEntry" }
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 label: LABEL_OPTIONAL type_name: ".tensorflow.Feature" } } }
message_type { name: "Example"
  field { name: "features" number: 1 label: LABEL_OPTIONAL type_name: ".tensorflow.Features" } }
"""


@functools.cache
def _tf_example_class() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    file = text_format.Parse(_TF_EXAMPLE, descriptor_pb2.FileDescriptorProto())
    # Use a separate pool, because tensorflow registers the same names in the default pool.
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


def _has_checksum(data: bytes, expected: bytes, path: str) -> bool:
    crc = optional_module("google_crc32c", path).value(data)
    # TFRecord masks CRCs like this, because CRCs of data that contains CRCs are weak.
    return _CRC.pack((((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF) == expected
