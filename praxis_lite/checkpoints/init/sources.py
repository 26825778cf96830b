"""Locates and opens the checkpoints from which a new job loads arrays."""

import contextlib
from typing import Literal

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.init.loading_rules import CheckpointLoadingRules
from praxis_lite.checkpoints.init.nnx_checkpoint import NnxCheckpoint
from praxis_lite.checkpoints.steps.manifest import MANIFEST_JSON
from praxis_lite.checkpoints.steps.step_store import steps_in
from praxis_lite.config.paths import join
from praxis_lite.core.errors import ConfigError
from praxis_lite.host.object_stores import AnyPath
from praxis_lite.job.local_directory import directory as directory_at

SETTING = "run.init_from_checkpoint_rules"


def located(
    key: str, rules: CheckpointLoadingRules
) -> tuple[AnyPath, int | Literal["best"] | None]:
    """Returns the directory that contains a source's steps, and the step to load.

    Args:
      key: Key of the rules, used as the directory if the rules do not specify one.
      rules: The rules.

    Raises:
      ConfigError: There is no checkpoint.
    """
    given = directory_at(rules.directory or key)
    if NnxCheckpoint.is_at(given):
        return given, rules.step
    directory, step = given, rules.step
    # The given directory may be that of a job, or of a single step.
    if (given / "checkpoints").is_dir():
        directory = given / "checkpoints"
    elif given.name.isdigit() and (given / MANIFEST_JSON).is_file():
        directory, step = given.parent, int(given.name)
    steps = steps_in(directory)
    if not (steps.numbered() or steps.folders_of_kind("damaged")):
        experiment = rules.experiment or "EXP"
        raise ConfigError(
            f"There is no checkpoint in {given} to start this job from. Train that job first: "
            f"praxis train {experiment} --job_log_dir={given}; or use a job with a checkpoint: "
            f"--set {join(join(SETTING, key), 'directory')}=DIR."
        )
    return directory, step


def opened(
    directory: AnyPath,
) -> contextlib.AbstractContextManager[Checkpoints | NnxCheckpoint]:
    """Opens the checkpoints of a job, or an Orbax checkpoint of a Flax NNX model."""
    if NnxCheckpoint.is_at(directory):
        return contextlib.nullcontext(NnxCheckpoint(directory))
    return Checkpoints(directory)
