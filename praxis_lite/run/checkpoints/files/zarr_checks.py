"""Zarr arrays: what their metadata and their chunks have to be before TensorStore decodes them."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_lite.run.checkpoints.files import step_names, zstd_frames
from praxis_lite.run.checkpoints.files.ocdbt import StoredValue
from praxis_lite.run.checkpoints.files.untrusted_json import is_shape, loads
from praxis_lite.run.checkpoints.files.zarr_formats import (
    DTYPES,
    ZARR_2,
    Chunks,
    ZarrFormat,
    np_dtype,
)

_MAX_METADATA_BYTES = 2**16


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
    if dtype not in DTYPES:
        raise ConfigError(f"{path} has the dtype {dtype[:80]!r}; known are {list(DTYPES)}")
    if math.prod(padded) * np_dtype(dtype).itemsize >= 2**62:
        raise ConfigError(f"{path} has the padded shape {padded}, which no computer can hold")


def check_arrays(
    folder: Path,
    leaves: Mapping[str, Mapping[str, Any]],
    values: Mapping[str, StoredValue],
    form: ZarrFormat = ZARR_2,
) -> None:
    """Checks that the stored values are the arrays that are wanted, whole, and nothing else.

    Args:
      folder: where the values lie.
      leaves: as a manifest has them, by the name under which they are stored.
      values: by key, "NAME/.zarray" and "NAME/0.0" in Zarr 2.
      form: of all of them; an array in another format is refused.

    Raises:
      ConfigError: they are not; names the array.
    """
    num_values = 0
    for name, leaf in leaves.items():
        metadata_key = f"{name}/{form.metadata_file}"
        if metadata_key not in values:
            raise ConfigError(f"the array {name} is not in {folder.name}")
        chunks = form.chunks(name, read_metadata(folder, metadata_key, values[metadata_key]), leaf)
        itemsize = np_dtype(leaf["dtype"]).itemsize
        padded = leaf["padded_shape"]
        grid = [-(-dim // chunk) for dim, chunk in zip(padded, chunks.shape, strict=True)]
        num_values += 1 + math.prod(grid)
        if num_values > len(values):  # Before any are counted out.
            raise ConfigError(f"{name} has {math.prod(grid)} chunks, more than there are")
        for index in itertools.product(*map(range, grid)):
            key = f"{name}/{form.chunk_key(index)}"
            if key not in values:
                raise ConfigError(f"the chunk {key} is missing")
            _check_chunk(folder, key, values[key], chunks, itemsize)
    if num_values != len(values):
        end = f"/{form.metadata_file}"
        known = {f"{name}{end}" for name in leaves}
        other = [k.removesuffix(end) for k in values if k.endswith(end) and k not in known]
        array = f"the array {other[0]!r} that is not in manifest.json" if other else ""
        raise ConfigError(f"{folder.name} has {array or 'a chunk that belongs to no array'}")


def read_metadata(folder: Path, key: str, value: StoredValue) -> Any:
    """Returns the JSON of an array's metadata.

    Raises:
      ConfigError: it is none, or longer than 64 KiB.
    """
    if value.length > _MAX_METADATA_BYTES:
        raise ConfigError(f"{key} has {value.length} bytes, too many for metadata")
    return loads(value.read(folder), key)


def _check_chunk(
    folder: Path, key: str, value: StoredValue, chunks: Chunks, itemsize: int
) -> None:
    if chunks.inner is None:
        num_bytes = math.prod(chunks.shape) * itemsize
        _check_bytes(folder, key, value, num_bytes, compressed=chunks.compressed)
        return
    num_bytes = math.prod(chunks.inner) * itemsize
    num_inner = math.prod(chunks.shape) // math.prod(chunks.inner)
    for part in _inner_chunks(folder, key, value, num_inner):
        _check_bytes(folder, f"{key}, an inner one,", part, num_bytes, compressed=chunks.compressed)


def _inner_chunks(
    folder: Path, key: str, shard: StoredValue, num_inner: int
) -> list[StoredValue]:
    """Returns where a shard's inner chunks lie: in front of its index, none twice, none missing.

    The index is offset and length of each, in 8 bytes, and a checksum that TensorStore compares.
    """
    index_bytes = 16 * num_inner + 4
    data_bytes = shard.length - index_bytes
    if data_bytes < 0:
        raise ConfigError(
            f"the chunk {key} of {shard.length} bytes has no index of {num_inner} inner chunks"
        )
    index = _part(shard, data_bytes, index_bytes - 4).read(folder)
    places = np.frombuffer(index, "<u8").reshape(num_inner, 2)
    at = 0
    for offset, length in sorted(map(tuple, places.tolist())):
        if offset == length == 2**64 - 1:
            raise ConfigError(f"the chunk {key} lacks an inner chunk")
        if not at <= offset <= offset + length <= data_bytes:
            raise ConfigError(
                f"the chunk {key} has an inner chunk at {offset} to {offset + length}, of "
                f"{data_bytes} bytes, or two in one place"
            )
        at = offset + length
    return [_part(shard, offset, length) for offset, length in places.tolist()]


def _part(value: StoredValue, offset: int, length: int) -> StoredValue:
    inline = None if value.inline is None else value.inline[offset : offset + length]
    return dataclasses.replace(value, inline=inline, offset=value.offset + offset, length=length)


def _check_bytes(
    folder: Path, key: str, value: StoredValue, num_bytes: int, *, compressed: bool
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
