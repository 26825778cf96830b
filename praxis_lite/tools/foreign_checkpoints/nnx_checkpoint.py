"""What Orbax's StandardCheckpointer wrote of `nnx.state(model)`, as Flax's guide saves it.

A folder with one OCDBT database; the names in it are the paths of the module's variables. The same
is read of `nnx.to_pure_dict(nnx.state(model))`, of any part of a state, and of other nested dicts.
"""

from collections.abc import Mapping
from pathlib import Path

import jax
from jax.sharding import Mesh

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.partitioner.train_state import LeafLayout
from praxis_lite.run.checkpoints.files.ocdbt import DATABASE
from praxis_lite.run.checkpoints.files.origin import Origin
from praxis_lite.run.checkpoints.sharded_reading import read_arrays
from praxis_lite.run.job.local_directory import local_directory
from praxis_lite.tools.foreign_checkpoints.arrays import foreign_arrays

_ADVICE = "It is not as Orbax's StandardCheckpointer writes it, or damaged: save it again."
# Which of the two a variable is, the model knows, and the files do not.
COLLECTIONS = ("params", "non_trainable")


class NnxCheckpoint:
    """The arrays of a folder, a `ForeignCheckpoint` for the rules of a new job; it has no steps.

    Nothing in it is trusted: see `foreign_arrays`. Orbax's JSON files are not read.

    Attributes:
      arrays: by path, "dot1/kernel"; under Orbax's "dot1/kernel/value" too, where it is so.

    Raises:
      ConfigError: it is no such folder, is damaged, or has a symbolic link in it.
    """

    def __init__(self, directory: Path):
        self.directory = local_directory(directory)
        if not self.is_at(self.directory):
            raise ConfigError(
                f"{self.directory} has no {DATABASE}, so it is no checkpoint of Orbax's "
                "StandardCheckpointer. Name the folder that was given to its save()."
            )
        origin = Origin(self.directory, _ADVICE)
        with origin.refusing():
            found = foreign_arrays(self.directory, origin)
        self.arrays = {path.removesuffix("/value"): array for path, array in found.items()} | found

    @staticmethod
    def is_at(directory: Path) -> bool:
        """Returns True if a folder is itself a database, as StandardCheckpointer makes it."""
        return (directory / DATABASE).is_file()

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
        """Returns arrays in their shards.

        Args:
          leaves: by path as `leaves()` has it, how each is wanted; its shape and dtype are those
            of the checkpoint.
        """
        arrays = {path: self.arrays[path.split("/", 2)[2]] for path in leaves}
        return read_arrays(arrays, leaves, mesh)
