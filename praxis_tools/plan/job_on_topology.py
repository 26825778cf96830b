"""Builds the partitioner and the batch specs of a job for a topology."""

from collections.abc import Sequence

import jax

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.partitioner.compiled_steps import Step
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.sharding.mesh import filled_mesh, make_mesh
from praxis_lite.experiment.experiment import Job
from praxis_lite.inputs.base import TRAIN
from praxis_lite.inputs.pipeline_checks import checked_spec
from praxis_lite.trainer.checks.datasets import check_reads
from praxis_lite.trainer.checks.job_checks import check_parts
from praxis_lite.trainer.job_on_mesh import partitioner_on
from praxis_tools.plan.topology import Topology

# On chips with SparseCores, compile embedding lookups and scatters for the TensorCore: the compiler
# estimates no cycles for SparseCore instructions, so their cost would be counted as zero.
_NO_GATHERS = {"xla_tpu_offload_gather_to_sparsecore?": "false"}
_NO_SCATTERS = {"xla_tpu_enable_offloading_scatter_to_sparsecore?": "false"}
PLANNING_OPTIONS: dict[str, dict[str, str]] = {
    "v5p": _NO_GATHERS,
    "v6e": _NO_GATHERS,
    "tpu7x": _NO_GATHERS | _NO_SCATTERS,
}

# Without a GPU to autotune on, XLA chooses Triton tiles that it then cannot compile.
NO_TRITON = {"xla_gpu_enable_triton_gemm?": False}


def planned_partitioner(job: Job, topology: Topology) -> Partitioner:
    """Builds the partitioner of a job on a topology, replacing a -1 in the mesh shape.

    Raises:
      ConfigError: The mesh does not match the topology, or settings of the job are incompatible.
    """
    check_parts(job)
    mesh_config = job.mesh
    has_slices = topology.num_slices > 1 and topology.chip.torus_dims
    if has_slices and mesh_config.dcn_mesh_shape is None:
        raise ConfigError(
            f"--num_slices={topology.num_slices}, but mesh.dcn_mesh_shape is None. Set the number "
            "of slices along each mesh axis, for instance --set mesh.dcn_mesh_shape="
            f"({topology.num_slices},{','.join('1' * (len(mesh_config.axis_names) - 1))})."
        )
    mesh_config = filled_mesh(mesh_config, len(topology.devices))
    if mesh_config.num_devices != len(topology.devices) and not mesh_config.allow_unused_devices:
        raise ConfigError(
            f"{mesh_config} has {mesh_config.num_devices} devices, but {topology.name}"
            f"{f' x {topology.num_slices}' if topology.num_slices > 1 else ''} has "
            f"{len(topology.devices)}. Change the topology or mesh.ici_mesh_shape, in which -1 "
            "means all remaining devices, as in --set mesh.ici_mesh_shape="
            f"({','.join(['1', '-1', *'1' * (len(mesh_config.axis_names) - 2)])})."
        )
    mesh = make_mesh(mesh_config, topology.devices)
    options = PLANNING_OPTIONS.get(topology.chip.name, {})
    return partitioner_on(job, mesh, {"tpu": options, "gpu": NO_TRITON})


def step_specs(
    job: Job,
    partitioner: Partitioner,
    steps: Sequence[Step],
    batch_sizes: Sequence[int] = (),
) -> list[tuple[Step, str, dict]]:
    """Returns the batch specs of each step, without reading data.

    Args:
      job: Job with the datasets.
      partitioner: The job's partitioner.
      steps: Steps of the partitioner.
      batch_sizes: Batch sizes for the decode step; the result has one entry for each of these batch
        sizes. If empty, the dataset's batch size is used.

    Returns:
      A list of (step, dataset name, shapes and types of a batch). A dataset whose batches have
      several shapes has an entry for each of them.

    Raises:
      ConfigError: A step has no dataset, or the task cannot read the dataset's batches.
    """
    specs_of_steps = []
    for step in steps:
        decodes = step is partitioner.decode_step
        root, datasets = "datasets", job.datasets
        if decodes:
            root, datasets = "decode_datasets", job.decode_datasets
        names = [name for name in datasets if decodes or (name == TRAIN) == step.trains]
        if not names:
            raise ConfigError(
                f"--steps={step.kind}: the experiment's {root}() has no dataset for this step. "
                f"Remove {step.kind} from --steps."
            )
        spec = checked_spec(datasets[names[0]], f"{root}.{names[0]}")
        specs = datasets[names[0]].element_specs()
        for shape in specs:
            check_reads(step, shape, f"{root}.{names[0]}")
        resized = [_with_rows(spec, rows) for rows in batch_sizes] if decodes else []
        specs_of_steps += [(step, names[0], batch_spec) for batch_spec in resized or specs]
    return specs_of_steps


def _with_rows(spec: dict, rows: int) -> dict:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), spec)
