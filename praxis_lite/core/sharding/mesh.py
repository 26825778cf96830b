"""The devices that there are, and the mesh over them. No other file asks JAX for devices."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.devices.axis_types import AXIS_TYPES, mesh_of
from praxis_lite.core.sharding.devices.device_order import (
    of_each_process,
    simulated_grid,
    torus_grid,
)
from praxis_lite.core.sharding.devices.libtpu import leave_absent_tpus_alone
from praxis_lite.core.sharding.mesh_config import MeshConfig

__all__ = (
    "all_devices", "attached_devices", "attached_mesh", "compiled_platform", "filled_mesh",
    "make_mesh", "simulate_devices", "simulated_devices",
)

MAX_SIMULATED_DEVICES = 256
_SCHEDULER_FLAG = "xla_cpu_enable_concurrency_optimized_scheduler"


def filled_mesh(config: MeshConfig, num_devices: int | None = None) -> MeshConfig:
    """Returns `config` with the size of -1, if any, such that all devices are used.

    Args:
      num_devices: that there are; None: those that JAX shows, attached or simulated.

    Raises:
      ConfigError: the other sizes do not divide the number of devices.
    """
    if -1 not in config.ici_mesh_shape:
        return config
    count = len(all_devices()) if num_devices is None else num_devices
    others = math.prod(size for size in config.ici_mesh_shape if size != -1)
    others *= math.prod(config.dcn_mesh_shape or ())
    if count % others:
        raise ConfigError(
            f"mesh.ici_mesh_shape {tuple(config.ici_mesh_shape)} cannot be filled: its other sizes "
            f"make {others} (slices included), which does not divide {count} devices. Change them."
        )
    shape = tuple(count // others if size == -1 else size for size in config.ici_mesh_shape)
    return dataclasses.replace(config, ici_mesh_shape=shape)


def simulate_devices(num_devices: int, num_processes: int = 1) -> int:
    """Makes JAX's CPU backend show `num_devices` devices; call it before JAX makes an array.

    Each of several processes simulates its part of them, and at most MAX_SIMULATED_DEVICES; a
    larger mesh needs devices that exist. Programs on accelerators see no change. A device count
    that the user has set in the environment (JAX_NUM_CPU_DEVICES or XLA_FLAGS) is kept.

    Returns the number that this process is to simulate, where the user has set none.

    On jax 0.10 and few cores a step with independent collectives may hang, and aborts after 40 s:
    each device starts those that are ready in a different order, and waits in one for peers that
    wait in another. So NPROC enlarges XLA's pool of threads, and XLA must not schedule for
    concurrency: with that scheduler lm.PyDocs hung within 253 steps, without it not in 700.
    """
    # If it does not divide, `make_mesh` reports it: an accelerator may be there.
    leave_absent_tpus_alone()
    num_simulated = min(-(-num_devices // num_processes), MAX_SIMULATED_DEVICES)
    os.environ["NPROC"] = str(max(int(os.environ.get("NPROC", "0")), 4 * num_simulated))
    flags = os.environ.get("XLA_FLAGS", "")
    if _SCHEDULER_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{_SCHEDULER_FLAG}=false".strip()
    if not _is_chosen_by_user():
        # If JAX has made its devices already, as in a notebook, they stay: `make_mesh` reports it.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", num_simulated)
    return num_simulated


def all_devices() -> list[jax.Device]:
    """Returns the devices that JAX shows, attached or simulated, of all processes."""
    leave_absent_tpus_alone()
    return jax.devices()


def simulated_devices(count: int) -> list[jax.Device]:
    """Returns `count` simulated CPU devices, or as many as JAX makes, even next to accelerators."""
    simulate_devices(count)
    return jax.devices("cpu")[:count]


def _is_chosen_by_user() -> bool:
    """Returns True if the environment sets the number of simulated CPU devices."""
    return "JAX_NUM_CPU_DEVICES" in os.environ or (
        "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    )


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh of `config`, over `devices` or all devices there are.

    On CPU, where devices are simulated, they are taken in order; on accelerators `mesh_utils`
    orders them by their interconnect (and slices by the DCN shape).

    Raises:
      ConfigError: there are too few devices, or accelerators are left over without
        `allow_unused_devices`.
    """
    devices = list(all_devices() if devices is None else devices)
    wanted, platform = config.num_devices, devices[0].platform
    if wanted > len(devices):
        limit = f", of which at most {MAX_SIMULATED_DEVICES} are simulated"
        if _is_chosen_by_user():
            more = " For more, unset JAX_NUM_CPU_DEVICES and XLA_FLAGS, which fix their number."
        elif platform == "cpu" and wanted <= MAX_SIMULATED_DEVICES:
            more = (
                f" For more, call simulate_devices({wanted}), or train, before JAX makes its first "
                "array: restart Python, in a notebook the kernel, and do that first."
            )
        else:
            more = ""
        raise ConfigError(
            f"{config} needs {wanted} devices, but there are {len(devices)} "
            f"({platform}{limit if platform == 'cpu' else ''}). Change mesh.ici_mesh_shape (or "
            f"mesh.dcn_mesh_shape) so that its product is at most that.{more}"
        )
    if wanted < len(devices) and platform != "cpu" and not config.allow_unused_devices:
        raise ConfigError(
            f"{config} uses {wanted} of {len(devices)} {platform} devices; the others would idle. "
            "Enlarge mesh.ici_mesh_shape, or say mesh.allow_unused_devices=true."
        )
    num_processes = len({device.process_index for device in devices})
    if platform == "cpu" and num_processes > 1:
        devices = of_each_process(config, devices, num_processes)
    else:
        devices = devices[:wanted]
    lay_out = simulated_grid if platform == "cpu" else torus_grid
    grid = lay_out(config, devices)
    if len({device.process_index for device in devices}) < num_processes:
        raise ConfigError(
            f"{config} has no device of some of the {num_processes} processes. Enlarge "
            "mesh.ici_mesh_shape, or start fewer."
        )
    return mesh_of(grid, config.axis_names, [AXIS_TYPES[x] for x in config.axis_type_words])


def attached_devices() -> tuple[int, str]:
    """Returns how many devices there are, attached or simulated, and their platform."""
    devices = all_devices()
    return len(devices), devices[0].platform


def attached_mesh(config: MeshConfig) -> MeshConfig:
    """Returns a mesh with the axes of `config` over all accelerators attached, or a CPU.

    It is `config` itself if it has as many devices. Else all devices are along its longest axis,
    the first of equals, so that what it splits over that axis stays split.
    """
    devices = all_devices()
    count = len(devices) if devices[0].platform != "cpu" else 1
    config = filled_mesh(config, count)
    if config.num_devices == count:
        return config
    longest = config.shape.index(max(config.shape))
    shape = tuple(count if axis == longest else 1 for axis in range(len(config.shape)))
    return dataclasses.replace(config, ici_mesh_shape=shape, dcn_mesh_shape=None)


def compiled_platform() -> str:
    """Returns the platform that is compiled for: of the mesh set, which need not be attached."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return jax.default_backend() if device is None else device.platform
