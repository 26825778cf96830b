"""The result of a simulated step: time for compute, memory, collectives and host copies."""

import collections
import dataclasses

TransferKey = tuple[str, tuple[str, ...], str]  # (kind, axes, layer)


@dataclasses.dataclass
class Transfer:
    """Totals over all collectives (or host copies) of one kind in one layer.

    Attributes:
      kind: One of `hlo.KINDS`, or the kind of a `copies.HostCopy`.
      axes: Mesh axes along which the collective runs; empty for host copies.
      layer: Path of the layer, such as "encoder/ffn" or "gradient of encoder/ffn".
      count: Number of executions.
      bytes: Bytes of the results on one device.
      wire_bytes: Bytes that each device sends.
      seconds: Time on the links in seconds, including the part that overlaps with compute.
      exposed_seconds: Time during which the device waits for the transfer.
      crosses: Whether the collective leaves its slice (TPU) or node (GPU).
      instructions: Names of the instructions that start or end the transfer.
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
        """Adds `count` executions; the other arguments are per execution."""
        self.count += count
        self.seconds += seconds * count
        self.wire_bytes += sent_bytes * count
        self.bytes += result_bytes * count


@dataclasses.dataclass
class Timeline:
    """The simulated time of one step on one device.

    Attributes:
      seconds: Time from the first instruction to the last.
      compute_seconds: Time in matmuls and kernels.
      memory_seconds: Time in all other instructions, which are memory-bound.
      flops: Matmul flops, including the matmul flops in kernels.
      kernel_flops: Matmul flops in attention kernels and grouped matmuls.
      recomputed_flops: Matmul flops that the backward pass recomputes (remat).
      flops_by_type: Maps XLA's name for each element type to the matmul flops in this type.
      unknown_kernels: Names of kernels with unknown costs, which are counted as zero seconds.
      collectives: Maps (kind, axes, layer) to the totals for these collectives.
      host_copies: Maps (kind, axes, layer) to the totals for these copies between device and host.
      expert_round_seconds: Time of one extra round of all-to-alls between experts, which is only
        needed if loads are uneven (`layers/moe/exchange.py`). It is not included in `seconds`, and
        is 0 if the program has no such rounds.
      instruction_seconds: Time of each instruction that is not a transfer, keyed by instruction
        name.
    """

    seconds: float = 0.0
    compute_seconds: float = 0.0
    memory_seconds: float = 0.0
    flops: int = 0
    kernel_flops: int = 0
    recomputed_flops: int = 0
    flops_by_type: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    unknown_kernels: set[str] = dataclasses.field(default_factory=set)
    collectives: dict[TransferKey, Transfer] = dataclasses.field(default_factory=dict)
    host_copies: dict[TransferKey, Transfer] = dataclasses.field(default_factory=dict)
    expert_round_seconds: float = 0.0
    instruction_seconds: collections.defaultdict[str, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )

    @property
    def collective_seconds(self) -> float:
        """Total time of all collectives, including overlap with compute."""
        return sum(collective.seconds for collective in self.collectives.values())

    @property
    def exposed_seconds(self) -> float:
        """Time during which the device waits for collectives."""
        return sum(collective.exposed_seconds for collective in self.collectives.values())

    @property
    def host_copy_seconds(self) -> float:
        """Total time of all host copies, including overlap with compute."""
        return sum(copy.seconds for copy in self.host_copies.values())

    @property
    def exposed_host_copy_seconds(self) -> float:
        """Time during which the device waits for host copies."""
        return sum(copy.exposed_seconds for copy in self.host_copies.values())
