"""Chooses the mesh of an elastic job for the devices that are currently available."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import fiddle as fdl
import jax

from praxis_lite.config.build import build
from praxis_lite.core.errors import ConfigError, shortened
from praxis_lite.core.sharding.mesh import all_devices, filled_mesh, simulate_devices
from praxis_lite.core.sharding.mesh_config import MeshConfig
from praxis_lite.experiment.experiment import Job
from praxis_lite.experiment.launched_config import LaunchedConfig
from praxis_lite.host.host_memory import check_room_for_devices
from praxis_lite.job import processes
from praxis_lite.job.processes.broadcast import from_first
from praxis_lite.job.processes.membership import Membership
from praxis_lite.job.processes.same_everywhere import check_same

# Takes a job and the available devices, and returns a mesh of these devices.
MeshChooser = Callable[[Job, Sequence[jax.Device]], MeshConfig]


def fit_job_to_devices(
    membership: Membership, job: Job, launched: LaunchedConfig, choose: MeshChooser
) -> Job:
    """Returns a job on a mesh of all devices in its generation.

    If the job's own mesh already has as many devices, the job is returned unchanged. Otherwise, the
    mesh comes from the experiment's `mesh_for`, or, if that is not defined, from calling `choose`
    in the first process. The launched config is changed to the same mesh.

    Args:
      membership: This process's membership in the generation.
      job: The job.
      launched: Config that the job was built from.
      choose: Function that chooses a mesh.

    Raises:
      ConfigError: `mesh_for` does not return a mesh of these devices with the job's axes, or
        returns different meshes in different processes, or `choose` finds no mesh.
    """
    sizes = (*job.mesh.ici_mesh_shape, *(job.mesh.dcn_mesh_shape or ()))
    num_per_process = math.ceil(abs(math.prod(sizes)) / membership.num_slots)  # Treat -1 as 1.
    num_devices = num_per_process * len(membership.members)
    check_room_for_devices(simulate_devices(num_devices, processes.count()))
    devices = all_devices()
    if _filled(job.mesh, len(devices)) is not None:
        return job
    config = launched.mesh_for and launched.mesh_for(len(devices))
    if config is None:
        fields = from_first("the mesh is chosen", lambda: _fields(choose(job, devices)))
        mesh = dataclasses.replace(job.mesh, **_as_tuples(fields))
    else:
        mesh = _checked_mesh(config, job.mesh, len(devices), f"{launched.experiment}.mesh_for")
        check_same("mesh_for returned different meshes", {"mesh": _fields(mesh)})
    launched.config.mesh = fdl.Config(MeshConfig, **_fields(mesh))
    return dataclasses.replace(job, mesh=mesh)


def _filled(mesh: MeshConfig, num_devices: int) -> MeshConfig | None:
    """Replaces -1 in a mesh shape; returns None if the mesh cannot have `num_devices` devices."""
    try:
        mesh = filled_mesh(mesh, num_devices)
    except ConfigError:  # The number of devices is not divisible by the product of the other sizes.
        return None
    return mesh if mesh.num_devices == num_devices else None


def _checked_mesh(config: Any, own: MeshConfig, num_devices: int, method: str) -> MeshConfig:
    """Builds and checks the mesh that `mesh_for` returned.

    Args:
      config: Result of `mesh_for`.
      own: Mesh of the experiment. Its compiler options are the defaults.
      num_devices: Number of devices that the mesh must have.
      method: Full name of `mesh_for`, for error messages.
    """
    call = f"{method}({num_devices})"
    example = f"fdl.Config(MeshConfig, ici_mesh_shape=..., axis_names={tuple(own.axis_names)})"
    mesh = build(config) if isinstance(config, fdl.Config) else None
    if not isinstance(mesh, MeshConfig):
        raise ConfigError(
            f"{call} returns {shortened(repr(config), 200)}, but expected a config of a "
            f"MeshConfig, or None to choose a mesh automatically. Return {example}."
        )
    if set(mesh.axis_names) != set(own.axis_names):
        raise ConfigError(
            f"{call} returns a mesh with axes {tuple(mesh.axis_names)}, but weights and batches "
            f"are sharded over the axes of mesh(), {tuple(own.axis_names)}. Return {example}; axes "
            "may have size 1."
        )
    filled = _filled(mesh, num_devices)
    if filled is None:
        raise ConfigError(
            f"{call} returns ici_mesh_shape {tuple(mesh.ici_mesh_shape)} and dcn_mesh_shape "
            f"{mesh.dcn_mesh_shape and tuple(mesh.dcn_mesh_shape)}, but expected {num_devices} "
            "devices in total. Compute the shape from num_devices, or return None to choose a mesh "
            "automatically."
        )
    return dataclasses.replace(
        filled, compiler_options=mesh.compiler_options or own.compiler_options
    )


def _fields(mesh: MeshConfig) -> dict[str, Any]:
    """Returns the fields of a mesh that differ from the defaults."""
    values = {field.name: getattr(mesh, field.name) for field in dataclasses.fields(mesh)}
    defaults = {field.name: field.default for field in dataclasses.fields(mesh)}
    return _as_tuples({name: x for name, x in values.items() if x != defaults[name]})


def _as_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
