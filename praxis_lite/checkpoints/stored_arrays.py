"""Opens the arrays that Orbax wrote with TensorStore, and checks that all of them are there.

Orbax may write less than it was given without an error, and TensorStore reads a missing chunk as
zeros unless it is told not to.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from praxis_lite.core.errors import ConfigError

ITEMS = ("mdl_vars", "opt_states")
DATABASE = "manifest.ocdbt"
METADATA_FILES = {".zarray": "zarr", "zarr.json": "zarr3"}  # TensorStore's driver for each.
# The keys of an array "a.b": "a.b/.zarray" and "a.b/0.1" in Zarr 2, "a.b/zarr.json" and "a.b/c/0/1"
# in Zarr 3. A name may contain "/".
_KEY = re.compile(r"(.+?)/(\.zarray|zarr\.json|\d+(?:\.\d+)*|c(?:/\d+)*)")
_BLOCK_BYTES = 2**26  # Read at a time, where an array's chunks allow it.
_MAX_TREE_BYTES = 10**8  # Of an OCDBT database's tree, cached while its arrays are read.


@dataclasses.dataclass(frozen=True, eq=False)
class StoredArray:
    """A stored array, opened; its values are read on request.

    Attributes:
      path: "mdl_vars/params/...".
      shape: the logical, unpadded shape.
      array: the padded array.
      folder: of the checkpoint, for errors.
    """

    path: str
    shape: tuple[int, ...]
    array: ts.TensorStore
    folder: Path

    @property
    def padded_shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype.numpy_dtype

    def parts(self) -> Iterator[slice]:
        """Yields the rows to read at a time: those of one chunk, or of several up to 64 MiB."""
        yield from self._parts(self.shape)

    def read(self, rows: slice | None = None) -> np.ndarray:
        """Returns the values without padding; with `rows`, of these rows only.

        Raises:
          ConfigError: they cannot be decoded; names the array.
        """
        cut = tuple(slice(0, dim) for dim in self.shape)
        return self.read_block(cut if rows is None else (rows, *cut[1:])[: len(cut)])

    def read_block(self, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a part of the padded array; raises as `read`."""
        try:
            return np.asarray(self.array[index].read().result())
        except ValueError as error:
            raise _unreadable(self.folder, self.path, error) from None

    def padding_is_zero(self) -> bool:
        """Returns True if there are only zeros around the values; reads all."""
        for rows in self._parts(self.padded_shape):
            block = self.read_block((rows,)[: len(self.shape)])
            if self.shape:
                num_logical = max(0, min(self.shape[0] - rows.start, len(block)))
                block[tuple(slice(0, dim) for dim in (num_logical, *self.shape[1:]))] = 0
                if (block != 0).any():
                    return False
        return True

    def _parts(self, shape: tuple[int, ...]) -> Iterator[slice]:
        if not shape:
            yield slice(0, 1)
            return
        chunk_rows = self.array.chunk_layout.read_chunk.shape[0]
        row_bytes = max(1, math.prod(self.padded_shape[1:]) * self.dtype.itemsize)
        num_rows = max(1, _BLOCK_BYTES // (row_bytes * chunk_rows)) * chunk_rows
        for start in range(0, shape[0], num_rows):
            yield slice(start, min(start + num_rows, shape[0]))


def stored_arrays(step_dir: Path, manifest: Mapping[str, Any]) -> dict[str, StoredArray]:
    """Returns the arrays of a step by path, sorted; reads no values.

    Raises:
      ConfigError: an array is missing, lacks a chunk, or has another shape or dtype than the
        manifest; names it.
    """
    arrays = {}
    for item in ITEMS:
        # Orbax joins names by ".", the manifest by "/"; a name may contain either.
        actual = {
            f"{item}/{name}".replace(".", "/"): array
            for name, array in _opened(step_dir / item).items()
        }
        for path, leaf in manifest["leaves"].items():
            if not path.startswith(f"{item}/"):
                continue
            array = actual.get(path.replace(".", "/"))
            if array is None:
                raise ConfigError(f"The checkpoint {step_dir}: {path} is missing in {item}.")
            stored = array.dtype.name, list(array.shape)
            expected = leaf["dtype"], leaf["padded_shape"]
            if stored != expected:
                raise ConfigError(
                    f"The checkpoint {step_dir}: {path} is stored as {stored[0]}{stored[1]}, but "
                    f"manifest.json has {expected[0]}{expected[1]}."
                )
            arrays[path] = StoredArray(path, tuple(leaf["shape"]), array, step_dir)
    return dict(sorted(arrays.items()))


def orbax_arrays(folder: Path, prefix: str = "") -> dict[str, StoredArray]:
    """Returns the arrays of a folder that another program wrote with Orbax; reads no values.

    Args:
      folder: an OCDBT database, or a folder with a folder for each array, in Zarr 2 or Zarr 3.
      prefix: of the names that are opened; paths are without it.

    Raises:
      ConfigError: an array cannot be opened, or lacks a chunk; names it.
    """
    arrays = {
        name.removeprefix(prefix).replace(".", "/"): array
        for name, array in _opened(folder, prefix).items()
    }
    return {path: StoredArray(path, array.shape, array, folder) for path, array in arrays.items()}


def _opened(folder: Path, prefix: str = "") -> dict[str, ts.TensorStore]:
    """Returns the padded arrays in a folder by Orbax's names."""
    kvstore = {"driver": "file", "path": f"{folder}/"}
    if (folder / DATABASE).is_file():
        kvstore = {
            "driver": "ocdbt", "base": kvstore, "path": "", "cache_pool": "cache_pool#tree"
        }
    context = ts.Context({
        "cache_pool": {"total_bytes_limit": 0},  # Decoded chunks are not cached.
        "cache_pool#tree": {"total_bytes_limit": _MAX_TREE_BYTES},
    })
    drivers, num_chunks = {}, collections.Counter()
    try:
        keys = ts.KvStore.open(kvstore, context=context).result().list().result()
    except ValueError as error:
        raise _unreadable(folder, DATABASE, error) from None
    for key in keys:
        match = _KEY.fullmatch(key.decode())
        if match and match[1].startswith(prefix):
            if match[2] in METADATA_FILES:
                drivers[match[1]] = METADATA_FILES[match[2]]
            else:
                num_chunks[match[1]] += 1
    # All are opened at once: each reads its metadata.
    opening = {
        name: ts.open(
            {
                "driver": driver, "kvstore": {**kvstore, "path": f"{kvstore['path']}{name}/"},
                "fill_missing_data_reads": False,  # Of chunks within a shard of Zarr 3.
            },
            open=True, read=True, context=context,
        )
        for name, driver in drivers.items()
    }
    arrays = {}
    for name, future in opening.items():
        try:
            array = arrays[name] = future.result()
        except ValueError as error:
            raise _unreadable(folder, name, error) from None
        chunk = array.chunk_layout.write_chunk.shape or ()  # None for a scalar.
        expected = math.prod(-(-dim // part) for dim, part in zip(array.shape, chunk, strict=True))
        if num_chunks[name] != expected:
            raise ConfigError(
                f"The checkpoint {folder}: {name} has {num_chunks[name]} chunks instead of "
                f"{expected}. It is damaged: use another step, or another copy of this one."
            )
    return arrays


def _unreadable(folder: Path, name: str, error: ValueError) -> ConfigError:
    reason = " ".join(str(error).split()).partition(" [")[0]  # Specs and source locations follow.
    return ConfigError(
        f"The checkpoint {folder}: {name} cannot be read ({reason[:500]}). It is damaged: use "
        "another step, or another copy of this one."
    )
