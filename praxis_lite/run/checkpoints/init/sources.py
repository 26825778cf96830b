"""Where the checkpoints lie that a new job takes arrays from, and how they are opened."""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import jax
from jax.sharding import Mesh

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.partitioner.train_state import LeafLayout
from praxis_lite.run.checkpoints.checkpoints import Checkpoints
from praxis_lite.run.checkpoints.init.loading_rules import CheckpointLoadingRules
from praxis_lite.run.checkpoints.steps.manifest import MANIFEST_JSON
from praxis_lite.run.checkpoints.steps.step_dirs import numbered_steps, set_aside
from praxis_lite.run.config.paths import join
from praxis_lite.run.job.local_directory import local_directory

SETTING = "run.init_from_checkpoint_rules"


class ForeignCheckpoint(Protocol):
    """A folder with arrays that another library wrote, asked as the checkpoints of a job are."""

    def __init__(self, directory: Path): ...

    @staticmethod
    def is_at(directory: Path) -> bool:
        """Returns True if a folder is such a checkpoint; it may be damaged."""
        ...

    def leaves(self, step: object = None) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes and dtypes by path, "mdl_vars/params/..."; reads no array."""
        ...

    def latest_step(self) -> int | None:
        """Returns the newest step, or None if there are no steps."""
        ...

    def restore_leaves(
        self, leaves: Mapping[str, LeafLayout], mesh: Mesh, *, step: int | None = None
    ) -> dict[str, jax.Array]:
        """Returns arrays in their shards, of the shapes and dtypes that `leaves()` says."""
        ...

    def left_out(self, taken: Collection[str], step: int | None = None) -> list[str]:
        """Returns names of all in it that is not among `taken`, paths as `leaves()` has them."""
        ...


# The forms that a folder is looked at for, besides that of a job.
Forms = Sequence[type[ForeignCheckpoint]]


def located(
    key: str, rules: CheckpointLoadingRules, forms: Forms = ()
) -> tuple[Path, int | Literal["best"] | None]:
    """Returns the directory of all steps, and which of them is meant.

    Args:
      key: of the rules, which names the directory if they do not.

    Raises:
      ConfigError: there is no checkpoint.
    """
    given = local_directory(rules.directory or key)
    if any(form.is_at(given) for form in forms):
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


def opened(
    directory: Path, forms: Forms
) -> contextlib.AbstractContextManager[Checkpoints | ForeignCheckpoint]:
    """Opens the checkpoints of a job, or a checkpoint in any of the forms."""
    for form in forms:
        if form.is_at(directory):
            return contextlib.nullcontext(form(directory))
    return Checkpoints(directory)
