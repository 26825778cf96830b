"""`load`: loads the trained model of a job."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Literal

from praxis_lite.config.build import build, naming_settings
from praxis_lite.config.overrides import check_required
from praxis_lite.config.python_settings import Settings, as_texts
from praxis_lite.core.errors import require
from praxis_lite.core.sharding.mesh import attached_mesh
from praxis_lite.core.sharding.mesh_config import MeshConfig
from praxis_lite.experiment.launched_config import config_of_job
from praxis_lite.experiment.recorded_job import check_tokenizers
from praxis_lite.job.job_dir import open_for_reading
from praxis_lite.trained_model.trained_model import TrainedModel
from praxis_lite.trainer.checks.job_checks import check_parts
from praxis_lite.trainer.job_on_mesh import partitioner_of


def load(
    job_log_dir: str | os.PathLike[str],
    step: int | Literal["best"] | None = None,
    *,
    mesh: MeshConfig | Literal["attached", "job"] = "attached",
    settings: Settings = (),
    packages: Sequence[str] = (),
) -> TrainedModel:
    """Loads the model that a job has trained, from one of its checkpoints.

    The checkpoint is verified before it is read, and nothing is written to the directory.

    Args:
      job_log_dir: Job directory.
      step: Step of the checkpoint, "best", or None for the latest.
      mesh: "attached" for all attached accelerators, or one CPU device if there are none; "job" for
        the mesh of the job; or a MeshConfig. For "job", devices are simulated if there are no
        accelerators and JAX has not been initialized.
      settings: Values keyed by path, or strings "path=value", as for --set.
      packages: User packages that the job's config refers to, as for --packages.

    Returns:
      The trained model.

    Raises:
      ConfigError: The directory contains no job, the checkpoint is missing or damaged, or a setting
        or the mesh is invalid for the job.
    """
    is_mesh = isinstance(mesh, MeshConfig) or mesh in ("attached", "job")
    require(is_mesh, "load: mesh", mesh, "'attached', 'job' or a MeshConfig")
    is_step = step is None or step == "best" or type(step) is int
    require(is_step, "load: step", step, "a whole number, 'best' or None")
    job_dir = open_for_reading(job_log_dir, writes=False)
    launched = config_of_job(job_dir, None, as_texts(settings), packages)
    check_required(launched.config)
    check_tokenizers(launched.config)
    with naming_settings(launched.config, launched.recorded):
        job = build(launched.config)
        check_parts(job)
        if mesh != "job":
            chosen = attached_mesh(job.mesh) if mesh == "attached" else mesh
            job = dataclasses.replace(job, mesh=chosen)
        partitioner = partitioner_of(job, "load")
    model = TrainedModel(
        partitioner, job, launched.config, job_dir, step, experiment=launched.experiment
    )
    model.mdl_vars  # noqa: B018  Restore now, to verify the checkpoint and to set the step.
    return model
