"""The order of devices in a mesh: by process, by their interconnect, slice by slice."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.mesh_config import MeshConfig


def of_each_process(
    config: MeshConfig, devices: Sequence[jax.Device], num_processes: int
) -> list[jax.Device]:
    """Returns as many simulated devices of each process; they are the slices, if there are any."""
    expected, num_slices = config.num_devices, math.prod(config.dcn_mesh_shape or (1,))
    if expected % num_processes:
        raise ConfigError(
            f"{config} of {expected} simulated devices cannot be divided among {num_processes} "
            "processes. Change mesh.ici_mesh_shape, or the number of processes."
        )
    if config.dcn_mesh_shape is not None and num_slices not in (1, num_processes):
        raise ConfigError(
            f"mesh.dcn_mesh_shape {tuple(config.dcn_mesh_shape)} lays {num_slices} slices, but "
            f"there are {num_processes} processes, and of simulated devices each process is a "
            f"slice. Make its product {num_processes}, or start {num_slices} processes."
        )
    held: dict[int, list[jax.Device]] = {}
    for device in devices:
        held.setdefault(device.process_index, []).append(device)
    each = expected // num_processes
    for process, local in held.items():
        if len(local) < each:
            raise ConfigError(
                f"{config} needs {each} devices of each process, but process {process} has "
                f"{len(local)}. Unset JAX_NUM_CPU_DEVICES and XLA_FLAGS there, or set them alike."
            )
    return [device for process in sorted(held) for device in held[process][:each]]


def torus_grid(config: MeshConfig, devices: Sequence[jax.Device]) -> np.ndarray:
    """Returns the devices in the order that suits their interconnect, slice by slice."""
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
            f"interconnect: {str(error).splitlines()[0].split(' The size of')[0]} Make each axis a "
            "product of the interconnect's dims, or say mesh.allow_split_physical_axes=true."
        ) from error


def _hosts_are_slices(config: MeshConfig, devices: Sequence[jax.Device]) -> bool:
    """Returns True if a host is a slice, as with GPUs; False if the devices name their slice.

    Raises:
      ConfigError: the DCN shape has another number of slices than there are of either.
    """
    expected = math.prod(config.dcn_mesh_shape or (1,))
    slices = len({getattr(device, "slice_index", None) for device in devices})
    if expected == slices:
        return False
    hosts = len({device.process_index for device in devices})
    if expected != hosts:
        raise ConfigError(
            f"mesh.dcn_mesh_shape {tuple(config.dcn_mesh_shape or ())} lays {expected} slices, but "
            f"the devices are in {slices} slices and {hosts} processes. Make its product one of "
            "these."
        )
    return True


def simulated_grid(config: MeshConfig, devices: Sequence[jax.Device]) -> np.ndarray:
    """Returns the devices as mesh_utils' hybrid mesh lays them: slices outermost on each axis."""
    ici_mesh_shape = tuple(config.ici_mesh_shape)
    dcn_mesh_shape = tuple(config.dcn_mesh_shape or (1,) * len(ici_mesh_shape))
    num_axes = len(ici_mesh_shape)
    grid = np.array(devices).reshape(dcn_mesh_shape + ici_mesh_shape)
    interleaved = [dim for axis in range(num_axes) for dim in (axis, num_axes + axis)]
    return grid.transpose(interleaved).reshape(config.shape)
