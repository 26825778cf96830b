"""A job on its mesh: all of it checked, nothing compiled."""

import dataclasses
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

__all__ = ("JobOnMesh", "partitioner_of", "partitioner_on", "print_compiler_options")


@dataclasses.dataclass(frozen=True)
class JobOnMesh:
    """A job as it runs: its task on the mesh, and its files.

    Attributes:
      partitioner: the job's task on the mesh.
      job: as it was built.
      files: of its directory; None for a mode that needs none.
    """

    partitioner: Partitioner
    job: Job
    files: JobDir

    @property
    def datasets(self) -> Mapping[str, InputPipeline]:
        """The datasets that are trained and evaluated on."""
        return self.job.datasets

    @property
    def decode_datasets(self) -> Mapping[str, InputPipeline]:
        """The datasets of prompts."""
        return self.job.decode_datasets

    @property
    def run(self) -> RunConfig:
        """The settings of the run."""
        return self.job.run

    @property
    def hooks(self) -> Sequence[Any]:
        """The hooks of the experiment."""
        return self.job.hooks

    @property
    def eval_sets(self) -> dict[str, InputPipeline]:
        """The datasets that are evaluated on."""
        return {name: dataset for name, dataset in self.datasets.items() if name != TRAIN}


# The fields of a job whose data a mode reads, and whose datasets are therefore checked.
_READ_FIELDS = {
    "train": ("datasets",),
    "eval": ("datasets",),
    "decode": ("decode_datasets",),
    "explain": ("datasets", "decode_datasets"),
    "load": (),
}


def partitioner_of(job: Job, mode: str) -> Partitioner:
    """Returns the task on its mesh, after all that can be checked before anything compiles.

    Raises ConfigError if the mesh, the data, the task and what the run watches do not fit together,
    or for another mode. The mode, "train", "eval", "decode" or "explain", tells what is checked;
    for "load" no data is.
    """
    require_choice("What a job on its mesh is checked for", mode, _READ_FIELDS)
    check_parts(job)
    use_compilation_cache()
    mesh = _mesh_of(job)
    if mode in ("train", "decode"):
        _print_turn_ends(job.task.tokenizer)
    partitioner = partitioner_on(job, mesh)
    print_compiler_options(partitioner)
    if mode != "explain":
        check_fits(partitioner.layout, mesh, mode)
    check_averages(partitioner, job.run)
    if mode == "train" and TRAIN not in job.datasets:
        raise ConfigError(
            f"datasets has {sorted(job.datasets)}, but training needs one called '{TRAIN}'. Add it "
            "to the experiment's datasets()."
        )
    fields = _READ_FIELDS[mode]
    if "decode_datasets" in fields:
        check_decoder(job.task)
    for field in fields:
        check_datasets(job, partitioner, field, mode)
    if mode == "train":
        check_metric_names(partitioner, job.datasets[TRAIN])
        check_watched_metrics(partitioner, job.datasets, job.run)
    return partitioner


def _mesh_of(job: Job) -> Mesh:
    """Returns the job's mesh, of simulated devices without an accelerator, and prints its line."""
    mesh_config = filled_mesh(job.mesh)
    check_room_for_devices(simulate_devices(mesh_config.num_devices, processes.count()))
    mesh = make_mesh(mesh_config)
    if jax.process_count() != processes.count():
        raise ConfigError(
            f"JAX sees {jax.process_count()} processes, of which {processes.count()} are "
            "connected. Start each with --coordinator, --num_processes and --process_id."
        )
    device = mesh.devices.flat[0]
    devices = (
        f"{mesh.size} simulated CPU device{'s' * (mesh.size > 1)}, because there is no accelerator"
        if device.platform == "cpu"
        else f"{mesh.size} {device.device_kind} devices, {jax.process_count()} hosts"
    )
    print(f"{mesh_text(mesh.shape)}: {devices}", flush=True)
    return mesh


def _print_turn_ends(tokenizer: Tokenizer | None) -> None:
    if tokenizer is not None and (ends := tokenizer.turn_end_ids):
        words = ", ".join(f"{tokenizer.decode([token])} (id {token})" for token in ends)
        print(f"the chat template ends an answer with {words}: decoding ends there too", flush=True)


def partitioner_on(
    job: Job, mesh: Mesh, more_options: CompilerOptions | None = None
) -> Partitioner:
    """Returns the job's task on a mesh, by the job's own partitioner if any.

    Args:
      more_options: of the compiler, in addition to those of `job.mesh`, which take precedence.
    """
    options = merged_options(job.mesh.compiler_options, more_options)
    options = {name: given for name, given in options.items() if given}
    # A custom partitioner may take none.
    settings = {"compiler_options": options} if options else {}
    return (job.partitioner or Partitioner)(job.task, mesh, **settings)


def print_compiler_options(partitioner: Partitioner) -> None:
    """Prints a line of the options that a train step is compiled with, if there are any."""
    if options := partitioner.train_options:
        words = ", ".join(f"{name}={value}" for name, value in options.items())
        print(f"compiler options: {words}", flush=True)
