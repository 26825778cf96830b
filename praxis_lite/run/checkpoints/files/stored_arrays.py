"""The arrays of a step: checked before anything is decoded, and read without a model.

A step that passes its digests may still be made by someone else. What such a file could do, and
what meets it; all was tried with Orbax 0.12.8 and TensorStore 0.1.86:

- Names that lead out of the folder, or symlinks: `step_names.check_names` lets pass only regular
  files under the names that are written; `ocdbt` only references to such files, within their
  length. (TensorStore refuses ".." and absolute names as well, but follows symlinks.)
- A tree whose decoding ends the process, or reads beside its memory: `ocdbt` decodes it first.
- Bombs: nodes of the tree are decoded up to 128 MiB, never by what they claim. Of a chunk
  TensorStore decodes as much as its shape says, no more (its frame may hold more: an error);
  chunks are no larger than their array, their windows no larger than 8 MiB, and each is stored in
  at least the bytes that such a chunk needs, so that a shape without data is refused.
- Missing chunks, which are read as zeros without a word: each has to be there.
- Shards of Zarr 3, which other programs write: each inner chunk is checked as a chunk is, and lies
  in front of the shard's index, in a place of its own.
- Other codecs (blosc, gzip, bz2), filters, object dtypes, other formats: not in the allow-list.
- Orbax's JSON files, which name types, formats and modules: none is read.

Nothing protects against someone who changes the files while they are read.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from praxis_lite.core.errors import ConfigError
from praxis_lite.files.open_folder import OpenFolder
from praxis_lite.host.host_memory import available_bytes
from praxis_lite.run.checkpoints.files import step_names
from praxis_lite.run.checkpoints.files.ocdbt import kvstore_spec, reading_context, stored_values
from praxis_lite.run.checkpoints.files.origin import Origin
from praxis_lite.run.checkpoints.files.zarr_checks import check_arrays, check_leaf
from praxis_lite.run.checkpoints.files.zarr_formats import np_dtype

# What is read at a time, where an array's chunks allow it.
BLOCK_BYTES = 2**26


@dataclasses.dataclass(frozen=True, eq=False)
class StoredArray:
    """A stored array, checked, and read when it is asked for.

    Attributes:
      path: "mdl_vars/params/...".
      shape: the logical, unpadded shape.
      padded_shape: as it is stored.
      dtype: NumPy's or ml_dtypes'.
    """

    path: str
    shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    dtype: np.dtype
    _spec: Mapping[str, Any]  # TensorStore's: driver and kvstore.
    _context: ts.Context
    _origin: Origin
    _opened: OpenFolder  # Held: the path in `_spec` is good as long as it lives.

    @property
    def num_bytes(self) -> int:
        """Bytes of the padded array, decoded."""
        return math.prod(self.padded_shape) * self.dtype.itemsize

    def parts(self) -> Iterator[slice]:
        """Yields the rows to read at a time: those of a chunk, or of several that make 64 MiB."""
        yield from self._parts(self.shape)

    def read(self, rows: slice | None = None) -> np.ndarray:
        """Returns the values without padding; with `rows`, of these rows only.

        Raises:
          ConfigError: they cannot be decoded, or do not fit into memory; names the array.
        """
        cut = tuple(slice(0, dim) for dim in self.shape)
        return self.read_block(cut if rows is None else (rows, *cut[1:])[: len(cut)])

    def padding_is_zero(self) -> bool:
        """Returns True if there is nothing but zeros around the values; reads all."""
        for rows in self._parts(self.padded_shape):
            block = self.read_block((rows,)[: len(self.shape)])
            if self.shape:
                num_true = max(0, min(self.shape[0] - rows.start, len(block)))
                block[tuple(slice(0, dim) for dim in (num_true, *self.shape[1:]))] = 0
                if (block != 0).any():
                    return False
        return True

    def _parts(self, shape: tuple[int, ...]) -> Iterator[slice]:
        if not shape:
            yield slice(0, 1)
            return
        chunk_rows = self._array.chunk_layout.read_chunk.shape[0]
        row_bytes = max(1, math.prod(self.padded_shape[1:]) * self.dtype.itemsize)
        num_rows = max(1, BLOCK_BYTES // (row_bytes * chunk_rows)) * chunk_rows
        for start in range(0, shape[0], num_rows):
            yield slice(start, min(start + num_rows, shape[0]))

    def read_block(self, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a part of the padded array; raises as `read`."""
        part = self._array[index]
        num_bytes = math.prod(part.shape) * self.dtype.itemsize
        if num_bytes > (free := available_bytes()):
            raise ConfigError(
                f"{self._origin.folder}: {self.path} does not fit into memory: {num_bytes} bytes "
                f"are to be read at once, {free} are free."
            )
        try:
            return np.asarray(part.read().result())
        except ValueError as error:
            raise self._origin.undecodable(error, self.path) from None

    @functools.cached_property
    def _array(self) -> ts.TensorStore:
        try:
            return ts.open(self._spec, open=True, read=True, context=self._context).result()
        except ValueError as error:
            raise self._origin.undecodable(error, self.path) from None


def stored_arrays(
    step_dir: Path, manifest: Mapping[str, Any], origin: Origin | None = None
) -> dict[str, StoredArray]:
    """Returns the arrays of a step by path, sorted; checks that they can be decoded safely.

    Args:
      step_dir: a step, verified (`step_files.verify`): its files are those of the manifest.
      manifest: the step's.
      origin: the words in which it is refused; by default those for a step that is to be used.

    Raises:
      ConfigError: what is stored is not what the manifest says; says what, and what to do.
    """
    leaves, arrays = manifest["leaves"], {}
    origin, context = origin or Origin(step_dir), reading_context()
    with origin.refusing():
        _check_leaves(manifest)
        step_names.check_names(step_dir)
        opened = OpenFolder(step_dir)
        for item in step_names.ITEMS:
            folder, of_item = step_dir / item, {}
            values = stored_values(folder)
            # Orbax parts names by "." and the manifest by "/"; either may stand within a name.
            names = {_by_slashes(key): key[:-8] for key in values if key.endswith("/.zarray")}
            for path, leaf in leaves.items():
                first, _, rest = path.partition("/")
                if first == item:
                    name = names.get(_by_slashes(f"{rest}/.zarray"), rest.replace("/", "."))
                    if name in of_item:
                        raise ConfigError(f"two arrays have one name where they are stored, {name}")
                    of_item[name] = leaf
                    shapes = tuple(leaf["shape"]), tuple(leaf["padded_shape"])
                    kvstore = kvstore_spec(opened.path / item, f"{name}/")
                    spec, dtype = {"driver": "zarr", "kvstore": kvstore}, np_dtype(leaf["dtype"])
                    arrays[path] = StoredArray(
                        path, *shapes, dtype, spec, context, origin, opened
                    )
            check_arrays(folder, of_item, values)
    return dict(sorted(arrays.items()))


def _by_slashes(key: str) -> str:
    return key.removesuffix("/.zarray").replace(".", "/")


def check_leaves(step_dir: Path, manifest: Mapping[str, Any]) -> None:
    """Checks a manifest's entries of its arrays; reads no other file.

    Raises:
      ConfigError: no array can be as the manifest says.
    """
    with Origin(step_dir).refusing():
        _check_leaves(manifest)


def _check_leaves(manifest: Mapping[str, Any]) -> None:
    for path, leaf in manifest["leaves"].items():
        check_leaf(path, leaf)
