"""Device layout that a schedule reads, and the timeline of a step that it returns."""

import collections
import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Device layout for the timeline: axis sizes, slice of each device, torus coordinates.

    Attributes:
      axis_sizes: devices along each axis.
      slices: int [devices], the slice or node of each, row by row.
      coords: int [devices, dims], each one's place in its slice's torus; None: there is no torus.
      dims: of the torus.
      wraps: for each of them whether links join its ends.
    """

    axis_sizes: Mapping[str, int]
    slices: np.ndarray
    coords: np.ndarray | None = None
    dims: tuple[int, ...] = ()
    wraps: tuple[bool, ...] = ()

    def crosses(self, groups: np.ndarray | None) -> bool:
        """Returns True if a group of devices [groups, devices] is in several slices."""
        if groups is None or groups.max(initial=0) >= len(self.slices):
            return False
        slices = self.slices[groups]
        return bool((slices != slices[:, :1]).any())

    def is_ring(self, groups: np.ndarray | None) -> bool:
        """Returns True if the links close into a ring through the devices of a group.

        Through a plane they always do; along one dim of the torus if the group spans it and it
        wraps.
        """
        if groups is None or self.coords is None or not len(groups):
            return True
        if groups.max(initial=0) >= len(self.coords):
            return True
        coords = self.coords[groups[0]]
        along = [dim for dim in range(coords.shape[1]) if len(set(coords[:, dim])) > 1]
        if len(along) != 1:
            return True
        (dim,) = along
        return len(set(coords[:, dim])) == self.dims[dim] and self.wraps[dim]

    def per_chip(self, groups: np.ndarray | None) -> int:
        """Returns how many devices of a group are on one chip: 1, or both of a TPU7x."""
        if groups is None or self.coords is None or not len(groups):
            return 1
        if groups.max(initial=0) >= len(self.coords):
            return 1
        group = self.coords[groups[0]]
        return len(group) // len(np.unique(group, axis=0))

    def axes_between_slices(self) -> tuple[str, ...]:
        """Returns the axes along which devices are in different slices."""
        places = self.slices.reshape(tuple(self.axis_sizes.values()))
        return tuple(
            axis for dim, axis in enumerate(self.axis_sizes) if np.diff(places, axis=dim).any()
        )


@dataclasses.dataclass
class OnWire:
    """A collective of a step, or a copy to or from the host, all its executions together.

    Attributes:
      kind: of `hlo.KINDS`, or of `hbm.HostCopy`.
      axes: of the mesh, that it runs along; none for a transfer that does not say.
      layer: "encoder/ffn", or "gradient of encoder/ffn".
      source: the line it comes from, "model.py:13", or "".
      count: executions.
      bytes: of the results on one device.
      wire_bytes: that a device sends.
      seconds: on the wire.
      exposed_seconds: of these, in which the device waits.
      crosses: it leaves the slice or node.
      instructions: that begin or end it, by name.
    """

    kind: str
    axes: tuple[str, ...]
    layer: str
    source: str
    count: int = 0
    bytes: int = 0
    wire_bytes: float = 0.0
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    crosses: bool = False
    instructions: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class Timeline:
    """The seconds of a step on a device.

    Attributes:
      seconds: from the first instruction to the last.
      compute: of these in matmuls and kernels.
      memory: in all else, which reads and writes memory.
      kernel_flops, recomputed_flops: matmul flops in kernels of attention; and, of all, of what
        the backward pass computes again.
      flops: matmul flops, those of kernels included.
      flops_by_type: the same by the element type in which they are multiplied, as XLA writes it.
      unknown_kernels: kernels that cost nothing here, by name.
      collectives: by kind, axes and layer.
      host_copies: over the link to the host, by the same.
      expert_turn_seconds: of each further turn that uneven loads add to all exchanges of tokens
        between experts' devices (`layers/moe/exchange.py`), not in `seconds`; 0: there are none.
      of: by an instruction that is no collective, its seconds.
    """

    seconds: float = 0.0
    compute: float = 0.0
    memory: float = 0.0
    flops: int = 0
    kernel_flops: int = 0
    recomputed_flops: int = 0
    flops_by_type: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    unknown_kernels: set[str] = dataclasses.field(default_factory=set)
    collectives: dict[tuple, OnWire] = dataclasses.field(default_factory=dict)
    host_copies: dict[tuple, OnWire] = dataclasses.field(default_factory=dict)
    expert_turn_seconds: float = 0.0
    of: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    @property
    def wire(self) -> float:
        """Seconds of all collectives, overlapped or not."""
        return sum(collective.seconds for collective in self.collectives.values())

    @property
    def exposed(self) -> float:
        """Seconds in which the device waits for a collective."""
        return sum(collective.exposed_seconds for collective in self.collectives.values())

    @property
    def host_link(self) -> float:
        """Seconds of all copies to and from the host, overlapped or not."""
        return sum(copy.seconds for copy in self.host_copies.values())

    @property
    def host_exposed(self) -> float:
        """Seconds in which the device waits for a copy to or from the host."""
        return sum(copy.exposed_seconds for copy in self.host_copies.values())
