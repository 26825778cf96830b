"""Opens the arrays of a checkpoint with TensorStore, and checks that they are complete.

The check is needed because Orbax may omit arrays without an error, and because TensorStore by
default reads missing chunks as zeros.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorstore as ts

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.object_stores import AnyPath, StorePath, kvstore_context, kvstore_of

ITEMS = ("mdl_vars", "opt_states")
DATABASE = "manifest.ocdbt"
METADATA_FILES = {".zarray": "zarr", "zarr.json": "zarr3"}  # TensorStore's driver for each file.
# The keys for an array "a.b" are "a.b/.zarray" and "a.b/0.1" in Zarr 2, and "a.b/zarr.json" and
# "a.b/c/0/1" in Zarr 3. The name of an array may contain "/".
_KEY = re.compile(r"(.+?)/(\.zarray|zarr\.json|\d+(?:\.\d+)*|c(?:/\d+)*)")
_BLOCK_BYTES = 2**26  # Number of bytes to read at a time if the array's chunks are smaller.
_MAX_TREE_BYTES = 10**8  # Cache size for the tree of an OCDBT database.


@dataclasses.dataclass(frozen=True, eq=False)
class StoredArray:
    """An opened array in a checkpoint, whose values are read on request.

    Attributes:
      path: Path of the array, such as "mdl_vars/params/...".
      shape: Logical shape.
      array: The stored array, with padding.
      folder: Folder of the checkpoint, for error messages.
    """

    path: str
    shape: tuple[int, ...]
    array: ts.TensorStore
    folder: AnyPath

    @property
    def padded_shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def is_in_store(self) -> bool:
        return isinstance(self.folder, StorePath)

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype.numpy_dtype

    def parts(self) -> Iterator[slice]:
        """Yields slices of rows to read at a time: complete chunks, about 64 MiB if possible."""
        yield from self._parts(self.shape)

    def read(self, rows: slice | None = None) -> np.ndarray:
        """Reads the values without padding.

        Args:
          rows: The rows to read, or None for all rows.

        Raises:
          ConfigError: The values cannot be decoded. The message includes the array's path.
        """
        logical = tuple(slice(0, dim) for dim in self.shape)
        return self.read_block(logical if rows is None else (rows, *logical[1:])[: len(logical)])

    def read_block(self, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a block of the padded array. Raises ConfigError like `read`."""
        try:
            return np.asarray(self.array[index].read().result())
        except ValueError as error:
            raise _unreadable(self.folder, self.path, error) from None

    def padding_is_zero(self) -> bool:
        """Reads the complete array and returns whether its padding is all zeros."""
        for rows in self._parts(self.padded_shape):
            block = self.read_block((rows,)[: len(self.shape)])
            if self.shape:
                num_logical = max(0, min(self.shape[0] - rows.start, len(block)))
                # Clear the logical part: what remains is padding.
                block[tuple(slice(0, dim) for dim in (num_logical, *self.shape[1:]))] = 0
                if (block != 0).any():
                    return False
        return True

    def _parts(self, shape: tuple[int, ...]) -> Iterator[slice]:
        if not shape:
            yield slice(0, 1)
            return
        chunk = self.array.chunk_layout.read_chunk.shape
        assert chunk is not None and chunk[0] is not None, "Only scalars have no chunk shape."
        chunk_rows = chunk[0]
        row_bytes = max(1, math.prod(self.padded_shape[1:]) * self.dtype.itemsize)
        # Blocks contain entire chunks, so that no chunk is read twice.
        num_rows = max(1, _BLOCK_BYTES // (row_bytes * chunk_rows)) * chunk_rows
        for start in range(0, shape[0], num_rows):
            yield slice(start, min(start + num_rows, shape[0]))


def stored_arrays(step_dir: AnyPath, manifest: Mapping[str, Any]) -> dict[str, StoredArray]:
    """Opens the arrays of a step without reading their values.

    Args:
      step_dir: The step's folder.
      manifest: The step's manifest.

    Returns:
      The arrays, keyed and sorted by path.

    Raises:
      ConfigError: An array or a chunk is missing, or a shape or dtype differs from the manifest.
        The message includes the array's path.
    """
    with ThreadPoolExecutor() as pool:
        opened = list(pool.map(lambda item: _opened(step_dir / item), ITEMS))
    arrays = {}
    for item, by_name in zip(ITEMS, opened, strict=True):
        # Orbax joins names with ".", the manifest with "/"; the names may contain both characters.
        actual = {f"{item}/{name}".replace(".", "/"): array for name, array in by_name.items()}
        for path, leaf in manifest["leaves"].items():
            if not path.startswith(f"{item}/"):
                continue
            array = actual.get(path.replace(".", "/"))
            if array is None:
                raise ConfigError(f"The checkpoint {step_dir}: {path} is missing from {item}.")
            stored = array.dtype.name, list(array.shape)
            expected = leaf["dtype"], leaf["padded_shape"]
            if stored != expected:
                raise ConfigError(
                    f"The checkpoint {step_dir}: {path} is stored as {stored[0]}{stored[1]}, but "
                    f"is {expected[0]}{expected[1]} in manifest.json."
                )
            arrays[path] = StoredArray(path, tuple(leaf["shape"]), array, step_dir)
    return dict(sorted(arrays.items()))


def orbax_arrays(folder: AnyPath, prefix: str = "") -> dict[str, StoredArray]:
    """Opens arrays written by another program with Orbax, without reading their values.

    Args:
      folder: An OCDBT database, or a folder with one subfolder per array in Zarr 2 or Zarr 3.
      prefix: Name prefix of the arrays to open, which is removed from the paths.

    Returns:
      The arrays, keyed by path.

    Raises:
      ConfigError: An array cannot be opened, or a chunk is missing. The message includes the
        array's name.
    """
    arrays = {
        name.removeprefix(prefix).replace(".", "/"): array
        for name, array in _opened(folder, prefix).items()
    }
    return {path: StoredArray(path, array.shape, array, folder) for path, array in arrays.items()}


def _opened(folder: AnyPath, prefix: str = "") -> dict[str, ts.TensorStore]:
    """Opens the padded arrays in a folder, keyed by their Orbax names."""
    # Orbax stores all arrays in one OCDBT database, or each array in a folder.
    kvstore = kvstore_of(folder)
    if (folder / DATABASE).is_file():
        kvstore = {"driver": "ocdbt", "base": kvstore, "path": "", "cache_pool": "cache_pool#tree"}
    context = ts.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},  # Do not cache decoded chunks.
            "cache_pool#tree": {"total_bytes_limit": _MAX_TREE_BYTES},
            **kvstore_context(),
        }
    )
    drivers = {}
    num_chunks: collections.Counter[str] = collections.Counter()
    try:
        # Until this function returns, `store` keeps the tree of an OCDBT database in the cache.
        store = ts.KvStore.open(kvstore, context=context).result()
        keys = store.list().result()
    except ValueError as error:
        raise _unreadable(folder, DATABASE, error) from None
    # A key is the metadata or one chunk of an array. The chunks are compared with the shape below.
    for key in keys:
        match = _KEY.fullmatch(key.decode())
        if match and match[1].startswith(prefix):
            if match[2] in METADATA_FILES:
                drivers[match[1]] = METADATA_FILES[match[2]]
            else:
                num_chunks[match[1]] += 1
    # Open all arrays concurrently, because each reads its metadata.
    opening = {
        name: ts.open(
            {
                "driver": driver,
                "kvstore": {**kvstore, "path": f"{kvstore['path']}{name}/"},
                # Raise an error for missing chunks inside a Zarr 3 shard.
                "fill_missing_data_reads": False,
                # The cache belongs to this call, so it contains nothing that is older. TensorStore
                # would otherwise read the database's manifest again before each array.
                "recheck_cached_metadata": False,
                "recheck_cached_data": False,
            },
            open=True,
            read=True,
            context=context,
        )
        for name, driver in drivers.items()
    }
    arrays = {}
    for name, future in opening.items():
        try:
            array = arrays[name] = future.result()
        except ValueError as error:
            raise _unreadable(folder, name, error) from None
        # The shape is None for a scalar.
        chunk = [part for part in array.chunk_layout.write_chunk.shape or () if part is not None]
        counts = [-(-dim // part) for dim, part in zip(array.shape, chunk, strict=True)]
        expected = math.prod(counts)
        if num_chunks[name] != expected:
            raise ConfigError(
                f"The checkpoint {folder}: {name} has {num_chunks[name]} chunks instead of "
                f"{expected}. The array is damaged. Use a different step, or a copy of this step."
            )
    return arrays


def _unreadable(folder: AnyPath, name: str, error: ValueError) -> ConfigError:
    # Cut off TensorStore's specs and source locations.
    reason = " ".join(str(error).split()).partition(" [")[0]
    return ConfigError(
        f"The checkpoint {folder}: {name} cannot be read ({reason[:500]}). The array is "
        "damaged. Use a different step, or a copy of this step."
    )
