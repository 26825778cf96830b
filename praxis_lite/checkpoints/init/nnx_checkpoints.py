"""What Orbax's StandardCheckpointer wrote of `nnx.state(model)`, as Flax's guide saves it.

A folder with one OCDBT database; the names in it are the paths of the module's variables. The same
is read of `nnx.to_pure_dict(nnx.state(model))`, of any part of a state, and of other nested dicts.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from praxis_lite.checkpoints.files.ocdbt import stored_values
from praxis_lite.checkpoints.files.orbax_files import check_no_links
from praxis_lite.checkpoints.files.stored_arrays import StoredArray
from praxis_lite.checkpoints.files.zarr_checks import check_item, check_leaf, np_dtype, stored_leaf
from praxis_lite.errors import ConfigError
from praxis_lite.job.job_dir import local_directory
from praxis_lite.partitioner.train_state import LeafLayout

DATABASE = "manifest.ocdbt"
# Which of the two a variable is, the model knows, and the files do not.
COLLECTIONS = ("params", "non_trainable")


def is_nnx_checkpoint(directory: Path) -> bool:
    """Returns whether a folder is itself a database, as StandardCheckpointer makes it."""
    return (directory / DATABASE).is_file()


class NnxCheckpoint:
    """The arrays of one folder, to be asked as `Checkpoints` are; it has no steps.

    The database and each array in it are checked as those of this library's checkpoints are before
    anything is decoded: see `stored_arrays`. Orbax's JSON files are not read. There are no digests
    of whole files here, so an exchanged array that is whole in itself is not noticed.

    Attributes:
      arrays: by path, "dot1/kernel"; where all of a state was saved also with Orbax's "/value".

    Raises:
      ConfigError: it is no such folder, is damaged, or has a symbolic link in it.
    """

    def __init__(self, directory: Path):
        self.directory = local_directory(directory)
        if not is_nnx_checkpoint(self.directory):
            raise ConfigError(
                f"{self.directory} has no {DATABASE}, so it is no checkpoint of Orbax's "
                "StandardCheckpointer. Name the folder that was given to its save()."
            )
        with _refusing(self.directory):
            leaves = _checked_leaves(self.directory)
        self.arrays = {}
        for name, leaf in leaves.items():
            path, shape = name.replace(".", "/"), tuple(leaf["shape"])
            short = path.removesuffix("/value")
            array = _Stored(short, shape, shape, np_dtype(leaf["dtype"]), self.directory, name)
            self.arrays[path] = array
            self.arrays.setdefault(short, array)

    def leaves(self, step: object = None) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes and dtypes by path, each array as of both collections; reads none."""
        if step is not None:
            raise ConfigError(
                f"{self.directory} has no steps: it is a checkpoint of Orbax's "
                "StandardCheckpointer. Leave CheckpointLoadingRules.step out."
            )
        return {
            f"mdl_vars/{collection}/{path}": jax.ShapeDtypeStruct(x.shape, x.dtype)
            for collection in COLLECTIONS for path, x in self.arrays.items()
        }

    def latest_step(self) -> None:
        """Returns None, for there are no steps."""

    def restore_leaves(
        self, leaves: Mapping[str, LeafLayout], mesh: Mesh, *, step: None = None
    ) -> dict[str, jax.Array]:
        """Returns arrays in their shards, one after another whole on the host.

        Args:
          leaves: by path as `leaves()` has it, how each is wanted; its shape and dtype are those
            of the checkpoint.
        """
        found = {}
        for path, leaf in leaves.items():
            true = self.arrays[path.split("/", 2)[2]].read()
            pads = [(0, p - s) for s, p in zip(leaf.shape, leaf.padded_shape, strict=True)]
            found[path] = jax.device_put(np.pad(true, pads), NamedSharding(mesh, leaf.spec))
        return found


@dataclasses.dataclass(frozen=True)
class _Stored(StoredArray):
    """An array of a folder that is a database itself."""

    @property
    def _item_dir(self) -> Path:
        return self._step_dir

    def _fail(self, error: ValueError) -> NoReturn:
        why = ascii(" ".join(str(error).split()))[1:500]
        raise ConfigError(f"The checkpoint {self._step_dir}: {self.path} cannot be read ({why}).")


def _checked_leaves(directory: Path) -> dict[str, dict]:
    """Returns shape and dtype of each array by its name in the database, all of it checked."""
    check_no_links(directory)
    values = stored_values(directory)
    if any(key.endswith("zarr.json") for key in values):
        raise ConfigError("it is in Zarr 3, and Zarr 2, Orbax's default, is what is read")
    leaves = {}
    for key, value in values.items():
        name, _, file = key.rpartition("/")
        if file == ".zarray":
            leaves[name] = stored_leaf(name, value.read(directory, 2**16))
            check_leaf(f"mdl_vars/{name.replace('.', '/')}", leaves[name])
    check_item(directory, leaves, values)
    return leaves


@contextlib.contextmanager
def _refusing(directory: Path) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            f"The checkpoint {directory} is refused: {error}. It is not as Orbax's "
            "StandardCheckpointer writes it, or damaged: save it again."
        ) from None
    except OSError as error:
        raise ConfigError(f"The checkpoint {directory} cannot be read ({error}).") from None
