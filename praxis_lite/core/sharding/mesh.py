"""Creates meshes from the available devices. Only this file queries JAX for devices."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.devices.axis_types import AXIS_TYPES, mesh_of
from praxis_lite.core.sharding.devices.device_order import (
    devices_per_process,
    simulated_grid,
    torus_grid,
)
from praxis_lite.core.sharding.devices.libtpu import avoid_loading_libtpu
from praxis_lite.core.sharding.mesh_config import MeshConfig

__all__ = (
    "all_devices",
    "attached_devices",
    "attached_mesh",
    "compiled_platform",
    "filled_mesh",
    "make_mesh",
    "simulate_devices",
    "simulated_devices",
)

MAX_SIMULATED_DEVICES = 256
_NUM_DEVICES = "jax_num_cpu_devices"
_SCHEDULER_FLAG = "xla_cpu_enable_concurrency_optimized_scheduler"


def filled_mesh(config: MeshConfig, num_devices: int | None = None) -> MeshConfig:
    """Replaces a size of -1 in a config so that the mesh uses all devices.

    Args:
      config: A mesh config. If it contains no -1, it is returned unchanged.
      num_devices: Number of devices. If None, all JAX devices, attached or simulated.

    Raises:
      ConfigError: The number of devices is not divisible by the product of the other sizes.
    """
    if -1 not in config.ici_mesh_shape:
        return config
    count = len(all_devices()) if num_devices is None else num_devices
    others = math.prod(size for size in config.ici_mesh_shape if size != -1)
    others *= math.prod(config.dcn_mesh_shape or ())
    if count % others:
        raise ConfigError(
            f"mesh.ici_mesh_shape {tuple(config.ici_mesh_shape)}: {count} devices are not "
            f"divisible by {others}, the product of the other sizes and the number of slices. "
            "Change the sizes."
        )
    shape = tuple(count // others if size == -1 else size for size in config.ici_mesh_shape)
    return dataclasses.replace(config, ici_mesh_shape=shape)


def simulate_devices(num_devices: int, num_processes: int = 1) -> int:
    """Simulates devices on JAX's CPU backend; call it before JAX creates an array.

    After several calls, there are as many devices as in the largest. Each process simulates its
    share, at most MAX_SIMULATED_DEVICES; larger meshes need real devices. Computations on
    accelerators are not affected. If the user sets the device count in the environment
    (JAX_NUM_CPU_DEVICES or XLA_FLAGS), that count is used.

    With jax 0.10 and few cores, a step with independent collectives may hang and abort after 40 s:
    devices start collectives in different orders, and each waits for the others to join. To avoid
    this, NPROC enlarges XLA's thread pool, and XLA's concurrency-optimized scheduler is disabled.
    With that scheduler, lm.PyDocs hung within 253 steps; without it, 700 steps completed.

    Args:
      num_devices: Total number of devices in all processes.
      num_processes: Number of processes that share the devices.

    Returns:
      The number of devices that this process simulates, unless the user has set a different number.
    """
    # `make_mesh` reports uneven splits over processes, because there may be accelerators.
    avoid_loading_libtpu()
    num_simulated = min(-(-num_devices // num_processes), MAX_SIMULATED_DEVICES)
    os.environ["NPROC"] = str(max(int(os.environ.get("NPROC", "0")), 4 * num_simulated))
    flags = os.environ.get("XLA_FLAGS", "")
    if _SCHEDULER_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{_SCHEDULER_FLAG}=false".strip()
    if not _is_chosen_by_user():
        # JAX cannot change devices that exist already, as in a notebook; `make_mesh` reports this.
        with contextlib.suppress(RuntimeError):
            num_before = getattr(jax.config, _NUM_DEVICES)
            jax.config.update(_NUM_DEVICES, max(num_simulated, num_before))
    return num_simulated


def all_devices() -> list[jax.Device]:
    """Returns the devices of all processes, attached or simulated."""
    avoid_loading_libtpu()
    return jax.devices()


def simulated_devices(count: int) -> list[jax.Device]:
    """Returns up to `count` simulated CPU devices, even if accelerators are attached."""
    simulate_devices(count)
    return jax.devices("cpu")[:count]


def _is_chosen_by_user() -> bool:
    """Returns whether the environment sets the number of simulated CPU devices."""
    return "JAX_NUM_CPU_DEVICES" in os.environ or (
        "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    )


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns a mesh with the axes in `config`, by default over all devices.

    Simulated CPU devices are used in order. On accelerators, `mesh_utils` orders devices by their
    interconnect, and slices by the DCN shape.

    Args:
      config: Axes and sizes of the mesh.
      devices: The `jax.Device`s to use, or None for all devices.

    Raises:
      ConfigError: There are too few devices, or accelerators would be unused without
        `allow_unused_devices`.
    """
    devices = list(all_devices() if devices is None else devices)
    num_needed, platform = config.num_devices, devices[0].platform
    if num_needed > len(devices):
        limit = f"; at most {MAX_SIMULATED_DEVICES} can be simulated"
        if _is_chosen_by_user():
            more = " To simulate more, unset JAX_NUM_CPU_DEVICES and XLA_FLAGS."
        elif platform == "cpu" and num_needed <= MAX_SIMULATED_DEVICES:
            more = (
                " To simulate more, restart Python (or the notebook's kernel), and call "
                f"simulate_devices({num_needed}) or train before JAX creates an array."
            )
        else:
            more = ""
        raise ConfigError(
            f"{config} needs {num_needed} devices, but there are {len(devices)} "
            f"({platform}{limit if platform == 'cpu' else ''}). Reduce the sizes in "
            f"mesh.ici_mesh_shape or mesh.dcn_mesh_shape.{more}"
        )
    if num_needed < len(devices) and platform != "cpu" and not config.allow_unused_devices:
        raise ConfigError(
            f"{config} uses {num_needed} of {len(devices)} {platform} devices; the others would be "
            "idle. Enlarge mesh.ici_mesh_shape, or set mesh.allow_unused_devices=true."
        )
    # With simulated devices, each process contributes the same number of devices.
    num_processes = len({device.process_index for device in devices})
    if platform == "cpu" and num_processes > 1:
        devices = devices_per_process(config, devices, num_processes)
    else:
        devices = devices[:num_needed]
    make_grid = simulated_grid if platform == "cpu" else torus_grid
    grid = make_grid(config, devices)
    if len({device.process_index for device in devices}) < num_processes:
        raise ConfigError(
            f"{config} does not include devices of all {num_processes} processes. Enlarge "
            "mesh.ici_mesh_shape, or start fewer processes."
        )
    return mesh_of(grid, config.axis_names, [AXIS_TYPES[name] for name in config.axis_type_names])


def attached_devices() -> tuple[int, str]:
    """Returns the number of devices, attached or simulated, and their platform."""
    devices = all_devices()
    return len(devices), devices[0].platform


def attached_mesh(config: MeshConfig) -> MeshConfig:
    """Adapts `config` to all attached accelerators, or to one CPU device if there are none.

    If the number of devices already matches, `config` is returned unchanged. Otherwise all devices
    are placed along the longest axis (the first one if several are equally long), so that dims that
    are split over this axis stay split.
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
    """Returns the platform of the current mesh, or JAX's default platform if no mesh is set."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return jax.default_backend() if device is None else device.platform
