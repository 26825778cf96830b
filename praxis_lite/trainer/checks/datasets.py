"""Checks of a job's datasets against its task and mesh, before a step compiles."""

from collections.abc import Mapping

import jax
from flax.traverse_util import flatten_dict

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.partitioner.compiled_steps import Step
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.sharding.batch_sharding import check_ids
from praxis_lite.experiment.experiment import Job
from praxis_lite.inputs.base import TRAIN, IndexedPipeline
from praxis_lite.inputs.batches import check_data, check_members, checked_batches, checked_spec
from praxis_lite.inputs.mixing.same_classes import require_same_classes
from praxis_lite.job import processes
from praxis_lite.job.processes.same_everywhere import check_same
from praxis_lite.trainer.checks.id_sizes import num_ids_of
from praxis_lite.trainer.checks.job_checks import check_num_batches, check_tokens, why_bytes
from praxis_lite.trainer.checks.memory import check_batch_fits

__all__ = ("check_reads", "step_for")


def check_datasets(job: Job, partitioner: Partitioner, root: str, mode: str) -> None:
    """Raises ConfigError if the datasets in a field of a job do not fit its task and its mesh.

    Args:
      root: the field, "datasets" or "decode_datasets".
      mode: as for `partitioner_of`; "explain" reads no batch.
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
        check_reads(step, spec, path)
        if mode != "explain":
            if isinstance(pipeline, IndexedPipeline):
                is_decoded = root == "decode_datasets"
                num_ids = job.task.num_ids() if is_decoded else num_ids_of(job.task, spec)
                rows = partitioner.process_rows(pipeline.batch_size)
                _check_first_batch(pipeline, spec, rows, num_ids, path)
            check_tokens(job.task, pipeline, path)
        # A layer refuses some settings only when it is called, as here. The step stays traced.
        # Training evaluates, too.
        if mode in ("train", "decode"):
            step.trace(spec)
        elif mode == "eval" and name != TRAIN:
            partitioner.eval_examples.trace(spec)
    if processes.count() > 1:
        fingerprints = {path: pipeline.fingerprint() for path, pipeline in pipelines.items()}
        check_same("The processes' data differ", flatten_dict(fingerprints, sep="."))


def step_for(partitioner: Partitioner, root: str, name: str) -> Step:
    """Returns the step for batches of a dataset of a job.

    Args:
      root: the field of the job that has the dataset: "datasets" or "decode_datasets".
      name: of the dataset; "train" is trained on, others are evaluated on.
    """
    if root == "decode_datasets":
        return partitioner.decode_step
    return partitioner.train_step if name == TRAIN else partitioner.eval_step


def check_reads(step: Step, spec: Mapping[str, jax.ShapeDtypeStruct], name: str) -> None:
    """Raises ConfigError if a batch lacks a leaf that a step reads, or the mesh cannot split it.

    Args:
      spec: as `checked_spec` gives it.
      name: of the dataset, for the message.
    """
    step.where.task.check_inputs(spec, step.required_inputs, name)
    step.check_batch(spec)


def _check_first_batch(
    pipeline: IndexedPipeline,
    spec: Mapping[str, jax.ShapeDtypeStruct],
    rows: slice,
    num_ids: Mapping[str, int],
    name: str,
) -> None:
    """Checks this process's rows of the first batch; those of the others, before their steps."""
    share = max(0, rows.stop - rows.start) / pipeline.batch_size
    check_batch_fits(spec, share, name)
    batches = checked_batches(pipeline, name, rows=rows)
    first = next(batches)[1] if rows.start < rows.stop else {}
    try:
        check_ids(first, num_ids, f"{name}, batch 0", first_row=rows.start)
    except ConfigError as error:
        raise ConfigError(f"{error}{why_bytes(pipeline)}") from None
