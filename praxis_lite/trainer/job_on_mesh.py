"""Places a job on its mesh, after all checks that do not require compilation."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from praxis_lite.core.errors import ConfigError, require_choice
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.sharding.mesh import filled_mesh, make_mesh, simulate_devices
from praxis_lite.core.sharding.mesh_config import CompilerOptions, merged_options
from praxis_lite.experiment.experiment import Job
from praxis_lite.experiment.run_config import RunConfig
from praxis_lite.host.host_memory import check_room_for_devices
from praxis_lite.inputs.base import TRAIN, InputPipeline
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.job import processes
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.checks.datasets import check_datasets
from praxis_lite.trainer.checks.job_checks import (
    check_averages,
    check_decoder,
    check_metric_names,
    check_parts,
    check_watched_metrics,
)
from praxis_lite.trainer.checks.memory import check_fits
from praxis_lite.trainer.compilation import use_compilation_cache
from praxis_lite.trainer.layout_table import mesh_text

__all__ = ("JobOnMesh", "partitioner_of", "partitioner_on", "log_compiler_options")


@dataclasses.dataclass(frozen=True)
class JobOnMesh:
    """A job with its mesh and its directory.

    Attributes:
      partitioner: The job's task on the mesh.
      job: The job, as built from its config.
      files: The files in the job directory, or None in modes without a directory.
    """

    partitioner: Partitioner
    job: Job
    files: JobDir

    @property
    def datasets(self) -> Mapping[str, InputPipeline]:
        """Training and evaluation datasets, keyed by name."""
        return self.job.datasets

    @property
    def decode_datasets(self) -> Mapping[str, InputPipeline]:
        """Prompt datasets, keyed by name."""
        return self.job.decode_datasets

    @property
    def run(self) -> RunConfig:
        """Settings of the run."""
        return self.job.run

    @property
    def hooks(self) -> Sequence[Any]:
        """Hooks of the experiment."""
        return self.job.hooks

    @property
    def eval_sets(self) -> dict[str, InputPipeline]:
        """Evaluation datasets, keyed by name: all datasets except `train`."""
        return {name: dataset for name, dataset in self.datasets.items() if name != TRAIN}


# For each mode, the fields of the job that contain the datasets to check.
_DATASET_FIELDS = {
    "train": ("datasets",),
    "eval": ("datasets",),
    "decode": ("decode_datasets",),
    "explain": ("datasets", "decode_datasets"),
    "load": (),
}


def partitioner_of(job: Job, mode: str) -> Partitioner:
    """Returns the job's task on its mesh, after all checks that do not require compilation.

    Args:
      job: The job, as built from its config.
      mode: "train", "eval", "decode", "explain" or "load", which selects the checks. In mode
        "load", no dataset is checked.

    Raises:
      ConfigError: The mesh, the datasets, the task and the run's metrics are inconsistent, or the
        mode is unknown.
    """
    require_choice("partitioner_of: mode", mode, _DATASET_FIELDS)
    check_parts(job)
    use_compilation_cache()
    mesh = _mesh_of(job)
    if mode in ("train", "decode"):
        _log_turn_end(job.task.tokenizer)
    partitioner = partitioner_on(job, mesh)
    log_compiler_options(partitioner)
    if mode != "explain":
        check_fits(partitioner.layout, mesh, mode)
    check_averages(partitioner, job.run)
    if mode == "train" and TRAIN not in job.datasets:
        raise ConfigError(
            f"The datasets are {sorted(job.datasets)}, but training requires a dataset named "
            f"'{TRAIN}'. Add it to the experiment's datasets()."
        )
    fields = _DATASET_FIELDS[mode]
    if "decode_datasets" in fields:
        check_decoder(job.task)
    for field in fields:
        check_datasets(job, partitioner, field, mode)
    if mode == "train":
        check_metric_names(partitioner, job.datasets[TRAIN])
        check_watched_metrics(partitioner, job.datasets, job.run)
    return partitioner


def _mesh_of(job: Job) -> Mesh:
    """Builds and logs the job's mesh, with simulated devices if there is no accelerator."""
    mesh_config = filled_mesh(job.mesh)
    # The number of simulated devices must be set before JAX initializes its devices.
    check_room_for_devices(simulate_devices(mesh_config.num_devices, processes.count()))
    mesh = make_mesh(mesh_config)
    if jax.process_count() != processes.count():
        raise ConfigError(
            f"JAX reports {jax.process_count()} processes, but {processes.count()} are connected. "
            "Start each process with --coordinator, --num_processes and --process_id."
        )
    device = mesh.devices.flat[0]
    plural, num_processes = "s" * (mesh.size > 1), jax.process_count()
    devices = (
        f"{mesh.size} simulated CPU device{plural}, because there is no accelerator"
        if device.platform == "cpu"
        else f"{mesh.size} {device.device_kind} device{plural}, "
        f"{num_processes} host{'s' * (num_processes > 1)}"
    )
    _log.info("%s: %s", mesh_text(mesh.shape), devices)
    return mesh


def _log_turn_end(tokenizer: Tokenizer | None) -> None:
    # The byte tokenizer's template is not in a file, where it could differ from what users expect.
    if tokenizer is not None and tokenizer.path is not None and tokenizer.turn_end:
        _log.info("decoding ends an answer at the chat template's %s", tokenizer.turn_end)


def partitioner_on(
    job: Job, mesh: Mesh, more_options: CompilerOptions | None = None
) -> Partitioner:
    """Returns the job's task on a mesh, using the experiment's custom partitioner if it has one.

    Args:
      job: The job, as built from its config.
      mesh: The mesh, which may consist of devices that are not attached.
      more_options: Additional compiler options; options in `job.mesh` take precedence.
    """
    options = merged_options(job.mesh.compiler_options, more_options)
    options = {name: given for name, given in options.items() if given}
    # Pass the argument only if needed, because a custom partitioner may not accept it.
    settings = {"compiler_options": options} if options else {}
    return (job.partitioner or Partitioner)(job.task, mesh, **settings)


def log_compiler_options(partitioner: Partitioner) -> None:
    """Logs the train step's compiler options, if any are set."""
    if options := partitioner.train_options:
        text = ", ".join(f"{name}={value}" for name, value in options.items())
        _log.info("compiler options: %s", text)


_log = logging.getLogger(__name__)
