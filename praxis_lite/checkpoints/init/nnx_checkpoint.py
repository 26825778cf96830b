"""Reads Orbax checkpoints of `nnx.state(model)`.

Array names are the paths of the module's variables. Checkpoints of
`nnx.to_pure_dict(nnx.state(model))`, parts of a state, and other nested dicts are also supported.

The arrays are in one of three locations, which are detected from file names, without Orbax's JSON
files:

    DIR/manifest.ocdbt          StandardCheckpointer
    DIR/state/manifest.ocdbt    checkpoint.v1; "pytree" in its first releases, other names if
                                several checkpointables were saved
    DIR/7/state/manifest.ocdbt  training.Checkpointer of v1; "default" with a CheckpointManager

Without OCDBT (`use_ocdbt=False`), each array has a folder instead of the database
`manifest.ocdbt`: dot1.kernel/zarr.json, or .zarray in Zarr 2.
"""

import re
from collections.abc import Collection, Mapping

import jax
from jax.sharding import Mesh

from praxis_lite.checkpoints.sharded_reading import read_arrays
from praxis_lite.checkpoints.stored_arrays import (
    DATABASE,
    ITEMS,
    METADATA_FILES,
    StoredArray,
    orbax_arrays,
)
from praxis_lite.core.errors import ConfigError, first_few, shortened
from praxis_lite.core.partitioner.train_state import LeafLayout
from praxis_lite.host.object_stores import AnyPath
from praxis_lite.job.local_directory import directory as directory_at

# The files do not specify the collection of a variable; the model does.
COLLECTIONS = ("params", "non_trainable")
_STRINGS = "_strings.json"
# Files by which a checkpoint folder is recognized: one for v1, and one for all versions.
_MARKS = ("orbax.checkpoint", "_CHECKPOINT_METADATA")
# Step folders such as "7", "0000007", "step_7" (Orbax's step_prefix, step_format_fixed_length).
_STEP = re.compile(r"(?:.*_)?([0-9]{1,18})")


class NnxCheckpoint:
    """An Orbax checkpoint, with the same methods for reading as `Checkpoints`.

    Attributes:
      directory: The checkpoint, or the folder that contains its steps.

    Raises:
      ConfigError: The directory does not contain a checkpoint.
    """

    def __init__(self, directory: str | AnyPath):
        self.directory = directory_at(directory)
        self._steps = _step_folders(self.directory)
        self._arrays: dict[AnyPath, dict[str, StoredArray]] = {}
        if not self._steps and not _is_checkpoint(self.directory):
            raise ConfigError(
                f"{self.directory} is neither an Orbax checkpoint nor a folder with steps. "
                "Pass the folder that was passed to Orbax's save()."
            )

    @staticmethod
    def is_at(directory: AnyPath) -> bool:
        """Returns whether a folder is an Orbax checkpoint or contains its steps."""
        return _is_checkpoint(directory) or bool(_step_folders(directory))

    def arrays(self, step: object = None) -> dict[str, StoredArray]:
        """Opens the arrays, keyed both by "dot1/kernel" and by Orbax's "dot1/kernel/value".

        Args:
          step: The step. None for the latest step, or for a checkpoint without steps.

        Raises:
          ConfigError: The step does not exist, is damaged, or contains several trees of arrays.
        """
        folder = self._folder(step)
        if folder not in self._arrays:
            by_orbax_path = orbax_arrays(folder)
            by_variable = {path.removesuffix("/value"): x for path, x in by_orbax_path.items()}
            self._arrays[folder] = by_variable | by_orbax_path
        return self._arrays[folder]

    def strings(self, step: object = None) -> list[str]:
        """Returns a description of the saved strings (not their names), or [] if there are none."""
        return [f"the strings in {_STRINGS}"] * (self._folder(step) / _STRINGS).is_file()

    def left_out(self, taken: Collection[str], step: int | None = None) -> list[str]:
        """Returns the names of all arrays and strings in a checkpoint that were not loaded.

        Args:
          taken: Loaded paths, as in `leaves()`.
          step: The step; None for the latest.
        """
        arrays = self.arrays(step)
        used = {arrays[path.split("/", 2)[2]].path for path in taken}
        unused = {array.path for array in arrays.values()} - used
        return [*sorted(path.removesuffix("/value") for path in unused), *self.strings(step)]

    def leaves(self, step: object = None) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes and dtypes keyed by path, without reading values.

        Every array is listed in both collections, because the checkpoint does not specify the
        collection of an array.
        """
        return {
            f"mdl_vars/{collection}/{path}": jax.ShapeDtypeStruct(x.shape, x.dtype)
            for collection in COLLECTIONS
            for path, x in self.arrays(step).items()
        }

    def latest_step(self) -> int | None:
        """Returns the newest step, or None for a checkpoint without steps."""
        return max(self._steps, default=None)

    def restore_leaves(
        self, leaves: Mapping[str, LeafLayout], mesh: Mesh, *, step: int | None = None
    ) -> dict[str, jax.Array]:
        """Reads arrays into their shards.

        Args:
          leaves: The layout of each array, keyed by its path in `leaves()`. Logical shapes and
            dtypes must match the checkpoint.
          mesh: The mesh.
          step: The step; None for the latest.
        """
        arrays = self.arrays(step)
        return read_arrays({path: arrays[path.split("/", 2)[2]] for path in leaves}, leaves, mesh)

    def _folder(self, step: object) -> AnyPath:
        if step is None:
            step = self.latest_step()
        if step is None:
            return _folder_of_arrays(self.directory)
        if not self._steps:
            raise ConfigError(
                f"{self.directory} has no steps: it is a single Orbax checkpoint. Remove "
                "CheckpointLoadingRules.step."
            )
        if step not in self._steps:
            raise ConfigError(
                f"{self.directory} has no step {step!r}; it has "
                f"{first_few([*map(str, self._steps)])}. Change CheckpointLoadingRules.step, or "
                "omit the setting for the latest step."
            )
        return _folder_of_arrays(self._steps[step])


def _has_arrays(directory: AnyPath) -> bool:
    """Returns whether a folder is an OCDBT database or contains Zarr arrays."""
    if (directory / DATABASE).is_file():
        return True
    return directory.is_dir() and any(
        (path / file).is_file() for path in directory.iterdir() for file in METADATA_FILES
    )


def _is_checkpoint(directory: AnyPath) -> bool:
    """Returns whether a folder is an Orbax checkpoint that is not a step of a praxis_lite job."""
    if _has_arrays(directory):
        return True
    is_job_step = (directory / ITEMS[0]).is_dir()  # Orbax also writes its marks there.
    return not is_job_step and any((directory / mark).is_file() for mark in _MARKS)


def _step_folders(directory: AnyPath) -> dict[int, AnyPath]:
    """Returns step folders in order, keyed by step; {} if the directory is itself a checkpoint."""
    if _is_checkpoint(directory) or not directory.is_dir():
        return {}
    steps = {
        int(match[1]): path
        for path in directory.iterdir()
        if (match := _STEP.fullmatch(path.name)) and _is_checkpoint(path)
    }
    return dict(sorted(steps.items()))


def _folder_of_arrays(checkpoint: AnyPath) -> AnyPath:
    """Returns the folder inside a checkpoint that contains the arrays.

    Raises:
      ConfigError: There is no such folder, or there are several. The message lists them.
    """
    if _has_arrays(checkpoint):
        return checkpoint
    # Ignore the databases of single processes, which are incomplete.
    items = [
        path
        for path in checkpoint.iterdir()
        if _has_arrays(path) and not path.name.startswith("ocdbt.process_")
    ]
    items.sort(key=str)
    if not items:
        raise ConfigError(
            f"{checkpoint} has no Orbax arrays: expected {DATABASE} or a folder per array, in "
            "this folder or in a subfolder. Save the checkpoint again."
        )
    if len(items) > 1:
        raise ConfigError(
            f"{checkpoint} has several trees of arrays: "
            f"{first_few([shortened(path.name) for path in items], 8)}. "
            f"Pass the folder of the model, such as {items[0]}."
        )
    return items[0]
