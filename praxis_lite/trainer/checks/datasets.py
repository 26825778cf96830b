"""Checks a job's datasets against the job's task and mesh, before a step is compiled."""

from collections.abc import Mapping

import jax
from flax.traverse_util import flatten_dict

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.partitioner.compiled_steps import Step
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.sharding.batch_sharding import check_ids
from praxis_lite.experiment.experiment import Job
from praxis_lite.inputs.base import TRAIN, IndexedPipeline, InputPipeline
from praxis_lite.inputs.mixing.same_classes import require_same_classes
from praxis_lite.inputs.pipeline_checks import (
    check_data,
    check_members,
    checked_batches,
    checked_spec,
)
from praxis_lite.job import processes
from praxis_lite.job.processes.same_everywhere import check_same
from praxis_lite.trainer.checks.id_sizes import num_ids_of
from praxis_lite.trainer.checks.job_checks import (
    byte_tokenizer_hint,
    check_num_batches,
    check_tokens,
)
from praxis_lite.trainer.checks.memory import check_batch_fits

__all__ = ("check_reads", "step_for")


def check_datasets(job: Job, partitioner: Partitioner, root: str, mode: str) -> None:
    """Checks the datasets in one of a job's fields against the job's task and mesh.

    Args:
      job: The job, as built from its config.
      partitioner: Partitioner of the job's task, with the job's mesh.
      root: The field, "datasets" or "decode_datasets".
      mode: The mode, as for `partitioner_of`. In mode "explain", no batch is read.

    Raises:
      ConfigError: A dataset does not match the task or the mesh, or the processes have different
        data.
    """
    pipelines = {f"{root}.{name}": pipeline for name, pipeline in getattr(job, root).items()}
    specs = {}
    for path, pipeline in pipelines.items():
        check_members(pipeline, path)
        check_data(pipeline, path)
        specs[path] = checked_spec(pipeline, path)
    require_same_classes(pipelines)
    if root == "datasets" and mode != "explain":
        check_num_batches(job.datasets, job.run)
    for path, pipeline in pipelines.items():
        name, spec = path.removeprefix(f"{root}."), specs[path]
        step = step_for(partitioner, root, name)
        for shape in pipeline.element_specs():
            check_reads(step, shape, path)
        _check_rows_of_processes(pipeline, partitioner.mesh.size, path)
        if mode != "explain":
            if isinstance(pipeline, IndexedPipeline):
                is_decoded = root == "decode_datasets"
                num_ids = job.task.num_ids() if is_decoded else num_ids_of(job.task, spec)
                rows = partitioner.process_rows(pipeline.batch_size)
                _check_first_batch(pipeline, spec, rows, num_ids, path)
            check_tokens(job.task, pipeline, path)
        # Trace the step, because layers check some settings only when they are called. JAX caches
        # the trace. In mode "train", the eval step is traced for evaluation datasets.
        if mode == "eval":
            step = partitioner.eval_examples
        if mode in ("train", "decode") or (mode == "eval" and name != TRAIN):
            for shape in pipeline.element_specs():
                step.trace(shape)
    if processes.count() > 1:
        fingerprints = {path: pipeline.fingerprint() for path, pipeline in pipelines.items()}
        check_same("The processes have different data", flatten_dict(fingerprints, sep="."))


def step_for(partitioner: Partitioner, root: str, name: str) -> Step:
    """Returns the train, eval or decode step for a dataset's batches.

    Args:
      partitioner: Partitioner of the job's task, with the job's mesh.
      root: The job's field that contains the dataset: "datasets" or "decode_datasets".
      name: Name of the dataset. In "datasets", all datasets except "train" are for evaluation.
    """
    if root == "decode_datasets":
        return partitioner.decode_step
    return partitioner.train_step if name == TRAIN else partitioner.eval_step


def check_reads(step: Step, spec: Mapping[str, jax.ShapeDtypeStruct], name: str) -> None:
    """Checks that a batch contains all leaves that a step reads, and can be sharded over the mesh.

    Args:
      step: The step.
      spec: Shapes and dtypes of the batch, as returned by `checked_spec`.
      name: Name of the dataset, for the error message.

    Raises:
      ConfigError: A leaf is missing, or the batch cannot be sharded over the mesh.
    """
    step.task_on_mesh.task.check_inputs(spec, step.required_inputs, name)
    step.check_batch(spec)


def _check_rows_of_processes(pipeline: InputPipeline, num_devices: int, name: str) -> None:
    """Checks that every process feeds the same fraction of the rows in batches of all shapes."""
    is_same = len(pipeline.element_specs()) == 1 or pipeline.batch_size % num_devices == 0
    if processes.count() > 1 and not is_same:
        raise ConfigError(
            f"{name}.batch_size is {pipeline.batch_size}; with several processes and "
            f"bucket_lengths, expected a multiple of the number of devices, {num_devices}. Change "
            "batch_size, or set bucket_lengths=()."
        )


def _check_first_batch(
    pipeline: IndexedPipeline,
    spec: Mapping[str, jax.ShapeDtypeStruct],
    rows: slice,
    num_ids: Mapping[str, int],
    name: str,
) -> None:
    """Checks the size and the ids of this process's rows in the first batch.

    Later batches are checked just before the steps that use them.
    """
    fraction = max(0, rows.stop - rows.start) / pipeline.batch_size
    check_batch_fits(spec, fraction, name)
    batches = checked_batches(pipeline, name, rows=rows)
    first = next(batches)[1] if rows.start < rows.stop else {}
    try:
        first_row = pipeline.rows_of_batch(0, rows).start
        check_ids(first, num_ids, f"{name}, batch 0", first_row=first_row)
    except ConfigError as error:
        raise ConfigError(f"{error}{byte_tokenizer_hint(pipeline)}") from None
