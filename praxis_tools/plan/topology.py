"""The devices to plan for, by name: a TPU slice, a GPU cluster or simulated devices."""

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

log = logging.getLogger(__name__)

# Shapes by number of torus dims, for error messages. libtpu accepts others, too.
_EXAMPLES = {
    2: "1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16",
    3: "2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4, 4x4x8, 8x8x8, 8x8x16 (multiples of 4 from there)",
}
_TPUS = [name for name, chip in CHIPS.items() if chip.torus_dims]
# Words in the names of slower variants and of partitions of a GPU, which the table lacks.
_LESSER_GPUS = {"mig", "nvl", "pcie"}
_GPUS = [name for name, chip in CHIPS.items() if not chip.torus_dims and name != "cpu"]


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices to plan for.

    Attributes:
      name: the value of --topology, "v5e:16x16".
      chip: what one device can do.
      dims: a TPU slice's torus in chips; for GPUs (nodes, devices of a node); for "cpu:8" (8,).
      num_slices: slices, or nodes of GPUs.
      devices: devices to compile for, which are real only on CPU.
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
        """For each of `dims`, whether links join its ends into a ring."""
        return self.chip.wraps(self.dims)

    @property
    def compiled_for(self) -> str:
        """The platform whose compiler is used; "cpu" for GPUs if JAX's CUDA plugin is missing."""
        platform = self.devices[0].platform
        return "gpu" if platform == "cuda" else platform


def topology_of(name: str, num_slices: int = 1) -> Topology:
    """Returns the devices of a topology.

    Args:
      name: "v5e:16x16" (a TPU slice's torus, in chips), "cpu:8" (simulated devices), or
        "gpu:h100:4x8" (nodes x GPUs of a node).
      num_slices: for TPUs, the number of slices, connected by the data-center network.

    Raises:
      ConfigError: no such chip or shape, or its compiler is not installed.
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
        raise _unknown(name, f"{shape!r} is not a shape")
    dims = tuple(map(int, shape.split("x")))
    if num_slices < 1 or (num_slices > 1 and not chip.torus_dims):
        raise ConfigError(
            f"--num_slices={num_slices}; expected 1 or more, and 1 except for TPUs: the nodes of "
            "GPUs are in the topology's name, as in gpu:h100:4x8."
        )
    if chip.torus_dims:
        return Topology(name, chip, dims, num_slices, _tpus(name, chip, dims, num_slices))
    expected = 1 if kind == "cpu" else 2
    if len(dims) != expected:
        raise _unknown(name, f"{shape!r} has {len(dims)} dims")
    if kind != "cpu" and (actual := _gpus(name, chip, dims)):
        return Topology(name, chip, dims, dims[0], actual)
    devices = simulated_devices(math.prod(dims))
    if kind == "cpu":
        chip = _share_of_this_machine(chip, len(devices))
    return Topology(name, chip, dims, dims[0] if expected == 2 else 1, devices)


def _share_of_this_machine(chip: Chip, count: int) -> Chip:
    """Returns a simulated device, which has its share of this machine's memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return dataclasses.replace(chip, hbm_bytes=memory // count)


def attached_topology(devices: Sequence[jax.Device]) -> Topology | None:
    """Returns the topology of attached devices, or None if the table of chips lacks their kind."""
    kind, platform = devices[0].device_kind.lower(), devices[0].platform
    words = set(re.split(r"[ -]", kind))
    name = "cpu" if platform == "cpu" else TPUS.get(kind) or next(
        (item for item in _GPUS if item in words), None
    )
    if name is None or words & _LESSER_GPUS:
        return None
    chip, count = CHIPS[name], len(devices)
    if name == "cpu":
        chip = _share_of_this_machine(chip, count)
    if chip.torus_dims:
        slices = len({getattr(device, "slice_index", None) for device in devices})
        coords = [device.coords for device in devices]
        dims = tuple(max(at[dim] for at in coords) + 1 for dim in range(chip.torus_dims))
    else:
        slices = len({device.process_index for device in devices})
        dims = (count,)
    shape = "x".join(map(str, dims))
    return Topology(f"{name}:{shape}", chip, dims, slices, devices)


@dataclasses.dataclass(frozen=True)
class PhysicalMesh:
    """Where the devices of a mesh are: in which slice, and where in its torus.

    Devices are numbered in the mesh's row-major order. Groups are arrays [groups, devices] of
    these numbers.

    Attributes:
      axis_sizes: devices along each mesh axis.
      slices: int [devices], the slice or node of each device.
      coords: int [devices, dims], each device's coordinates in its slice's torus; None without one.
      dims: sizes of the torus.
      wraps: for each of `dims`, whether links join its ends.
    """

    axis_sizes: Mapping[str, int]
    slices: np.ndarray
    coords: np.ndarray | None = None
    dims: tuple[int, ...] = ()
    wraps: tuple[bool, ...] = ()

    def crosses(self, groups: np.ndarray | None) -> bool:
        """Returns whether a group has devices in several slices."""
        if groups is None or groups.max(initial=0) >= len(self.slices):
            return False
        slices = self.slices[groups]
        return bool((slices != slices[:, :1]).any())

    def is_ring(self, groups: np.ndarray | None) -> bool:
        """Returns whether links close into a ring through the devices of a group.

        Devices in a plane always form one. Devices along one dim of the torus do if they span it
        and it wraps.
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
        """Returns how many devices of a group are on one chip: 1, or both cores of a TPU7x."""
        coords = self._coords_of_first(groups)
        return 1 if coords is None else len(coords) // len(np.unique(coords, axis=0))

    def _coords_of_first(self, groups: np.ndarray | None) -> np.ndarray | None:
        """Returns the coordinates of the first group's devices, None if they are unknown."""
        if groups is None or self.coords is None or not len(groups):
            return None
        return None if groups.max(initial=0) >= len(self.coords) else self.coords[groups[0]]

    def axes_between_slices(self) -> tuple[str, ...]:
        """Returns the mesh axes along which devices are in different slices."""
        slices = self.slices.reshape(tuple(self.axis_sizes.values()))
        return tuple(
            axis for dim, axis in enumerate(self.axis_sizes) if np.diff(slices, axis=dim).any()
        )


def physical_mesh(
    axis_sizes: Mapping[str, int], devices: Sequence[Any], topology: Topology
) -> PhysicalMesh:
    """Returns where the devices of a mesh are in a topology.

    Args:
      devices: in the mesh's row-major order, with the attributes of a `jax.Device`.
    """
    per_slice = topology.devices_per_slice
    if topology.chip.torus_dims:
        slices = np.array([getattr(device, "slice_index", None) or 0 for device in devices])
        coords = np.array([device.coords for device in devices])
        # Every device has three coordinates, also on chips with two torus dims.
        dims, wraps = (*topology.dims, 1, 1)[:3], (*topology.wraps, False, False)[:3]
        return PhysicalMesh(axis_sizes, slices, coords, dims, wraps)
    index = {device.id: i for i, device in enumerate(topology.devices)}
    slices = np.array([index[device.id] // per_slice for device in devices])
    return PhysicalMesh(axis_sizes, slices)


def _tpus(name: str, chip: Chip, dims: tuple[int, ...], num_slices: int) -> Sequence[jax.Device]:
    if len(dims) != chip.torus_dims:
        raise _unknown(name, f"a {chip.name}'s torus has {chip.torus_dims} dims")
    require_package("libtpu", f"--topology={name}")
    check_environment()
    if message := mismatch():
        log.warning("WARNING: %s", message)
    for setting, value in WITHOUT_TPU.items():
        os.environ.setdefault(setting, value)
    from jax.experimental import topologies

    # Without `wrap` libtpu describes a mesh, which no pod is, and compiles other collectives.
    options: dict[str, Any] = {"wrap": (*chip.wraps(dims), False, False)[:3]}
    if chip.name == "v4":
        options["chip_config_name"] = "megacore"  # A device is a chip, as on v5p.
    if num_slices > 1 or chip.name != "v4":  # v4 does not accept num_slices=1.
        options["num_slices"] = num_slices
    if math.prod(dims) == 1:  # libtpu up to 0.0.42 assumes four chips per host.
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        return topologies.get_topology_desc(
            platform="tpu", topology_name=f"{chip.name}:{'x'.join(map(str, dims))}", **options
        ).devices
    except Exception as error:  # libtpu's message lists the shapes it accepts.
        raise _unknown(name, f"libtpu says: {str(error).splitlines()[0][:200]}") from error


def _gpus(name: str, chip: Chip, dims: tuple[int, ...]) -> Sequence[jax.Device] | None:
    """Returns GPUs to compile for, or None if JAX's CUDA plugin is not installed."""
    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    if chip.cuda is None or not any(map(importlib.util.find_spec, plugins)):
        return None
    from jax.experimental import topologies

    nodes, each = dims
    return topologies.get_topology_desc(
        name, "cuda", target_config=chip.cuda.text(chip.hbm_bandwidth), topology=f"1x{nodes}x{each}"
    ).devices


def _unknown(name: str, why: str) -> ConfigError:
    shapes = "; ".join(
        f"{', '.join(item for item in _TPUS if CHIPS[item].torus_dims == dims)} with {examples}"
        for dims, examples in _EXAMPLES.items()
    )
    return ConfigError(
        f"--topology={name}: {why}. Expected CHIP:SHAPE, such as v5e:16x16. TPUs: {shapes}. "
        f"GPUs: gpu:CHIP:NODESxGPUS with {', '.join(_GPUS)}, such as gpu:h100:4x8. Simulated "
        "devices: cpu:8."
    )
