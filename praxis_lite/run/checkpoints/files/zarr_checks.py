"""Zarr arrays: what their metadata and their chunks have to be before TensorStore decodes them."""

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_lite.run.checkpoints.files import step_names, zstd_frames
from praxis_lite.run.checkpoints.files.ocdbt import StoredValue
from praxis_lite.run.checkpoints.files.untrusted_json import is_shape, loads

_NUMPY = (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16",
    "float32", "float64", "complex64", "complex128",
)
_ML_DTYPES = (
    "bfloat16", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "int4",
)
# What Zarr calls them, by the name that NumPy has.
ZARR_NAMES = {
    **{name: np.dtype(name).newbyteorder("<").str for name in _NUMPY},
    **{name: name for name in _ML_DTYPES if hasattr(ml_dtypes, name)},
}


def check_leaf(path: str, leaf: Mapping[str, Any]) -> None:
    """Checks a manifest's entry of an array.

    Raises:
      ConfigError: there can be no such array.
    """
    shape, padded, dtype = leaf["shape"], leaf["padded_shape"], leaf["dtype"]
    item, *keys = path.split("/")
    if item not in step_names.ITEMS or set(keys) & {"", ".", ".."} or not path.isprintable():
        raise ConfigError(f"manifest.json has an array {path[:80]!r}, which is in no item")
    if not is_shape(shape) or not is_shape(padded):
        raise ConfigError(f"{path} has the shape {str(shape)[:80]}, padded {str(padded)[:80]}")
    if len(shape) != len(padded) or any(p < s for s, p in zip(shape, padded, strict=True)):
        raise ConfigError(f"{path} has the shape {shape}, padded to a smaller one, {padded}")
    if dtype not in ZARR_NAMES:
        raise ConfigError(f"{path} has the dtype {dtype[:80]!r}; known are {list(ZARR_NAMES)}")
    if math.prod(padded) * np_dtype(dtype).itemsize >= 2**62:
        raise ConfigError(f"{path} has the padded shape {padded}, which no computer can hold")


def check_arrays(
    folder: Path, leaves: Mapping[str, Mapping[str, Any]], values: Mapping[str, StoredValue]
) -> None:
    """Checks that the stored values are the arrays that are wanted, whole, and nothing else.

    Args:
      folder: where the values lie.
      leaves: as a manifest has them, by the name under which they are stored.
      values: by key, "NAME/.zarray" and "NAME/0.0".

    Raises:
      ConfigError: they are not; names the array.
    """
    num_values = 0
    for name, leaf in leaves.items():
        if f"{name}/.zarray" not in values:
            raise ConfigError(f"the array {name} is not in {folder.name}")
        text = values[f"{name}/.zarray"].read(folder, 2**16)
        chunks, compressed = _check_zarray(name, loads(text, f"{name}/.zarray"), leaf)
        chunk_bytes = math.prod(chunks) * np_dtype(leaf["dtype"]).itemsize
        grid = [-(-dim // chunk) for dim, chunk in zip(leaf["padded_shape"], chunks, strict=True)]
        num_values += 1 + math.prod(grid)
        if num_values > len(values):  # Before any are counted out.
            raise ConfigError(f"{name} has {math.prod(grid)} chunks, more than there are")
        for index in itertools.product(*map(range, grid)):
            key = f"{name}/{'.'.join(map(str, index)) or 0}"
            if key not in values:
                raise ConfigError(f"the chunk {key} is missing")
            _check_chunk(folder, key, values[key], chunk_bytes, compressed)
    if num_values != len(values):
        known = {f"{name}/.zarray" for name in leaves}
        other = [k for k in values if k.endswith("/.zarray") and k not in known]
        array = f"the array {other[0][:-8]!r} that is not in manifest.json" if other else ""
        raise ConfigError(f"{folder.name} has {array or 'a chunk that belongs to no array'}")


def _check_zarray(
    name: str, zarray: Any, leaf: Mapping[str, Any]
) -> tuple[tuple[int, ...], bool]:
    """Returns the shape of an array's chunks, and True if they are compressed."""
    padded = leaf["padded_shape"]
    chunks = zarray.pop("chunks", None) if isinstance(zarray, dict) else None
    if not isinstance(zarray, dict) or not is_shape(chunks):
        raise ConfigError(f"{name}/.zarray is not as Zarr 2 has it")
    compressor = zarray.pop("compressor", None)
    if compressor is not None and (
        not isinstance(compressor, dict) or compressor.get("id") != "zstd"
        or not compressor.keys() <= {"id", "level"} or type(compressor.get("level", 1)) is not int
    ):
        raise ConfigError(f"{name} has the compressor {compressor!a:.80}; zstd is read")
    expected = {
        "zarr_format": 2, "shape": padded, "dtype": ZARR_NAMES[leaf["dtype"]], "order": "C",
        "filters": None, "fill_value": None, "dimension_separator": ".",
    }
    for key in zarray.keys() | expected.keys():
        if zarray.get(key) != expected.get(key) or (key in zarray) != (key in expected):
            raise ConfigError(
                f"{name} is stored with {key!a:.40} {zarray.get(key)!a:.80} instead of "
                f"{expected.get(key)}"
            )
    if len(chunks) != len(padded) or not all(
        1 <= chunk <= max(dim, 1) for chunk, dim in zip(chunks, padded, strict=False)
    ):
        raise ConfigError(f"{name} has chunks of {chunks}, its padded shape is {padded}")
    return tuple(chunks), compressor is not None


def _check_chunk(
    folder: Path, key: str, value: StoredValue, num_bytes: int, compressed: bool
) -> None:
    if not compressed:
        size = value.length
    elif value.length * zstd_frames.MAX_RATIO < num_bytes:
        raise ConfigError(
            f"the chunk {key} of {num_bytes} bytes cannot be in the {value.length} bytes stored"
        )
    else:
        size = zstd_frames.content_bytes(value.read(folder, zstd_frames.MAX_HEADER_BYTES))
    if size not in (None, num_bytes):
        raise ConfigError(f"the chunk {key} holds {size} bytes instead of {num_bytes}")


def np_dtype(name: str) -> np.dtype:
    """Returns the dtype of a name in a manifest."""
    return np.dtype(getattr(ml_dtypes, name) if name in _ML_DTYPES else name)
