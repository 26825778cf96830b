"""Reads checkpoints of `nnx.state(model)` that Orbax wrote.

The names of the arrays are the paths of the module's variables. Checkpoints of
`nnx.to_pure_dict(nnx.state(model))`, of a part of a state and of other nested dicts are read too.

The arrays are in one of three places, found by names of files alone; Orbax's JSON is not read:

    DIR/manifest.ocdbt          StandardCheckpointer
    DIR/state/manifest.ocdbt    checkpoint.v1: "pytree" in its first releases, other names where
                                several checkpointables were saved
    DIR/7/state/manifest.ocdbt  training.Checkpointer of v1; "default" in a CheckpointManager's

Without OCDBT (`use_ocdbt=False`) a folder for each array is in place of the database
`manifest.ocdbt`: dot1.kernel/zarr.json, or .zarray in Zarr 2.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

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
from praxis_lite.core.errors import ConfigError, few, shown
from praxis_lite.core.partitioner.train_state import LeafLayout
from praxis_lite.job.local_directory import local_directory

# The files do not say in which of the two a variable belongs; the model does.
COLLECTIONS = ("params", "non_trainable")
_STRINGS = "_strings.json"
# Either is in a folder with items: v1's own mark, and what Orbax writes of every checkpoint.
_MARKS = ("orbax.checkpoint", "_CHECKPOINT_METADATA")
# "7", "0000007", "step_7": `step_prefix` and `step_format_fixed_length` of Orbax.
_STEP = re.compile(r"(?:.*_)?([0-9]{1,18})")


class NnxCheckpoint:
    """The arrays of a folder, with those methods of `Checkpoints` that read.

    Orbax's JSON files are not read.

    Attributes:
      directory: the checkpoint, or the folder of its steps.

    Raises:
      ConfigError: there is no checkpoint.
    """

    def __init__(self, directory: Path):
        self.directory = local_directory(directory)
        self._steps = _step_folders(self.directory)
        self._arrays: dict[Path, dict[str, StoredArray]] = {}
        if not self._steps and not _is_checkpoint(self.directory):
            raise ConfigError(
                f"{self.directory} is no checkpoint of Orbax, nor a folder with steps of it. Name "
                "the folder that was given to Orbax's save()."
            )

    @staticmethod
    def is_at(directory: Path) -> bool:
        """Returns True for a checkpoint that Orbax wrote, or a folder with steps of it."""
        return _is_checkpoint(directory) or bool(_step_folders(directory))

    def arrays(self, step: object = None) -> dict[str, StoredArray]:
        """Returns the arrays by path, "dot1/kernel"; under Orbax's "dot1/kernel/value" too.

        Args:
          step: its number, or None for the latest, or where there are no steps.

        Raises:
          ConfigError: there is no such step, it is damaged, or has several trees of arrays.
        """
        folder = self._folder(step)
        if folder not in self._arrays:
            result = orbax_arrays(folder)
            by_variable = {path.removesuffix("/value"): x for path, x in result.items()}
            self._arrays[folder] = by_variable | result
        return self._arrays[folder]

    def strings(self, step: object = None) -> list[str]:
        """Returns a note if strings were saved; only Orbax's JSON has their names."""
        return [f"the strings in {_STRINGS}"] * (self._folder(step) / _STRINGS).is_file()

    def left_out(self, taken: Collection[str], step: int | None = None) -> list[str]:
        """Returns the names of everything in a checkpoint that is not in `taken`.

        Args:
          taken: paths as `leaves()` has them.
        """
        arrays = self.arrays(step)
        used = {arrays[path.split("/", 2)[2]].path for path in taken}
        left = {array.path for array in arrays.values()} - used
        return [*sorted(path.removesuffix("/value") for path in left), *self.strings(step)]

    def leaves(self, step: object = None) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes and dtypes by path, each array in both collections; reads no values."""
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
          leaves: the layout of each array by its path in `leaves()`; shape and dtype are those of
            the checkpoint.
        """
        arrays = self.arrays(step)
        return read_arrays({path: arrays[path.split("/", 2)[2]] for path in leaves}, leaves, mesh)

    def _folder(self, step: object) -> Path:
        if step is None:
            step = self.latest_step()
        if step is None:
            return _folder_of_arrays(self.directory)
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
        return _folder_of_arrays(self._steps[step])


def _has_arrays(directory: Path) -> bool:
    """Returns whether a folder is an OCDBT database or contains Zarr arrays."""
    if (directory / DATABASE).is_file():
        return True
    return directory.is_dir() and any(
        (path / file).is_file() for path in directory.iterdir() for file in METADATA_FILES
    )


def _is_checkpoint(directory: Path) -> bool:
    """Returns True for a checkpoint of Orbax, False for a step of a job: that has its marks too."""
    if _has_arrays(directory):
        return True
    is_of_job = (directory / ITEMS[0]).is_dir()
    return not is_of_job and any((directory / mark).is_file() for mark in _MARKS)


def _step_folders(directory: Path) -> dict[int, Path]:
    """Returns the checkpoints in a folder by step, in order; {} if it is itself a checkpoint."""
    if _is_checkpoint(directory) or not directory.is_dir():
        return {}
    steps = {
        int(match[1]): path for path in directory.iterdir()
        if (match := _STEP.fullmatch(path.name)) and _is_checkpoint(path)
    }
    return dict(sorted(steps.items()))


def _folder_of_arrays(checkpoint: Path) -> Path:
    """Returns the folder in a checkpoint that has the arrays.

    Raises:
      ConfigError: there is none, or there are several: names them.
    """
    if _has_arrays(checkpoint):
        return checkpoint
    # The part of a database that a process wrote is one too, and not all of it.
    items = [
        path for path in sorted(checkpoint.iterdir())
        if _has_arrays(path) and not path.name.startswith("ocdbt.process_")
    ]
    if not items:
        raise ConfigError(
            f"{checkpoint} has no arrays of Orbax: neither {DATABASE} nor a folder for each array, "
            "in it or in a folder of it. Save it again."
        )
    if len(items) > 1:
        raise ConfigError(
            f"{checkpoint} has several trees of arrays: "
            f"{few([shown(path.name) for path in items], 8)}. "
            f"Name the folder of the model, as {items[0]}."
        )
    return items[0]
