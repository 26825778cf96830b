"""The mesh of an elastic job for the devices that it has now."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import fiddle as fdl
import jax

from praxis_lite.config.build import build
from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.core.sharding.mesh import all_devices, filled_mesh, simulate_devices
from praxis_lite.core.sharding.mesh_config import MeshConfig
from praxis_lite.experiment.experiment import Job
from praxis_lite.experiment.launched_config import LaunchedConfig
from praxis_lite.host.host_memory import check_room_for_devices
from praxis_lite.job import processes
from praxis_lite.job.processes.broadcast import from_first
from praxis_lite.job.processes.membership import Membership
from praxis_lite.job.processes.same_everywhere import check_same

# Returns the mesh of a job for devices of another number than its own mesh has.
MeshChooser = Callable[[Job, Sequence[jax.Device]], MeshConfig]


def on_devices_of(
    part: Membership, job: Job, launched: LaunchedConfig, choose: MeshChooser
) -> Job:
    """Returns a job on a mesh of all devices that the processes of its generation have.

    The job's own mesh stays if it has as many. Else it is what the experiment's `mesh_for` returns,
    or by default what `choose` returns on the first process. The config gets the same mesh.

    Raises:
      ConfigError: `mesh_for` returns something else than a mesh of these devices with the job's
        axes, or not the same on all processes; or as `choose`.
    """
    sizes = (*job.mesh.ici_mesh_shape, *(job.mesh.dcn_mesh_shape or ()))
    num_each = math.ceil(abs(math.prod(sizes)) / part.num_slots)  # -1 counts as 1.
    check_room_for_devices(simulate_devices(num_each * len(part.members), processes.count()))
    devices = all_devices()
    if _filled(job.mesh, len(devices)) is not None:
        return job
    config = launched.mesh_for and launched.mesh_for(len(devices))
    if config is None:
        told = from_first("the mesh is chosen", lambda: _fields(choose(job, devices)))
        mesh = dataclasses.replace(job.mesh, **_as_tuples(told))
    else:
        mesh = _given(config, job.mesh, len(devices), f"{launched.experiment}.mesh_for")
        check_same("What mesh_for returns differs", {"mesh": _fields(mesh)})
    launched.config.mesh = fdl.Config(MeshConfig, **_fields(mesh))
    return dataclasses.replace(job, mesh=mesh)


def _filled(mesh: MeshConfig, num_devices: int) -> MeshConfig | None:
    """Returns a mesh with -1 replaced by a size, or None if it does not have so many devices."""
    try:
        mesh = filled_mesh(mesh, num_devices)
    except ConfigError:  # The other sizes do not divide it.
        return None
    return mesh if mesh.num_devices == num_devices else None


def _given(config: Any, own: MeshConfig, num_devices: int, method: str) -> MeshConfig:
    """Returns the mesh of an experiment's `mesh_for`, by default with `own`'s compiler options.

    Args:
      own: the mesh of the experiment.
      method: the name of `mesh_for`, for the errors.
    """
    call = f"{method}({num_devices})"
    example = f"fdl.Config(MeshConfig, ici_mesh_shape=..., axis_names={tuple(own.axis_names)})"
    mesh = build(config) if isinstance(config, fdl.Config) else None
    if not isinstance(mesh, MeshConfig):
        raise ConfigError(
            f"{call} returns {shown(repr(config), 200)}; expected the config of a MeshConfig, or "
            f"None for the plan's choice. Return {example}."
        )
    if set(mesh.axis_names) != set(own.axis_names):
        raise ConfigError(
            f"{call} returns a mesh of the axes {tuple(mesh.axis_names)}, but splits of weights "
            f"and batches name those of mesh(), {tuple(own.axis_names)}. Return {example}; an axis "
            "may have the size 1."
        )
    filled = _filled(mesh, num_devices)
    if filled is None:
        raise ConfigError(
            f"{call} returns ici_mesh_shape {tuple(mesh.ici_mesh_shape)} and dcn_mesh_shape "
            f"{mesh.dcn_mesh_shape and tuple(mesh.dcn_mesh_shape)}; expected {num_devices} "
            "devices in all. Compute the shape from num_devices, or return None for the plan's "
            "choice."
        )
    return dataclasses.replace(
        filled, compiler_options=mesh.compiler_options or own.compiler_options
    )


def _fields(mesh: MeshConfig) -> dict[str, Any]:
    """Returns the fields of a mesh that differ from the defaults."""
    values = {item.name: (getattr(mesh, item.name), item.default) for item in
              dataclasses.fields(mesh)}
    return _as_tuples({name: x for name, (x, default) in values.items() if x != default})


def _as_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
