"""Folders that Orbax writes, and where in them the arrays of a model lie.

Three kinds, each found by names of files alone; Orbax's JSON is not read:

    DIR/manifest.ocdbt          StandardCheckpointer
    DIR/state/manifest.ocdbt    checkpoint.v1: "pytree" in its first releases, other names where
                                several checkpointables were saved
    DIR/7/state/manifest.ocdbt  training.Checkpointer of v1; "default" in a CheckpointManager's

Without OCDBT (`use_ocdbt=False`) a folder for each array is in place of the database
`manifest.ocdbt`: dot1.kernel/zarr.json, or .zarray in Zarr 2.
"""

import re
from pathlib import Path

from praxis_lite.core.errors import ConfigError, few, shown
from praxis_lite.run.checkpoints.stored_arrays import DATABASE, ITEMS, METADATA_FILES

STRINGS = "_strings.json"
# Either is in a folder with items: v1's own mark, and what Orbax writes of every checkpoint.
_MARKS = ("orbax.checkpoint", "_CHECKPOINT_METADATA")
# "7", "0000007", "step_7": `step_prefix` and `step_format_fixed_length` of Orbax.
_STEP = re.compile(r"(?:.*_)?([0-9]{1,18})")


def has_arrays(directory: Path) -> bool:
    """Returns True if a folder is a database, or has folders that are arrays."""
    if (directory / DATABASE).is_file():
        return True
    return directory.is_dir() and any(
        (path / file).is_file() for path in directory.iterdir() for file in METADATA_FILES
    )


def is_checkpoint(directory: Path) -> bool:
    """Returns True for a checkpoint of Orbax, False for a step of a job: that has its marks too."""
    if has_arrays(directory):
        return True
    is_of_job = (directory / ITEMS[0]).is_dir()
    return not is_of_job and any((directory / mark).is_file() for mark in _MARKS)


def step_folders(directory: Path) -> dict[int, Path]:
    """Returns the checkpoints in a folder by step, in order; {} if it is itself a checkpoint.

    Raises:
      ConfigError: two have one number.
    """
    steps: dict[int, Path] = {}
    if is_checkpoint(directory) or not directory.is_dir():
        return steps
    for path in sorted(directory.iterdir()):
        match = _STEP.fullmatch(path.name)
        if match and is_checkpoint(path):
            if int(match[1]) in steps:
                names = shown(f"{steps[int(match[1])].name} and {path.name}")
                raise ConfigError(f"{directory} has two folders of one step, {names}. Name one.")
            steps[int(match[1])] = path
    return dict(sorted(steps.items()))


def folder_of_arrays(checkpoint: Path) -> Path:
    """Returns the folder in a checkpoint that has the arrays.

    Raises:
      ConfigError: there is none, or there are several: names them.
    """
    if has_arrays(checkpoint):
        return checkpoint
    # The part of a database that a process wrote is one too, and not all of it.
    items = [
        path for path in sorted(checkpoint.iterdir())
        if has_arrays(path) and not path.name.startswith("ocdbt.process_")
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
