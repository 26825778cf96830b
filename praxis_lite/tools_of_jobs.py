"""The parts that tools give to a job that trains: sources of its initial state, a mesh, hooks.

The command line (`main.py`) and Python (`python_calls.py`) train with the same.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

    from praxis_lite.core.partitioner.train_state import StateLayout
    from praxis_lite.core.sharding.mesh_config import MeshConfig
    from praxis_lite.run.checkpoints.init.initial_state import InitialState, Source
    from praxis_lite.run.checkpoints.init.loading_rules import CheckpointLoadingRules
    from praxis_lite.run.experiment.experiment import Job
    from praxis_lite.run.trainer.hooks.hook import Hook
    from praxis_lite.run.trainer.job_on_mesh import JobOnMesh


def _from_huggingface(directory: str, layout: "StateLayout") -> "InitialState":
    from praxis_lite.tools.huggingface.initial_state import FromHuggingFace

    return FromHuggingFace(directory, layout)


def _from_checkpoints(
    rules: "Mapping[str, CheckpointLoadingRules]", layout: "StateLayout"
) -> "InitialState":
    from praxis_lite.run.checkpoints.init.init_from_checkpoint import FromCheckpoints

    return FromCheckpoints(rules, layout)


# By the setting of `run` that names them.
SOURCES: "Mapping[str, Source]" = {
    "init_from_checkpoint_rules": _from_checkpoints,
    "init_from_huggingface": _from_huggingface,
}


def chosen_mesh(job: "Job", devices: "Sequence[jax.Device]") -> "MeshConfig":
    """Returns the mesh for devices of another number than a job's own mesh has."""
    from praxis_lite.tools.plan.search import mesh_choice

    return mesh_choice.chosen_mesh(job, devices)


def hooks_of_tools(job: "JobOnMesh") -> "list[Hook]":
    """Returns the hooks that tools add to a job; they come before those of every job."""
    from praxis_lite.tools.explain.compiler_warnings import CompilerWarnings
    from praxis_lite.tools.explain.waited_for import WaitedFor
    from praxis_lite.tools.non_finite.hook import NonFinite
    from praxis_lite.tools.profile.tables import ProfileTables
    from praxis_lite.tools.utilization.hook import Utilization

    non_finite = [NonFinite(job)] if job.run.debug_nans else []
    certificates = []
    if job.run.certify_every_steps is not None and job.partitioner.mesh.size > 1:
        from praxis_lite.tools.testing.in_flight.hook import Certificates

        certificates = [Certificates(job)]
    return [
        *certificates, CompilerWarnings(job), WaitedFor(job), Utilization(job), *non_finite,
        ProfileTables(),
    ]
