"""The timeline of a step: seconds in compute, memory, collectives and copies to the host."""

import collections
import dataclasses


@dataclasses.dataclass
class Transfer:
    """All executions of a collective of a layer, or of a copy to or from the host.

    Attributes:
      kind: one of `hlo.KINDS`, or the kind of a `copies.HostCopy`.
      axes: the mesh axes it runs along; empty for copies.
      layer: "encoder/ffn", or "gradient of encoder/ffn".
      count: executions.
      bytes: bytes of the results on one device.
      wire_bytes: bytes that a device sends.
      seconds: seconds on the links, whether or not compute overlaps with them.
      exposed_seconds: the part of `seconds` in which the device waits.
      crosses: whether it leaves the slice (TPU) or node (GPU).
      instructions: names of the instructions that start or end it.
    """

    kind: str
    axes: tuple[str, ...]
    layer: str
    count: int = 0
    bytes: int = 0
    wire_bytes: float = 0.0
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    crosses: bool = False
    instructions: set[str] = dataclasses.field(default_factory=set)

    def add(self, count: int, seconds: float, sent_bytes: float, result_bytes: int) -> None:
        """Adds `count` executions, each with these seconds and bytes."""
        self.count += count
        self.seconds += seconds * count
        self.wire_bytes += sent_bytes * count
        self.bytes += result_bytes * count


@dataclasses.dataclass
class Timeline:
    """The seconds of a step on a device.

    Attributes:
      seconds: from the first instruction to the last.
      compute_seconds: in matmuls and kernels.
      memory_seconds: in all other instructions, which are bound by memory.
      flops: matmul flops, with those of kernels.
      kernel_flops: matmul flops in attention kernels and grouped matmuls.
      recomputed_flops: matmul flops that the backward pass recomputes (remat).
      flops_by_type: matmul flops by element type, in XLA's names.
      unknown_kernels: names of kernels whose cost is unknown, and taken as zero.
      collectives: by (kind, axes, layer).
      host_copies: copies over the link to the host, by the same key.
      expert_turn_seconds: of each further round of all-to-all exchanges between experts that
        uneven loads add (`layers/moe/exchange.py`); not in `seconds`. 0 without such exchanges.
      instruction_seconds: by the name of an instruction that is not a transfer.
    """

    seconds: float = 0.0
    compute_seconds: float = 0.0
    memory_seconds: float = 0.0
    flops: int = 0
    kernel_flops: int = 0
    recomputed_flops: int = 0
    flops_by_type: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    unknown_kernels: set[str] = dataclasses.field(default_factory=set)
    collectives: dict[tuple, Transfer] = dataclasses.field(default_factory=dict)
    host_copies: dict[tuple, Transfer] = dataclasses.field(default_factory=dict)
    expert_turn_seconds: float = 0.0
    instruction_seconds: collections.Counter = dataclasses.field(
        default_factory=collections.Counter
    )

    @property
    def collective_seconds(self) -> float:
        """Seconds of all collectives, overlapped or not."""
        return sum(collective.seconds for collective in self.collectives.values())

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which the device waits for a collective."""
        return sum(collective.exposed_seconds for collective in self.collectives.values())

    @property
    def host_copy_seconds(self) -> float:
        """Seconds of all copies to and from the host, overlapped or not."""
        return sum(copy.seconds for copy in self.host_copies.values())

    @property
    def exposed_host_copy_seconds(self) -> float:
        """Seconds in which the device waits for a copy to or from the host."""
        return sum(copy.exposed_seconds for copy in self.host_copies.values())
