"""Orders the devices of a mesh by process, interconnect and slice."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.mesh_config import MeshConfig


def devices_per_process(
    config: MeshConfig, devices: Sequence[jax.Device], num_processes: int
) -> list[jax.Device]:
    """Selects equally many simulated devices from each process; each process acts as a slice."""
    expected, num_slices = config.num_devices, math.prod(config.dcn_mesh_shape or (1,))
    if expected % num_processes:
        raise ConfigError(
            f"{config} has {expected} simulated devices, which cannot be split evenly over "
            f"{num_processes} processes. Change mesh.ici_mesh_shape or the number of processes."
        )
    if config.dcn_mesh_shape is not None and num_slices not in (1, num_processes):
        raise ConfigError(
            f"mesh.dcn_mesh_shape {tuple(config.dcn_mesh_shape)} has {num_slices} slices, but "
            f"there are {num_processes} processes, and each process is a slice if devices are "
            f"simulated. Make the product of dcn_mesh_shape {num_processes}, or start {num_slices} "
            "processes."
        )
    by_process: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    each = expected // num_processes
    for process, local in by_process.items():
        if len(local) < each:
            raise ConfigError(
                f"{config} needs {each} devices in each process, but process {process} has "
                f"{len(local)}. Unset JAX_NUM_CPU_DEVICES and XLA_FLAGS, or set them to the same "
                "values in all processes."
            )
    return [device for process in sorted(by_process) for device in by_process[process][:each]]


def torus_grid(config: MeshConfig, devices: Sequence[jax.Device]) -> np.ndarray:
    """Returns a grid of accelerators, ordered by interconnect and slice using `mesh_utils`."""
    split = config.allow_split_physical_axes
    try:
        if config.dcn_mesh_shape is not None and math.prod(config.dcn_mesh_shape) > 1:
            return mesh_utils.create_hybrid_device_mesh(
                tuple(config.ici_mesh_shape),
                tuple(config.dcn_mesh_shape),
                devices,
                process_is_granule=_hosts_are_slices(config, devices),
                allow_split_physical_axes=split,
            )
        return mesh_utils.create_device_mesh(config.shape, devices, allow_split_physical_axes=split)
    except NotImplementedError as error:
        raise ConfigError(
            f"mesh.ici_mesh_shape {tuple(config.ici_mesh_shape)} does not fit the devices' "
            f"interconnect: {str(error).splitlines()[0].split(' The size of')[0]} Make the size of "
            "each axis a product of the interconnect's dims, or set "
            "mesh.allow_split_physical_axes=true."
        ) from error


def _hosts_are_slices(config: MeshConfig, devices: Sequence[jax.Device]) -> bool:
    """Returns whether each host is a slice, as with GPUs; otherwise `slice_index` defines slices.

    Raises:
      ConfigError: The DCN shape matches neither the number of slices nor the number of hosts.
    """
    expected = math.prod(config.dcn_mesh_shape or (1,))
    slices = len({getattr(device, "slice_index", None) for device in devices})
    if expected == slices:
        return False
    hosts = len({device.process_index for device in devices})
    if expected != hosts:
        raise ConfigError(
            f"mesh.dcn_mesh_shape {tuple(config.dcn_mesh_shape or ())} has {expected} slices, but "
            f"the devices are in {slices} slices and {hosts} processes. Make the product of "
            "dcn_mesh_shape one of these numbers."
        )
    return True


def simulated_grid(config: MeshConfig, devices: Sequence[jax.Device]) -> np.ndarray:
    """Returns a grid of simulated devices in the order of a hybrid mesh: slices vary slowest."""
    ici_mesh_shape = tuple(config.ici_mesh_shape)
    dcn_mesh_shape = tuple(config.dcn_mesh_shape or (1,) * len(ici_mesh_shape))
    num_axes = len(ici_mesh_shape)
    grid = np.array(devices).reshape(dcn_mesh_shape + ici_mesh_shape)
    # Each axis of the mesh merges its slices with its devices in a slice.
    interleaved = [dim for axis in range(num_axes) for dim in (axis, num_axes + axis)]
    return grid.transpose(interleaved).reshape(config.shape)
