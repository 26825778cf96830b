"""What a collective costs alone on a chip's links: its bytes, the links that carry it, its hops."""

import dataclasses
import re

from praxis_lite.tools.plan.chips import Chip
from praxis_lite.tools.plan.costs import Efficiencies

# Collectives whose results, or sums, are of all devices alike.
_OF_ALL = ("all-gather", "all-reduce", "reduce-scatter")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wire:
    """The form of a collective, from which its cost follows.

    Attributes:
      kind: of `hlo.KINDS`.
      bytes: on one device, of its operands.
      group: devices of a group.
      links: that carry it at once, each one way.
      per_chip: devices of a group on each chip, which has the links: what all devices get, or
        add up, goes over them once for all of these.
      is_ring: its ends meet; on a line half of the links idle.
      crosses: it leaves the slice or node.
    """

    kind: str
    bytes: int
    group: int
    links: int = 2
    per_chip: int = 1
    is_ring: bool = True
    crosses: bool = False

    @property
    def sent(self) -> float:
        """Bytes that a device sends, by the algorithm of rings."""
        others = self.group - 1
        if self.kind == "all-gather":
            return self.bytes * others
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.bytes
        return self.bytes * others / self.group * (2 if self.kind == "all-reduce" else 1)


def wire_seconds(wire: Wire, chip: Chip, efficiencies: Efficiencies) -> float:
    """Returns the seconds of a collective alone: bytes over bandwidth, and a latency per hop."""
    if wire.group <= 1 and wire.kind != "collective-permute":
        return 0.0
    if wire.crosses:
        share = efficiencies.network if chip.torus_dims else efficiencies.nodes
        bandwidth = chip.network_bandwidth * share
        return wire.sent / bandwidth + efficiencies.network_seconds
    if not chip.torus_dims:  # NVLink: every device reaches every other.
        bandwidth = chip.link_bandwidth * efficiencies.link
        return wire.sent / bandwidth + 2 * efficiencies.hop_seconds
    links = wire.links if wire.is_ring else max(1, wire.links // 2)
    hops = 1 if wire.kind == "collective-permute" else wire.group / 2
    shared = wire.per_chip if wire.kind in _OF_ALL else 1
    bandwidth = links * shared * chip.link_bandwidth * efficiencies.link
    return wire.sent / bandwidth + hops * efficiencies.hop_seconds


def torus_dims(attributes: str) -> int:
    """Returns how many torus dims libtpu spreads a collective over, by its algorithm's name.

    That says it as `"emitter":"3DAllGatherOnMajorDim"`, or as `num_dims` of a strategy, of which
    `active_dims` (three flags) says which are used.
    """
    if emitter := re.search(r'"emitter":"(\d)DAll', attributes):
        return int(emitter.group(1))
    if active := re.search(r"active_dims:(\d+)", attributes):
        return active.group(1).count("1")
    dims = re.search(r"num_dims:(\d+)", attributes)
    return int(dims.group(1)) if dims else 1
