"""Zarr 2 and Zarr 3: an array's metadata, by an allow-list of what Orbax writes.

Zarr 3 (Orbax's `checkpoint.v1`, and `use_zarr3` before it) has shards: a stored chunk has inner
chunks, each compressed by itself, and ends with an index of where they lie.
https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/index.html
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_lite.run.checkpoints.files.untrusted_json import is_shape

_NUMPY = (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16",
    "float32", "float64", "complex64", "complex128",
)
_ML_DTYPES = (
    "bfloat16", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "int4",
)
DTYPES = (*_NUMPY, *(name for name in _ML_DTYPES if hasattr(ml_dtypes, name)))


def np_dtype(name: str) -> np.dtype:
    """Returns the dtype of a name in a manifest."""
    return np.dtype(getattr(ml_dtypes, name) if name in _ML_DTYPES else name)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The parts of an array, as its metadata has them.

    Attributes:
      shape: of a part that is stored as a value of its own.
      inner: the shape of a shard's inner chunks, or None if the parts are no shards.
      compressed: True if each chunk, or inner chunk, is a Zstandard frame.
    """

    shape: tuple[int, ...]
    inner: tuple[int, ...] | None
    compressed: bool


class ZarrFormat(Protocol):
    """The names that a format gives, and how it describes an array.

    Attributes:
      driver: TensorStore's name for it.
      metadata_file: the end of the key of an array's metadata.
      dtypes: the names of dtypes, by those that NumPy and ml_dtypes have.
    """

    driver: str
    metadata_file: str
    dtypes: Mapping[str, str]

    def dtype_of(self, metadata: Mapping[str, Any]) -> Any:
        """Returns the dtype in an array's metadata, by the name that the format has for it."""
        ...

    def chunk_key(self, index: Sequence[int]) -> str:
        """Returns the end of the key of a chunk."""
        ...

    def chunks(self, name: str, metadata: Any, leaf: Mapping[str, Any]) -> Chunks:
        """Returns the chunks of an array of the padded shape and the dtype of `leaf`.

        Raises:
          ConfigError: the metadata is not as Orbax writes it for such an array.
        """
        ...


class _Zarr2:
    driver, metadata_file = "zarr", ".zarray"
    dtypes = {
        name: np.dtype(name).newbyteorder("<").str if name in _NUMPY else name for name in DTYPES
    }

    def dtype_of(self, metadata: Mapping[str, Any]) -> Any:
        return metadata.get("dtype")

    def chunk_key(self, index: Sequence[int]) -> str:
        return ".".join(map(str, index)) or "0"

    def chunks(self, name: str, metadata: Any, leaf: Mapping[str, Any]) -> Chunks:
        padded = leaf["padded_shape"]
        shape = metadata.pop("chunks", None) if isinstance(metadata, dict) else None
        if not isinstance(metadata, dict) or not is_shape(shape):
            raise ConfigError(f"{name}/.zarray is not as Zarr 2 has it")
        compressor = metadata.pop("compressor", None)
        if compressor is not None and (
            not isinstance(compressor, dict) or compressor.get("id") != "zstd"
            or not compressor.keys() <= {"id", "level"}
            or type(compressor.get("level", 1)) is not int
        ):
            raise ConfigError(f"{name} has the compressor {compressor!a:.80}; zstd is read")
        _check_equal(name, metadata, {
            "zarr_format": 2, "shape": padded, "dtype": self.dtypes[leaf["dtype"]], "order": "C",
            "filters": None, "fill_value": None, "dimension_separator": ".",
        })
        return Chunks(_checked_chunks(name, shape, padded), None, compressor is not None)


class _Zarr3:
    driver, metadata_file = "zarr3", "zarr.json"
    dtypes = {name: name for name in DTYPES}

    def dtype_of(self, metadata: Mapping[str, Any]) -> Any:
        return metadata.get("data_type")

    def chunk_key(self, index: Sequence[int]) -> str:
        return "/".join(["c", *map(str, index)])

    def chunks(self, name: str, metadata: Any, leaf: Mapping[str, Any]) -> Chunks:
        padded = leaf["padded_shape"]
        if not isinstance(metadata, dict):
            raise ConfigError(f"{name}/zarr.json is no JSON object")
        grid, codecs = metadata.pop("chunk_grid", None), metadata.pop("codecs", None)
        # Every chunk has to be there, so its value is never used; NaN would be another type.
        zero = np_dtype(leaf["dtype"]).type(0).item()
        _check_equal(name, metadata, {
            "zarr_format": 3, "node_type": "array", "shape": padded,
            "data_type": self.dtypes[leaf["dtype"]], "chunk_key_encoding": {"name": "default"},
            "fill_value": [0, 0] if isinstance(zero, complex) else zero,
        })
        shape = _configuration(name, grid, "regular", {"chunk_shape"})["chunk_shape"]
        shape, inner = _checked_chunks(name, shape, padded), None
        if isinstance(codecs, list) and len(codecs) == 1 and _name(codecs[0]) == "sharding_indexed":
            keys = {"chunk_shape", "codecs", "index_codecs"}
            sharding = _configuration(name, codecs[0], "sharding_indexed", keys)
            _check_equal(name, {"index_codecs": sharding["index_codecs"]}, {
                "index_codecs": [
                    {"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}
                ],
            })
            inner = _checked_chunks(name, sharding["chunk_shape"], shape)
            codecs = sharding["codecs"]
            if any(dim % part for dim, part in zip(shape, inner, strict=True)):
                raise ConfigError(f"{name} has shards of {shape}, which {inner} do not divide")
        return Chunks(shape, inner, self._is_compressed(name, codecs, np_dtype(leaf["dtype"])))

    def _is_compressed(self, name: str, codecs: Any, dtype: np.dtype) -> bool:
        little = {"name": "bytes", "configuration": {"endian": "little"}}
        # A byte has no order, and TensorStore names none.
        as_bytes = [little, {"name": "bytes"}] if dtype.itemsize == 1 else [little]
        if not isinstance(codecs, list) or len(codecs) not in (1, 2) or codecs[0] not in as_bytes:
            raise ConfigError(f"{name} has the codecs {codecs!a:.200}; bytes and zstd are read")
        if len(codecs) == 2:
            zstd = _configuration(name, codecs[1], "zstd", {"level", "checksum"})
            if type(zstd["level"]) is not int or type(zstd["checksum"]) is not bool:
                raise ConfigError(f"{name} has the codec {codecs[1]!a:.80}")
        return len(codecs) == 2


ZARR_2: ZarrFormat = _Zarr2()
ZARR_3: ZarrFormat = _Zarr3()


def _name(codec: Any) -> Any:
    return codec.get("name") if isinstance(codec, dict) else None


def _configuration(name: str, value: Any, kind: str, keys: set[str]) -> dict[str, Any]:
    """Returns the configuration of a codec or a grid: of that kind, with these keys."""
    actual = value.get("configuration") if isinstance(value, dict) else None
    if (
        not isinstance(actual, dict) or value.keys() != {"name", "configuration"}
        or value["name"] != kind or actual.keys() != keys
    ):
        raise ConfigError(f"{name} is stored with {value!a:.200} instead of {kind} of Orbax's form")
    return actual


def _check_equal(name: str, metadata: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for key in metadata.keys() | expected.keys():
        if metadata.get(key) != expected.get(key) or (key in metadata) != (key in expected):
            raise ConfigError(
                f"{name} is stored with {key!a:.40} {metadata.get(key)!a:.80} instead of "
                f"{expected.get(key)}"
            )


def _checked_chunks(name: str, chunks: Any, shape: Sequence[int]) -> tuple[int, ...]:
    if not is_shape(chunks) or len(chunks) != len(shape) or not all(
        1 <= chunk <= max(dim, 1) for chunk, dim in zip(chunks, shape, strict=False)
    ):
        raise ConfigError(f"{name} has chunks of {chunks!a:.80}, its padded shape is {shape}")
    return tuple(chunks)
