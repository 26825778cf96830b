"""Cost model for collectives, based on the bytes sent, the links in use and the hops."""

import dataclasses
import re

import numpy as np

from praxis_tools.explain import hlo
from praxis_tools.explain.hlo_groups import axes_of_groups, device_groups
from praxis_tools.explain.hlo_text import Computation, Instruction, Program, arrays_of
from praxis_tools.plan.chips import Chip
from praxis_tools.plan.costs import Efficiencies, bytes_of
from praxis_tools.plan.topology import PhysicalMesh

# In these collectives, all devices on a chip receive the same result or add to the same sum, so the
# data crosses each of the chip's links only once.
_SHARED_BY_CHIP = ("all-gather", "all-reduce", "reduce-scatter")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveSpec:
    """The properties of a collective that determine its cost.

    Attributes:
      kind: One of `hlo.KINDS`.
      operand_bytes: Bytes of the operands on one device.
      group_size: Number of devices in each replica group.
      axes: Mesh axes along which the collective runs.
      num_links: Number of links that carry data at the same time, counting each direction
        separately.
      devices_per_chip: Number of devices in a group that share a chip and its links.
      is_ring: Whether the links form rings. If the links form lines, half of the links are idle.
      crosses: Whether the collective leaves its slice (TPU) or node (GPU).
    """

    kind: str
    operand_bytes: int
    group_size: int
    axes: tuple[str, ...] = ()
    num_links: int = 2
    devices_per_chip: int = 1
    is_ring: bool = True
    crosses: bool = False

    @property
    def sent_bytes(self) -> float:
        """Bytes that each device sends, assuming a ring algorithm."""
        others = self.group_size - 1
        if self.kind == "all-gather":
            return self.operand_bytes * others
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.operand_bytes
        # An all-reduce is a reduce-scatter followed by an all-gather.
        passes = 2 if self.kind == "all-reduce" else 1
        return self.operand_bytes * others / self.group_size * passes

    @property
    def result_bytes(self) -> int:
        """Size of the result on one device, in bytes."""
        if self.kind == "all-gather":
            return self.operand_bytes * self.group_size
        if self.kind == "reduce-scatter":
            return self.operand_bytes // self.group_size
        return self.operand_bytes


def collective_seconds(spec: CollectiveSpec, chip: Chip, efficiencies: Efficiencies) -> float:
    """Returns a collective's time on idle links in seconds: bytes / bandwidth + latency per hop."""
    if spec.group_size <= 1 and spec.kind != "collective-permute":
        return 0.0
    if spec.crosses:
        efficiency = efficiencies.network if chip.torus_dims else efficiencies.nodes
        bandwidth = chip.network_bandwidth * efficiency
        return spec.sent_bytes / bandwidth + efficiencies.network_seconds
    if not chip.torus_dims:  # NVLink connects every pair of devices directly.
        bandwidth = chip.link_bandwidth * efficiencies.link
        return spec.sent_bytes / bandwidth + 2 * efficiencies.hop_seconds
    num_links = spec.num_links if spec.is_ring else max(1, spec.num_links // 2)
    num_hops = 1 if spec.kind == "collective-permute" else spec.group_size / 2
    num_sharing = spec.devices_per_chip if spec.kind in _SHARED_BY_CHIP else 1
    bandwidth = num_links * num_sharing * chip.link_bandwidth * efficiencies.link
    return spec.sent_bytes / bandwidth + num_hops * efficiencies.hop_seconds


def is_slice_transfer(instruction: Instruction) -> bool:
    """Returns whether an instruction is a TPU's `send` to another slice."""
    return instruction.opcode == "send" and "_xla_megascale_transfer_type" in instruction.attributes


def collective_spec(
    instruction: Instruction,
    computation: Computation,
    program: Program,
    chip: Chip,
    mesh: PhysicalMesh,
    *,
    in_fusion: bool,
    both_links: bool,
) -> CollectiveSpec:
    """Returns the spec of a collective, given its HLO instruction.

    Args:
      instruction: The collective, or the `send` instruction of a transfer between slices.
      computation: Computation that contains the instruction.
      program: Program that contains the computation.
      chip: Chip for which the program was compiled.
      mesh: Positions of the devices in the topology.
      in_fusion: Whether `computation` is the body of a fusion.
      both_links: Whether a collective-permute uses the links in both directions.

    Returns:
      The spec, with bytes per device.
    """
    groups = device_groups(instruction.attributes, program)
    if instruction.opcode == "send":
        # For a collective over several slices, the text shows only the transfer between slices.
        operand_bytes = sum(array.bytes for array in arrays_of(instruction.shape)[:1])
        match = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
        kind = match.group(1).lower().replace("_", "-") if match else ""
        kind = kind if kind in hlo.KINDS else "collective-permute"
        axes, crosses = mesh.axes_between_slices(), True
    else:
        operand_bytes = sum(
            bytes_of(computation[name].shape)
            for name in instruction.operands
            if name in computation
        )
        kind = instruction.opcode.removesuffix("-start")
        # XLA writes a fused reduce-scatter as an all-reduce followed by a dynamic-slice.
        has_slice = any(other.opcode == "dynamic-slice" for other in computation.values())
        if kind == "all-reduce" and in_fusion and has_slice:
            kind = "reduce-scatter"
        axes = axes_of_groups(groups, mesh.axis_sizes) if groups is not None else ()
        crosses = mesh.crosses(groups)
    num_links, is_ring = _links(instruction, kind, groups, chip, mesh, both_links)
    return CollectiveSpec(
        kind=kind,
        axes=axes,
        operand_bytes=operand_bytes,
        group_size=groups.shape[1] if groups is not None else int(mesh.slices.max()) + 1,
        num_links=num_links,
        is_ring=is_ring,
        devices_per_chip=mesh.devices_per_chip(groups),
        crosses=crosses,
    )


def _links(
    instruction: Instruction,
    kind: str,
    groups: np.ndarray | None,
    chip: Chip,
    mesh: PhysicalMesh,
    both_links: bool,
) -> tuple[int, bool]:
    """Returns the number of links that a collective uses at once, and whether they form rings."""
    if not chip.torus_dims:
        return 1, True
    if kind == "collective-permute":
        return (2 if both_links else 1), True
    attributes = instruction.attributes
    if colors := re.search(r"UniDirection\w*\{colors:(\d+)", attributes):
        return int(colors.group(1)), True
    if rings := attributes.count('"phase_rings":'):
        # For a SparseCore, one ring is listed per direction. "_MESH" marks a dim without wraparound
        # links.
        return rings, "_MESH" not in attributes
    num_dims = _num_torus_dims(attributes)
    return 2 * num_dims, num_dims > 1 or mesh.is_ring(groups)


def _num_torus_dims(attributes: str) -> int:
    """Returns the number of torus dims over which libtpu spreads a collective.

    The attributes name either an emitter, such as `"emitter":"3DAllGatherOnMajorDim"`, or a
    strategy with `num_dims` and one flag per dim, such as `active_dims:101`.
    """
    if emitter := re.search(r'"emitter":"(\d)DAll', attributes):
        return int(emitter.group(1))
    if active := re.search(r"active_dims:(\d+)", attributes):
        return active.group(1).count("1")
    dims = re.search(r"num_dims:(\d+)", attributes)
    return int(dims.group(1)) if dims else 1
