"""Where the checkpoints lie that a new job takes arrays from, and how they are opened."""

import contextlib
from pathlib import Path
from typing import Literal

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.init.loading_rules import CheckpointLoadingRules
from praxis_lite.checkpoints.init.nnx_checkpoint import NnxCheckpoint
from praxis_lite.checkpoints.steps.manifest import MANIFEST_JSON
from praxis_lite.checkpoints.steps.step_dirs import numbered_steps, set_aside
from praxis_lite.config.paths import join
from praxis_lite.core.errors import ConfigError
from praxis_lite.job.local_directory import local_directory

SETTING = "run.init_from_checkpoint_rules"


def located(
    key: str, rules: CheckpointLoadingRules
) -> tuple[Path, int | Literal["best"] | None]:
    """Returns the directory of all steps, and which of them is meant.

    Args:
      key: of the rules, which names the directory if they do not.

    Raises:
      ConfigError: there is no checkpoint.
    """
    given = local_directory(rules.directory or key)
    if NnxCheckpoint.is_at(given):
        return given, rules.step
    directory, step = given, rules.step
    if (given / "checkpoints").is_dir():
        directory = given / "checkpoints"
    elif given.name.isdigit() and (given / MANIFEST_JSON).is_file():
        directory, step = given.parent, int(given.name)
    if not (directory.is_dir() and (numbered_steps(directory) or set_aside(directory, "damaged"))):
        experiment = rules.experiment or "NAME"
        raise ConfigError(
            f"There is no checkpoint in {given}, from which this job is to start. First train one: "
            f"main.py --exp={experiment} --job_log_dir={given}; or name a job that has one: --set "
            f"{join(join(SETTING, key), 'directory')}=DIR."
        )
    return directory, step


def opened(directory: Path) -> contextlib.AbstractContextManager[Checkpoints | NnxCheckpoint]:
    """Opens the checkpoints of a job, or a checkpoint that Flax's users saved with Orbax."""
    if NnxCheckpoint.is_at(directory):
        return contextlib.nullcontext(NnxCheckpoint(directory))
    return Checkpoints(directory)
