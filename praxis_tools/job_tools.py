"""The tools that are added to a training job: hooks, listeners, peer saves and elastic meshes.

`praxis_lite.installed_tools` finds them through the entry point in pyproject.toml.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from praxis_lite.job.events import Listener, events
from praxis_lite.trainer.job_tools import JobTools, OtherSaves
from praxis_tools.elastic import worker_assignment
from praxis_tools.goodput.goodput import note_goodput, num_lost_steps, time_section
from praxis_tools.goodput.timeline import Timeline
from praxis_tools.modes.elastic import begin_elastic
from praxis_tools.stuck.beats import StuckBeats

if TYPE_CHECKING:
    import jax

    from praxis_lite.checkpoints.init.initial_state import Note
    from praxis_lite.core.sharding.mesh_config import MeshConfig
    from praxis_lite.experiment.experiment import Job
    from praxis_lite.experiment.launched_config import LaunchedConfig
    from praxis_lite.job.job_dir import JobDir
    from praxis_lite.trainer.hooks.hook import Hook
    from praxis_lite.trainer.job_on_mesh import JobOnMesh


@contextlib.contextmanager
def goodput_recorder(files: "JobDir", note: "Note") -> Iterator[Listener]:
    """Yields a listener that writes timeline.jsonl; prints the goodput if training succeeds."""
    with Timeline(files.timeline_jsonl, events, note) as timeline:
        yield timeline
    if not timeline.is_discarded:
        note_goodput(files, note)


def peer_saves(job: "JobOnMesh", note: "Note") -> OtherSaves:
    """Returns the peer saves of an elastic job, or saves that do nothing if they are disabled."""
    if job.run.peer_save_every_steps is None:
        return OtherSaves()
    if (assignment := worker_assignment.current()) is None:
        note("note: run.peer_save_every_steps has no effect without --elastic")
        return OtherSaves()

    from praxis_tools.elastic.job_saves import PeerSaves

    return PeerSaves(job, assignment, note)


def on_devices_of_generation(job: "Job", launched: "LaunchedConfig") -> "Job":
    """Returns an elastic job on a mesh of all devices in the job's generation.

    Other jobs are returned unchanged.
    """
    if (assignment := worker_assignment.current()) is None:
        return job

    from praxis_tools.elastic.compiled_programs import use_shared_cache
    from praxis_tools.elastic.mesh_of_devices import fit_job_to_devices

    job = fit_job_to_devices(assignment, job, launched, choose_mesh)
    use_shared_cache(assignment)
    return job


def choose_mesh(job: "Job", devices: "Sequence[jax.Device]") -> "MeshConfig":
    """Chooses a mesh for a job on a number of devices that does not match the job's own mesh."""
    from praxis_tools.plan.search import mesh_choice

    return mesh_choice.choose_mesh(job, devices)


def hooks_of_tools(job: "JobOnMesh") -> "list[Hook]":
    """Returns the hooks that the tools add to a job; they run before the trainer's own hooks."""
    from praxis_tools.explain.compiler_warnings import CompilerWarnings
    from praxis_tools.explain.first_collectives import ReportFirstCollectives
    from praxis_tools.nan_finder.reports import NonFinite
    from praxis_tools.profile.tables import ProfileTables
    from praxis_tools.utilization.utilization_hook import Utilization

    non_finite = [NonFinite(job)] if job.run.debug_nans else []
    certificates = []
    if job.run.certify_every_steps is not None and job.partitioner.mesh.size > 1:
        from praxis_tools.certificates.certificates_hook import Certificates

        certificates = [Certificates(job)]
    return [
        *certificates,
        CompilerWarnings(job),
        ReportFirstCollectives(job),
        Utilization(job),
        *non_finite,
        ProfileTables(),
    ]


TOOLS = JobTools(
    hooks=hooks_of_tools,
    recorder=goodput_recorder,
    other_saves=peer_saves,
    on_devices=on_devices_of_generation,
    begin_elastic=begin_elastic,
    beats=StuckBeats,
    summary_section=time_section,
    num_lost_steps=num_lost_steps,
)
