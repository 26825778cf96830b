"""What Orbax and TensorStore stored: checked before anything is decoded, and read without a model.

A step that passes its digests may still be made by someone else. What such a file could do, and
what meets it; all was tried with Orbax 0.12.8 and TensorStore 0.1.86:

- Names that lead out of the folder, or symlinks: `orbax_files.check_names` lets pass only regular
  files under the names that are written; `ocdbt` only references to such files, within their
  length. (TensorStore refuses ".." and absolute names as well, but follows symlinks.)
- A tree whose decoding ends the process, or reads beside its memory: `ocdbt` decodes it first.
- Bombs: nodes of the tree are decoded up to 128 MiB, never by what they claim. Of a chunk
  TensorStore decodes as much as its shape says, no more (its frame may hold more: an error);
  chunks are no larger than their array, their windows no larger than 8 MiB, and each is stored in
  at least the bytes that such a chunk needs, so that a shape without data is refused.
- Missing chunks, which are read as zeros without a word: each has to be there.
- Other codecs (blosc, gzip, bz2), filters, object dtypes, other formats: not in the allow-list.
- Orbax's JSON files: see `orbax_files`.

Who can change the files while they are read is not kept out.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import tensorstore as ts

from praxis_lite.checkpoints.files import orbax_files
from praxis_lite.checkpoints.files.ocdbt import stored_values
from praxis_lite.checkpoints.files.zarr_checks import check_item, check_leaf, database, np_dtype
from praxis_lite.errors import ConfigError
from praxis_lite.job.processes.host_memory import available_bytes

_BLOCK_BYTES = 2**26


def check_stored(step_dir: Path, manifest: Mapping[str, Any]) -> None:
    """Checks that what is stored is what the manifest says, and can be decoded safely.

    Args:
      step_dir: a step, verified (`step_dirs.verify`): its files are those of the manifest.
      manifest: of `manifest.read_manifest`.

    Raises:
      ConfigError: it is not; says what, and what to do.
    """
    with _refusing(step_dir):
        _check(step_dir, manifest["leaves"])


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """One array of a step, read when it is asked for.

    Attributes:
      path: "mdl_vars/params/...".
      shape, dtype: the true shape, and NumPy's or ml_dtypes' dtype.
      padded_shape: as it is stored.
    """

    path: str
    shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    dtype: np.dtype
    _step_dir: Path
    _name: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the padded array, decoded."""
        return math.prod(self.padded_shape) * self.dtype.itemsize

    def parts(self) -> Iterator[slice]:
        """Yields rows to read at a time: those of one chunk, or of several that make 64 MiB."""
        yield from self._parts(self.shape)

    def read(self, rows: slice | None = None) -> np.ndarray:
        """Returns the true values; of some rows only.

        Raises:
          ConfigError: they cannot be decoded, or do not fit into memory; names the array.
        """
        cut = tuple(slice(0, dim) for dim in self.shape)
        return self._read(cut if rows is None else (rows, *cut[1:])[: len(cut)])

    def padding_is_zero(self) -> bool:
        """Returns whether there is nothing but zeros around the true values; reads all."""
        for rows in self._parts(self.padded_shape):
            block = self._read((rows,)[: len(self.shape)])
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
        num_rows = max(1, _BLOCK_BYTES // (row_bytes * chunk_rows)) * chunk_rows
        for start in range(0, shape[0], num_rows):
            yield slice(start, min(start + num_rows, shape[0]))

    def _read(self, index: tuple[slice, ...]) -> np.ndarray:
        part = self._array[index]
        num_bytes = math.prod(part.shape) * self.dtype.itemsize
        if num_bytes > (free := available_bytes()):
            raise ConfigError(
                f"{self._step_dir}: {self.path} does not fit into memory: {num_bytes} bytes are "
                f"to be read at once, {free} are free."
            )
        try:
            return np.asarray(part.read().result())
        except ValueError as error:
            self._fail(error)

    @functools.cached_property
    def _array(self) -> ts.TensorStore:
        try:
            spec = {"driver": "zarr", "kvstore": database(self._item_dir, f"{self._name}/")}
            return ts.open(spec, open=True, read=True).result()
        except ValueError as error:
            self._fail(error)

    @property
    def _item_dir(self) -> Path:
        return self._step_dir / self.path.partition("/")[0]

    def _fail(self, error: ValueError) -> NoReturn:
        raise undecodable(self._step_dir, error, self.path) from None


def stored_arrays(step_dir: Path, manifest: Mapping[str, Any]) -> dict[str, StoredArray]:
    """Returns the arrays of a step by path, sorted; checks them as `check_stored` does.

    Raises:
      ConfigError: as `check_stored`.
    """
    with _refusing(step_dir):
        names = _check(step_dir, manifest["leaves"])
    return {
        path: StoredArray(
            path, tuple(leaf["shape"]), tuple(leaf["padded_shape"]), np_dtype(leaf["dtype"]),
            step_dir, names[path],
        )
        for path, leaf in sorted(manifest["leaves"].items())
    }


def check_leaves(step_dir: Path, manifest: Mapping[str, Any]) -> None:
    """Checks what a manifest says of its arrays; reads no other file.

    Raises:
      ConfigError: there is one that cannot be.
    """
    with _refusing(step_dir):
        for path, leaf in manifest["leaves"].items():
            check_leaf(path, leaf)


def true_arrays(
    step_dir: Path, manifest: Mapping[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields path and true values of each array, one at a time.

    Raises:
      ConfigError: as `check_stored`; or an array cannot be decoded.
    """
    for path, array in stored_arrays(step_dir, manifest).items():
        yield path, array.read()


def undecodable(step_dir: Path, error: ValueError, path: str = "an array") -> ConfigError:
    """Returns the error for an array that TensorStore cannot decode, and what it says of it."""
    why = ascii(" ".join(str(error).split()))[1:500]
    return ConfigError(f"The checkpoint {step_dir}: {path} cannot be read ({why}). {_ADVICE}")


_ADVICE = (
    "It is not as praxis_lite wrote it: use another step, or another copy of this one; "
    "`python -m praxis_lite.checkpoints ls JOB_LOG_DIR` shows which are whole."
)


@contextlib.contextmanager
def _refusing(step_dir: Path) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"The checkpoint {step_dir} is refused: {error}. {_ADVICE}") from None
    except OSError as error:
        raise ConfigError(f"The checkpoint {step_dir} cannot be read ({error}).") from None


def _check(step_dir: Path, leaves: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns the name in the database of each array, by path."""
    orbax_files.check_names(step_dir)
    for path, leaf in leaves.items():
        check_leaf(path, leaf)
    orbax_files.check_checkpoint_metadata(step_dir)
    names: dict[str, str] = {}
    for item in orbax_files.ITEMS:
        of_item = {path: leaf for path, leaf in leaves.items() if path.startswith(f"{item}/")}
        found = orbax_files.stored_names(step_dir, item, of_item)
        values = stored_values(step_dir / item)
        check_item(step_dir / item, {found[path]: leaf for path, leaf in of_item.items()}, values)
        names |= found
    return names
