"""Ring: the devices that share a sequence, arranged in a ring of groups.

Devices exchange heads within a group, and keys and values circulate between groups.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# B batch, T time, N heads.


class Ring(NamedTuple):
    """A ring of groups of devices along the mesh axes over which time is sharded.

    Attributes:
      axes: Mesh axes over which time is sharded.
      num: Number of devices along these axes.
      num_groups: Number of groups in the ring.
      is_zigzag: Whether a group's tokens are two pieces, one from each half of the sequence.
    """

    axes: tuple[str, ...]
    num: int
    num_groups: int
    is_zigzag: bool

    @property
    def group_size(self) -> int:
        """Number of devices in a group."""
        return self.num // self.num_groups

    @property
    def groups(self) -> list[list[int]]:
        """The devices of each group, in the order of their tokens.

        For a zig-zag with an even group size, each group consists of devices from both halves, so
        that the group already has both of its pieces.
        """
        if not self.is_paired:
            size = self.group_size
            return [list(range(i * size, (i + 1) * size)) for i in range(self.num_groups)]
        half = self.group_size // 2
        first = [range(i * half, (i + 1) * half) for i in range(self.num_groups)]
        last = [
            range(self.num - (i + 1) * half, self.num - i * half) for i in range(self.num_groups)
        ]
        return [[*low, *high] for low, high in zip(first, last, strict=True)]

    @property
    def is_paired(self) -> bool:
        """Whether a group's devices already have both of its zig-zag pieces."""
        return self.is_zigzag and self.group_size % 2 == 0

    def group_index(self) -> jax.Array:
        """Returns the index of this device's group."""
        group_of_device = [0] * self.num
        for i, group in enumerate(self.groups):
            for device in group:
                group_of_device[device] = i
        return jnp.asarray(group_of_device, jnp.int32)[jax.lax.axis_index(self.axes)]

    def shift(self, tree: Any, step: int) -> Any:
        """Receives the arrays from the group `step` positions earlier in the ring."""
        # A device sends to the device with the same rank in another group.
        pairs = [
            (device, self.groups[(i + step) % self.num_groups][rank])
            for i, group in enumerate(self.groups)
            for rank, device in enumerate(group)
        ]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axes, pairs), tree)

    def by_heads(self, x: jax.Array) -> jax.Array:
        """Exchanges [B, T, N, ...] within the group: each device gets some heads of all tokens."""
        return self._all_to_all(x, 2, 1)

    def by_time(self, x: jax.Array) -> jax.Array:
        """Exchanges [B, T, N, ...] within the group: each device gets all heads of some tokens."""
        return self._all_to_all(x, 1, 2)

    def _all_to_all(self, x: jax.Array, split: int, concat: int) -> jax.Array:
        if self.group_size == 1:
            return x
        groups = None if self.num_groups == 1 else self.groups
        return jax.lax.all_to_all(x, self.axes, split, concat, axis_index_groups=groups, tiled=True)

    def heads_of(self, x_N: jax.Array) -> jax.Array:
        """Returns this device's part of a per-head array; the ring must have only one group."""
        size = x_N.shape[0] // self.group_size
        return jax.lax.dynamic_slice_in_dim(x_N, jax.lax.axis_index(self.axes) * size, size)

    def to_zigzag(self, x: jax.Array) -> jax.Array:
        """Exchanges pieces of [B, T, ...] between groups, so that each group has its two pieces.

        With n groups, there are 2 n pieces. Group i has pieces 2 i and 2 i + 1, and needs pieces i
        and 2 n - 1 - i. One of these two has an even index and the other an odd index, so one
        permute can move all even pieces and a second permute all odd pieces.
        """
        if not self.is_zigzag or self.is_paired:
            return x
        even, odd = (
            self._permute(part, self._moves(parity))
            for parity, part in enumerate(jnp.split(x, 2, axis=1))
        )
        return jnp.concatenate(self._swap_if_odd(even, odd), axis=1)

    def from_zigzag(self, x: jax.Array) -> jax.Array:
        """Moves the pieces of [B, T, ...] back, so that each group has consecutive tokens."""
        if not self.is_zigzag or self.is_paired:
            return x
        parts = self._swap_if_odd(*jnp.split(x, 2, axis=1))
        return jnp.concatenate(
            [
                self._permute(part, [(end, start) for start, end in self._moves(parity)])
                for parity, part in enumerate(parts)
            ],
            axis=1,
        )

    def _moves(self, parity: int) -> list[tuple[int, int]]:
        """Returns the (source, target) groups for all even or all odd pieces."""
        num_pieces = 2 * self.num_groups
        return [(i // 2, min(i, num_pieces - 1 - i)) for i in range(parity, num_pieces, 2)]

    def _swap_if_odd(self, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (x, y), or (y, x) in groups with an odd index."""
        is_even = self.group_index() % 2 == 0
        return jnp.where(is_even, x, y), jnp.where(is_even, y, x)

    def _permute(self, x: jax.Array, moves: list[tuple[int, int]]) -> jax.Array:
        pairs = [
            pair
            for start, end in moves
            for pair in zip(self.groups[start], self.groups[end], strict=True)
        ]
        return jax.lax.ppermute(x, self.axes, pairs)

    def starts(self, group: jax.Array, length: int) -> list[tuple[jax.Array, int]]:
        """Returns (first token, number of tokens) for each piece of a group of `length` tokens."""
        if not self.is_zigzag:
            return [(group * length, length)]
        half = length // 2
        return [(group * half, half), ((2 * self.num_groups - 1 - group) * half, half)]

    def part_of(self, x: jax.Array, group: jax.Array, length: int) -> jax.Array:
        """Selects the `length` tokens of a group from a complete sequence [B, T]."""
        pieces = self.starts(group, length)
        parts = [jax.lax.dynamic_slice_in_dim(x, *piece, axis=1) for piece in pieces]
        return jnp.concatenate(parts, axis=1)
