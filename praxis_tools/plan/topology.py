"""Topologies to plan for: TPU slices, GPU clusters and simulated devices."""

import dataclasses
import importlib.util
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.devices.libtpu import WITHOUT_TPU, mismatch
from praxis_lite.core.sharding.devices.xla_options import check_environment
from praxis_lite.core.sharding.mesh import simulated_devices
from praxis_lite.core.sharding.mesh_config import TPUS
from praxis_lite.host.optional_packages import require_package
from praxis_tools.plan.chips import CHIPS, Chip

_log = logging.getLogger(__name__)

# Example shapes for error messages, keyed by the number of torus dims. libtpu accepts more shapes.
_EXAMPLES = {
    2: "1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16",
    3: "2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4, 4x4x8, 8x8x8, 8x8x16 (larger dims: multiples of 4)",
}
_TPUS = [name for name, chip in CHIPS.items() if chip.torus_dims]
# Device kinds with these words are slower variants or partitions of a GPU, absent from `CHIPS`.
_LESSER_GPUS = {"mig", "nvl", "pcie"}
_GPUS = [name for name, chip in CHIPS.items() if not chip.torus_dims and name != "cpu"]


@dataclasses.dataclass(frozen=True)
class Topology:
    """A set of devices to plan for.

    Attributes:
      name: Value of --topology, such as "v5e:16x16".
      chip: Peak rates and memory of each device.
      dims: Torus dims of a TPU slice in chips; (nodes, GPUs per node) for GPUs; (8,) for "cpu:8".
      num_slices: Number of TPU slices or GPU nodes.
      devices: Devices to compile for. Except on CPU, they only describe hardware and cannot run
        programs.
    """

    name: str
    chip: Chip
    dims: tuple[int, ...]
    num_slices: int
    devices: Sequence[jax.Device]

    @property
    def devices_per_slice(self) -> int:
        return len(self.devices) // self.num_slices

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Whether each of `dims` has wraparound links."""
        return self.chip.wraps(self.dims)

    @property
    def compiled_for(self) -> str:
        """Platform to compile for; "cpu" for GPUs if JAX's CUDA plugin is not installed."""
        platform = self.devices[0].platform
        return "gpu" if platform == "cuda" else platform


def topology_of(name: str, num_slices: int = 1) -> Topology:
    """Returns the topology with the given name.

    Args:
      name: "v5e:16x16" (the torus of a TPU slice, in chips), "gpu:h100:4x8" (nodes x GPUs per
        node), or "cpu:8" (simulated devices).
      num_slices: Number of TPU slices, connected by the data-center network.

    Raises:
      ConfigError: The chip or the shape is unknown, or the compiler is not installed.
    """
    kind, _, shape = name.partition(":")
    if kind == "gpu":
        kind, _, shape = shape.partition(":")
        if kind not in _GPUS:
            raise _unknown(name, f"{kind!r} is not a known GPU")
    elif kind not in (*_TPUS, "cpu"):
        raise _unknown(name, f"{kind!r} is not a known TPU")
    chip = CHIPS[kind]
    if re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4})*", shape) is None:
        raise _unknown(name, f"{shape!r} is not a valid shape")
    dims = tuple(map(int, shape.split("x")))
    if num_slices < 1 or (num_slices > 1 and not chip.torus_dims):
        raise ConfigError(
            f"--num_slices={num_slices} with --topology={name}: expected at least 1, and exactly 1 "
            "unless the topology is a TPU. For GPUs, the number of nodes is part of the topology, "
            "as in gpu:h100:4x8."
        )
    if chip.torus_dims:
        return Topology(name, chip, dims, num_slices, _tpus(name, chip, dims, num_slices))
    expected_dims = 1 if kind == "cpu" else 2
    if len(dims) != expected_dims:
        raise _unknown(name, f"{shape!r} has {len(dims)} dims, expected {expected_dims}")
    # Without JAX's CUDA plugin, the step is compiled for simulated devices.
    if kind != "cpu" and (gpus := _gpus(name, chip, dims)):
        return Topology(name, chip, dims, dims[0], gpus)
    devices = simulated_devices(math.prod(dims))
    if kind == "cpu":
        chip = _with_share_of_host_memory(chip, len(devices))
    return Topology(name, chip, dims, dims[0] if expected_dims == 2 else 1, devices)


def _with_share_of_host_memory(chip: Chip, num_devices: int) -> Chip:
    """Returns a simulated chip with an equal share of this machine's memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return dataclasses.replace(chip, hbm_bytes=memory // num_devices)


def attached_topology(devices: Sequence[jax.Device]) -> Topology | None:
    """Returns the topology of attached devices, or None if their kind is not in `CHIPS`."""
    kind, platform = devices[0].device_kind.lower(), devices[0].platform
    words = set(re.split(r"[ -]", kind))
    name = (
        "cpu"
        if platform == "cpu"
        else TPUS.get(kind) or next((gpu for gpu in _GPUS if gpu in words), None)
    )
    if name is None or words & _LESSER_GPUS:
        return None
    chip, num_devices = CHIPS[name], len(devices)
    if name == "cpu":
        chip = _with_share_of_host_memory(chip, num_devices)
    if chip.torus_dims:
        num_slices = len({getattr(device, "slice_index", None) for device in devices})
        dims = tuple(
            max(device.coords[dim] for device in devices) + 1 for dim in range(chip.torus_dims)
        )
    else:
        # Without a torus, each process (a node) counts as a slice.
        num_slices = len({device.process_index for device in devices})
        dims = (num_devices,)
    shape = "x".join(map(str, dims))
    return Topology(f"{name}:{shape}", chip, dims, num_slices, devices)


@dataclasses.dataclass(frozen=True)
class PhysicalMesh:
    """The slice and torus coordinates of each device in a mesh.

    Devices are numbered in the mesh's row-major order. Replica groups are int arrays
    [groups, devices] of device numbers.

    Attributes:
      axis_sizes: Number of devices along each mesh axis.
      slices: Slice or node of each device, an int array [devices].
      coords: Coordinates of each device in the torus of its slice, an int array [devices, dims];
        None without a torus.
      dims: Size of each torus dim.
      wraps: Whether each of `dims` has wraparound links.
    """

    axis_sizes: Mapping[str, int]
    slices: np.ndarray
    coords: np.ndarray | None = None
    dims: tuple[int, ...] = ()
    wraps: tuple[bool, ...] = ()

    def crosses(self, groups: np.ndarray | None) -> bool:
        """Returns whether any group spans several slices."""
        if groups is None or groups.max(initial=0) >= len(self.slices):
            return False
        slices = self.slices[groups]
        return bool((slices != slices[:, :1]).any())

    def is_ring(self, groups: np.ndarray | None) -> bool:
        """Returns whether links connect the devices of a group in a ring.

        Devices in a plane always form a ring. Devices along a single torus dim form a ring if they
        span the dim and the dim has wraparound links.
        """
        coords = self._coords_of_first(groups)
        if coords is None:
            return True
        varying = [dim for dim in range(coords.shape[1]) if len(set(coords[:, dim])) > 1]
        if len(varying) != 1:
            return True
        (dim,) = varying
        return len(set(coords[:, dim])) == self.dims[dim] and self.wraps[dim]

    def devices_per_chip(self, groups: np.ndarray | None) -> int:
        """Returns how many devices of a group share a chip (2 for both cores of a TPU7x)."""
        coords = self._coords_of_first(groups)
        return 1 if coords is None else len(coords) // len(np.unique(coords, axis=0))

    def _coords_of_first(self, groups: np.ndarray | None) -> np.ndarray | None:
        """Returns the coordinates of the devices in the first group, or None if unknown."""
        if groups is None or self.coords is None or not len(groups):
            return None
        return None if groups.max(initial=0) >= len(self.coords) else self.coords[groups[0]]

    def axes_between_slices(self) -> tuple[str, ...]:
        """Returns the mesh axes that span several slices."""
        slices = self.slices.reshape(tuple(self.axis_sizes.values()))
        return tuple(
            axis for dim, axis in enumerate(self.axis_sizes) if np.diff(slices, axis=dim).any()
        )


def physical_mesh(
    axis_sizes: Mapping[str, int], devices: Sequence[Any], topology: Topology
) -> PhysicalMesh:
    """Returns the slice and torus coordinates of each device in a mesh.

    Args:
      axis_sizes: Number of devices along each mesh axis.
      devices: The mesh's devices in row-major order.
      topology: Topology that contains the devices.
    """
    per_slice = topology.devices_per_slice
    if topology.chip.torus_dims:
        slices = np.array([getattr(device, "slice_index", None) or 0 for device in devices])
        coords = np.array([device.coords for device in devices])
        # Devices have three coordinates even if the torus has two dims.
        dims, wraps = (*topology.dims, 1, 1)[:3], (*topology.wraps, False, False)[:3]
        return PhysicalMesh(axis_sizes, slices, coords, dims, wraps)
    index = {device.id: i for i, device in enumerate(topology.devices)}
    slices = np.array([index[device.id] // per_slice for device in devices])
    return PhysicalMesh(axis_sizes, slices)


def _tpus(name: str, chip: Chip, dims: tuple[int, ...], num_slices: int) -> Sequence[jax.Device]:
    if len(dims) != chip.torus_dims:
        raise _unknown(
            name,
            f"the shape has {len(dims)} dims, but the torus of {chip.name} has "
            f"{chip.torus_dims} dims",
        )
    require_package("libtpu", f"--topology={name}")
    check_environment()
    if message := mismatch():
        _log.warning("%s", message)
    for setting, value in WITHOUT_TPU.items():
        os.environ.setdefault(setting, value)
    from jax.experimental import topologies

    # Without `wrap`, libtpu assumes that there are no wraparound links, and compiles different
    # collectives than for a pod.
    options: dict[str, Any] = {"wrap": (*chip.wraps(dims), False, False)[:3]}
    if chip.name == "v4":
        options["chip_config_name"] = "megacore"  # One device per chip, as on v5p.
    if num_slices > 1 or chip.name != "v4":  # v4 does not accept num_slices=1.
        options["num_slices"] = num_slices
    if math.prod(dims) == 1:  # libtpu up to 0.0.42 assumes four chips per host.
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        return topologies.get_topology_desc(
            platform="tpu", topology_name=f"{chip.name}:{'x'.join(map(str, dims))}", **options
        ).devices
    except Exception as error:  # libtpu's message lists the accepted shapes.
        message = str(error).splitlines()[0][:200]
        raise _unknown(name, f"libtpu does not accept it ({message})") from error


def _gpus(name: str, chip: Chip, dims: tuple[int, ...]) -> Sequence[jax.Device] | None:
    """Returns GPU devices to compile for, or None if JAX's CUDA plugin is not installed."""
    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    if chip.cuda is None or not any(map(importlib.util.find_spec, plugins)):
        return None
    from jax.experimental import topologies

    num_nodes, gpus_per_node = dims
    return topologies.get_topology_desc(
        name,
        "cuda",
        target_config=chip.cuda.text(chip.hbm_bandwidth),
        topology=f"1x{num_nodes}x{gpus_per_node}",
    ).devices


def _unknown(name: str, reason: str) -> ConfigError:
    shapes = "; ".join(
        f"{', '.join(tpu for tpu in _TPUS if CHIPS[tpu].torus_dims == dims)} with {examples}"
        for dims, examples in _EXAMPLES.items()
    )
    return ConfigError(
        f"--topology={name}: {reason}. Expected CHIP:SHAPE, such as v5e:16x16. TPUs: {shapes}. "
        f"GPUs: gpu:CHIP:NODESxGPUS with {', '.join(_GPUS)}, such as gpu:h100:4x8. Simulated "
        "devices: cpu:8."
    )
