"""The cost of one collective: bytes that a device sends, links that carry them, hops."""

import dataclasses
import re

import numpy as np

from praxis_tools.explain import hlo
from praxis_tools.explain.hlo_groups import axes_of_groups, device_groups
from praxis_tools.explain.hlo_text import Computation, Instruction, Program, arrays_of
from praxis_tools.plan.chips import Chip
from praxis_tools.plan.costs import Efficiencies, bytes_of
from praxis_tools.plan.topology import PhysicalMesh

# Collectives whose result, or sum, is the same on all devices of a chip.
_SHARED_BY_CHIP = ("all-gather", "all-reduce", "reduce-scatter")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveSpec:
    """What the cost of a collective depends on.

    Attributes:
      kind: one of `hlo.KINDS`.
      axes: the mesh axes it runs along.
      operand_bytes: on one device.
      group_size: devices in a group.
      num_links: links that carry it at once, each in one direction.
      devices_per_chip: devices of a group on each chip. They share the chip's links: data that all
        of them receive or sum crosses a link once.
      is_ring: whether the links close into rings; on a line half of the links idle.
      crosses: whether it leaves the slice (TPU) or node (GPU).
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
        """Bytes that a device sends in a ring algorithm."""
        others = self.group_size - 1
        if self.kind == "all-gather":
            return self.operand_bytes * others
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.operand_bytes
        passes = 2 if self.kind == "all-reduce" else 1
        return self.operand_bytes * others / self.group_size * passes

    @property
    def result_bytes(self) -> int:
        """Bytes of the result on one device."""
        if self.kind == "all-gather":
            return self.operand_bytes * self.group_size
        if self.kind == "reduce-scatter":
            return self.operand_bytes // self.group_size
        return self.operand_bytes


def collective_seconds(spec: CollectiveSpec, chip: Chip, efficiencies: Efficiencies) -> float:
    """Returns the seconds of a collective by itself: bytes over bandwidth, and latency per hop."""
    if spec.group_size <= 1 and spec.kind != "collective-permute":
        return 0.0
    if spec.crosses:
        share = efficiencies.network if chip.torus_dims else efficiencies.nodes
        bandwidth = chip.network_bandwidth * share
        return spec.sent_bytes / bandwidth + efficiencies.network_seconds
    if not chip.torus_dims:  # NVLink: every device reaches every other one directly.
        bandwidth = chip.link_bandwidth * efficiencies.link
        return spec.sent_bytes / bandwidth + 2 * efficiencies.hop_seconds
    links = spec.num_links if spec.is_ring else max(1, spec.num_links // 2)
    hops = 1 if spec.kind == "collective-permute" else spec.group_size / 2
    shared = spec.devices_per_chip if spec.kind in _SHARED_BY_CHIP else 1
    bandwidth = links * shared * chip.link_bandwidth * efficiencies.link
    return spec.sent_bytes / bandwidth + hops * efficiencies.hop_seconds


def is_slice_transfer(instruction: Instruction) -> bool:
    """Returns whether an instruction sends a TPU's data to another slice (send ... send-done)."""
    return instruction.opcode == "send" and "_xla_megascale_transfer_type" in instruction.attributes


def collective_spec(
    instruction: Instruction, computation: Computation, program: Program, chip: Chip,
    mesh: PhysicalMesh, *, in_fusion: bool, both_links: bool,
) -> CollectiveSpec:
    """Reads the spec of a collective from its instruction.

    Args:
      in_fusion: whether `computation` belongs to a fusion.
      both_links: whether a collective-permute uses the links of both directions.
    """
    groups = device_groups(instruction.attributes, program)
    if instruction.opcode == "send":
        # Of a collective over several slices the text has only the message between them.
        operand_bytes = sum(array.bytes for array in arrays_of(instruction.shape)[:1])
        kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
        kind = kind.group(1).lower().replace("_", "-")
        kind = kind if kind in hlo.KINDS else "collective-permute"
        axes, crosses = mesh.axes_between_slices(), True
    else:
        operand_bytes = sum(
            bytes_of(computation[name].shape)
            for name in instruction.operands if name in computation
        )
        kind = instruction.opcode.removesuffix("-start")
        # An all-reduce whose result is sliced in the same fusion is a reduce-scatter.
        has_slice = any(other.opcode == "dynamic-slice" for other in computation.values())
        if kind == "all-reduce" and in_fusion and has_slice:
            kind = "reduce-scatter"
        axes = axes_of_groups(groups, mesh.axis_sizes) if groups is not None else ()
        crosses = mesh.crosses(groups)
    num_links, is_ring = _links(instruction, kind, groups, chip, mesh, both_links)
    return CollectiveSpec(
        kind=kind, axes=axes, operand_bytes=operand_bytes,
        group_size=groups.shape[1] if groups is not None else int(mesh.slices.max()) + 1,
        num_links=num_links, is_ring=is_ring, devices_per_chip=mesh.devices_per_chip(groups),
        crosses=crosses,
    )


def _links(
    instruction: Instruction, kind: str, groups: np.ndarray | None, chip: Chip, mesh: PhysicalMesh,
    both_links: bool,
) -> tuple[int, bool]:
    """Returns the links that carry a collective at once, and whether they close into rings."""
    if not chip.torus_dims:
        return 1, True
    if kind == "collective-permute":
        return (2 if both_links else 1), True
    attributes = instruction.attributes
    if colors := re.search(r"UniDirection\w*\{colors:(\d+)", attributes):
        return int(colors.group(1)), True
    if rings := attributes.count('"phase_rings":'):
        # A SparseCore's rings, one direction each. "_MESH" is a dim whose ends no link joins.
        return rings, "_MESH" not in attributes
    dims = _num_torus_dims(attributes)
    return 2 * dims, dims > 1 or mesh.is_ring(groups)


def _num_torus_dims(attributes: str) -> int:
    """Returns over how many torus dims libtpu spreads a collective, by its algorithm's name.

    The name is `"emitter":"3DAllGatherOnMajorDim"`, or a strategy with `num_dims` and flags for the
    dims in use, `active_dims:101`.
    """
    if emitter := re.search(r'"emitter":"(\d)DAll', attributes):
        return int(emitter.group(1))
    if active := re.search(r"active_dims:(\d+)", attributes):
        return active.group(1).count("1")
    dims = re.search(r"num_dims:(\d+)", attributes)
    return int(dims.group(1)) if dims else 1
