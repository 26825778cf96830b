"""Places an experiment's job on a topology: its partitioner, and the batches of its steps."""

from collections.abc import Sequence

import jax

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.partitioner.compiled_steps import Step
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.sharding.mesh import filled_mesh, make_mesh
from praxis_lite.experiment.experiment import Job
from praxis_lite.inputs.base import TRAIN
from praxis_lite.inputs.batches import checked_spec
from praxis_lite.trainer.checks.datasets import check_reads
from praxis_lite.trainer.checks.job_checks import check_parts
from praxis_lite.trainer.job_on_mesh import partitioner_on
from praxis_tools.plan.topology import Topology

# For chips with SparseCores: compile embedding lookups and scatters for the TensorCore. On a
# SparseCore they have no cycles in the program's text, and would count as free.
_NO_GATHERS = {"xla_tpu_offload_gather_to_sparsecore?": "false"}
_NO_SCATTERS = {"xla_tpu_enable_offloading_scatter_to_sparsecore?": "false"}
PLANNING_OPTIONS: dict[str, dict[str, str]] = {
    "v5p": _NO_GATHERS, "v6e": _NO_GATHERS, "tpu7x": _NO_GATHERS | _NO_SCATTERS,
}

# Without a GPU for autotuning, XLA chooses Triton tiles that it then cannot compile.
NO_TRITON = {"xla_gpu_enable_triton_gemm?": False}


def planned_partitioner(job: Job, topology: Topology) -> Partitioner:
    """Returns the partitioner of a job on the devices of a topology; fills in -1 in its mesh shape.

    Raises:
      ConfigError: the mesh does not fill the topology, or parts of the job do not fit together.
    """
    check_parts(job)
    mesh_config = job.mesh
    has_slices = topology.num_slices > 1 and topology.chip.torus_dims
    if has_slices and mesh_config.dcn_mesh_shape is None:
        raise ConfigError(
            f"--num_slices={topology.num_slices}, but mesh.dcn_mesh_shape is None. Say along which "
            f"axis the slices lie, for instance --set mesh.dcn_mesh_shape="
            f"({topology.num_slices},{','.join('1' * (len(mesh_config.axis_names) - 1))})."
        )
    mesh_config = filled_mesh(mesh_config, len(topology.devices))
    if mesh_config.num_devices != len(topology.devices) and not mesh_config.allow_unused_devices:
        raise ConfigError(
            f"{mesh_config} has {mesh_config.num_devices} devices, but {topology.name}"
            f"{f' x {topology.num_slices}' if topology.num_slices > 1 else ''} has "
            f"{len(topology.devices)}. Change mesh.ici_mesh_shape (-1 stands for what is left over)"
            ", as in --set mesh.ici_mesh_shape="
            f"({','.join(['1', '-1', *'1' * (len(mesh_config.axis_names) - 2)])}), or the topology."
        )
    mesh = make_mesh(mesh_config, topology.devices)
    options = PLANNING_OPTIONS.get(topology.chip.name, {})
    return partitioner_on(job, mesh, {"tpu": options, "gpu": NO_TRITON})


def step_specs(
    job: Job, partitioner: Partitioner, steps: Sequence[Step], batch_sizes: Sequence[int] = (),
) -> list[tuple[Step, str, dict]]:
    """Returns (step, dataset, shapes and types of a batch) for each step, without reading data.

    Args:
      batch_sizes: numbers of prompts to decode, each in an entry; empty: the dataset's.

    Raises:
      ConfigError: there is no dataset for a step, or the task cannot read its batches.
    """
    result = []
    for step in steps:
        decodes = step is partitioner.decode_step
        root, datasets = "datasets", job.datasets
        if decodes:
            root, datasets = "decode_datasets", job.decode_datasets
        names = [name for name in datasets if decodes or (name == TRAIN) == step.trains]
        if not names:
            raise ConfigError(
                f"--steps={step.kind}, but the experiment's {root}() has no dataset for it. Leave "
                f"{step.kind} out."
            )
        spec = checked_spec(datasets[names[0]], f"{root}.{names[0]}")
        check_reads(step, spec, f"{root}.{names[0]}")
        resized = [_with_rows(spec, rows) for rows in batch_sizes] if decodes else []
        result += [(step, names[0], batch_spec) for batch_spec in resized or [spec]]
    return result


def _with_rows(spec: dict, rows: int) -> dict:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), spec)
