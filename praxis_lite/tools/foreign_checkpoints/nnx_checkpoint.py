"""What Orbax wrote of `nnx.state(model)`: StandardCheckpointer, `checkpoint.v1`, or in steps.

The names of its arrays are the paths of the module's variables. The same is read of
`nnx.to_pure_dict(nnx.state(model))`, of any part of a state, and of other nested dicts.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

import jax
from jax.sharding import Mesh

from praxis_lite.core.errors import ConfigError, few
from praxis_lite.core.partitioner.train_state import LeafLayout
from praxis_lite.run.checkpoints.sharded_reading import read_arrays
from praxis_lite.run.checkpoints.stored_arrays import StoredArray, orbax_arrays
from praxis_lite.run.job.local_directory import local_directory
from praxis_lite.tools.foreign_checkpoints.orbax_folders import (
    STRINGS,
    folder_of_arrays,
    is_checkpoint,
    step_folders,
)

# Which of the two a variable is, the model knows, and the files do not.
COLLECTIONS = ("params", "non_trainable")


class NnxCheckpoint:
    """The arrays of a folder, a `ForeignCheckpoint` for the rules of a new job.

    Orbax's JSON files are not read.

    Attributes:
      directory: the checkpoint, or the folder of its steps.

    Raises:
      ConfigError: there is no checkpoint.
    """

    def __init__(self, directory: Path):
        self.directory = local_directory(directory)
        self._steps = step_folders(self.directory)
        self._arrays: dict[Path, dict[str, StoredArray]] = {}
        if not self._steps and not is_checkpoint(self.directory):
            raise ConfigError(
                f"{self.directory} is no checkpoint of Orbax, nor a folder with steps of it. Name "
                "the folder that was given to Orbax's save()."
            )

    @staticmethod
    def is_at(directory: Path) -> bool:
        """Returns True for a checkpoint that Orbax wrote, or a folder with steps of it."""
        return is_checkpoint(directory) or bool(step_folders(directory))

    def arrays(self, step: object = None) -> dict[str, StoredArray]:
        """Returns the arrays by path, "dot1/kernel"; under Orbax's "dot1/kernel/value" too.

        Args:
          step: its number, or None for the latest, or where there are no steps.

        Raises:
          ConfigError: there is no such step, it is damaged, or has several trees of arrays.
        """
        return self._arrays_of(self._folder(step))

    def strings(self, step: object = None) -> list[str]:
        """Returns [] or a text that says there are strings: their names only Orbax's JSON has."""
        return [f"the strings in {STRINGS}"] * (self._folder(step) / STRINGS).is_file()

    def left_out(self, taken: Collection[str], step: int | None = None) -> list[str]:
        """Returns the names of all in a checkpoint that is not among `taken`.

        Args:
          taken: paths as `leaves()` has them.
        """
        arrays = self.arrays(step)
        used = {arrays[path.split("/", 2)[2]].path for path in taken}
        left = {array.path for array in arrays.values()} - used
        return [*sorted(path.removesuffix("/value") for path in left), *self.strings(step)]

    def leaves(self, step: object = None) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes and dtypes by path, each array as of both collections; reads none."""
        return {
            f"mdl_vars/{collection}/{path}": jax.ShapeDtypeStruct(x.shape, x.dtype)
            for collection in COLLECTIONS for path, x in self.arrays(step).items()
        }

    def latest_step(self) -> int | None:
        """Returns the newest step, or None if there are no steps."""
        return max(self._steps, default=None)

    def restore_leaves(
        self, leaves: Mapping[str, LeafLayout], mesh: Mesh, *, step: int | None = None
    ) -> dict[str, jax.Array]:
        """Returns arrays in their shards.

        Args:
          leaves: by path as `leaves()` has it, how each is wanted; its shape and dtype are those
            of the checkpoint.
        """
        arrays = self.arrays(step)
        return read_arrays({path: arrays[path.split("/", 2)[2]] for path in leaves}, leaves, mesh)

    def _folder(self, step: object) -> Path:
        if step is None:
            step = self.latest_step()
        if step is None:
            return folder_of_arrays(self.directory)
        if not self._steps:
            raise ConfigError(
                f"{self.directory} has no steps: it is one checkpoint of Orbax. Leave "
                "CheckpointLoadingRules.step out."
            )
        if step not in self._steps:
            raise ConfigError(
                f"{self.directory} has no step {step!r}; it has {few([*map(str, self._steps)])}. "
                "Change CheckpointLoadingRules.step, or leave it out for the latest."
            )
        return folder_of_arrays(self._steps[step])

    def _arrays_of(self, folder: Path) -> dict[str, StoredArray]:
        if folder not in self._arrays:
            result = orbax_arrays(folder)
            by_variable = {path.removesuffix("/value"): x for path, x in result.items()}
            self._arrays[folder] = by_variable | result
        return self._arrays[folder]
