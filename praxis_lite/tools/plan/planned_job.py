"""An experiment's job laid over a topology: its partitioner, and the batches of its steps."""

from collections.abc import Sequence

import jax

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.partitioner.compiled_steps import Step
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.sharding.mesh import filled_mesh, make_mesh
from praxis_lite.inputs.base import TRAIN
from praxis_lite.inputs.batches import checked_spec
from praxis_lite.run.experiment.experiment import Job
from praxis_lite.run.trainer.checks.datasets import check_reads
from praxis_lite.run.trainer.checks.job_checks import check_parts
from praxis_lite.run.trainer.job_on_mesh import partitioner_on
from praxis_lite.tools.plan.topology import Topology

# By chips that have SparseCores. What these do besides collectives has no cycles in the text, so
# that it would count as nothing: lookups in tables, and scatters of tokens.
_NO_GATHERS = {"xla_tpu_offload_gather_to_sparsecore?": "false"}
_NO_SCATTERS = {"xla_tpu_enable_offloading_scatter_to_sparsecore?": "false"}
PLANNING_OPTIONS: dict[str, dict[str, str]] = {
    "v5p": _NO_GATHERS, "v6e": _NO_GATHERS, "tpu7x": _NO_GATHERS | _NO_SCATTERS,
}

# Without a GPU to try them on, XLA chooses tiles for Triton that it then cannot compile.
NO_TRITON = {"xla_gpu_enable_triton_gemm?": False}


def planned_partitioner(job: Job, topology: Topology) -> Partitioner:
    """Returns the job's task on its mesh, laid over a topology; -1 in its shape is filled.

    Raises:
      ConfigError: the mesh does not fill the topology, or parts of the job do not go together.
    """
    check_parts(job)
    mesh_config = job.mesh
    of_slices = topology.num_slices > 1 and topology.chip.torus_dims
    if of_slices and mesh_config.dcn_mesh_shape is None:
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
    """Returns (step, dataset, shapes and types of a batch) of the steps asked for; reads no data.

    Args:
      batch_sizes: of prompts, to decode each; empty: the dataset's.

    Raises:
      ConfigError: there is no dataset for a step, or the task cannot take its batches.
    """
    result = []
    for step in steps:
        is_decoded = step is partitioner.decode_step
        root = "decode_datasets" if is_decoded else "datasets"
        names = [
            name for name in getattr(job, root) if is_decoded or (name == TRAIN) == step.trains
        ]
        if not names:
            raise ConfigError(
                f"--steps={step.kind}, but the experiment's {root}() has no dataset for it. Leave "
                f"{step.kind} out."
            )
        pipeline = getattr(job, root)[names[0]]
        spec = checked_spec(pipeline, f"{root}.{names[0]}")
        check_reads(step, spec, f"{root}.{names[0]}")
        specs = [_with_rows(spec, rows) for rows in batch_sizes] if is_decoded else []
        result += [(step, names[0], item) for item in specs or [spec]]
    return result


def _with_rows(spec: dict, rows: int) -> dict:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), spec)
