"""Devices that share a sequence: groups that share heads, which are the stations of a ring."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# B batch, T time, N heads.


class Ring(NamedTuple):
    """Devices along the mesh axes of time, in groups that are the stations of a ring.

    Attributes:
      axes: of the mesh, over which time is split.
      num: devices along these.
      num_stations: groups.
      is_zigzag: a station's tokens are two pieces, from either end of the sequence.
    """

    axes: tuple[str, ...]
    num: int
    num_stations: int
    is_zigzag: bool

    @property
    def size(self) -> int:
        """Devices of a group."""
        return self.num // self.num_stations

    @property
    def groups(self) -> list[list[int]]:
        """The devices of each station, whose tokens follow on each other in the order of these.

        A zig-zag of an even number of devices has its two pieces from the start.
        """
        if not self.is_paired:
            return [
                list(range(i * self.size, (i + 1) * self.size)) for i in range(self.num_stations)
            ]
        half = self.size // 2
        first = [range(i * half, (i + 1) * half) for i in range(self.num_stations)]
        last = [
            range(self.num - (i + 1) * half, self.num - i * half) for i in range(self.num_stations)
        ]
        return [[*low, *high] for low, high in zip(first, last, strict=True)]

    @property
    def is_paired(self) -> bool:
        return self.is_zigzag and self.size % 2 == 0

    def station(self) -> jax.Array:
        """Returns the number of this device's station."""
        of_device = [0] * self.num
        for i, group in enumerate(self.groups):
            for device in group:
                of_device[device] = i
        return jnp.asarray(of_device, jnp.int32)[jax.lax.axis_index(self.axes)]

    def sent(self, tree: Any, step: int) -> Any:
        """Returns the arrays of the station that is `step` before this one."""
        pairs = [
            (device, self.groups[(i + step) % self.num_stations][rank])
            for i, group in enumerate(self.groups) for rank, device in enumerate(group)
        ]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axes, pairs), tree)

    def by_heads(self, x: jax.Array) -> jax.Array:
        """Returns some heads of the group's tokens [B, T, N, ...] of all heads of this device's."""
        return self._exchanged(x, 2, 1)

    def by_time(self, x: jax.Array) -> jax.Array:
        """Returns all heads of this device's tokens of some heads of its group's."""
        return self._exchanged(x, 1, 2)

    def _exchanged(self, x: jax.Array, split: int, concat: int) -> jax.Array:
        if self.size == 1:
            return x
        groups = None if self.num_stations == 1 else self.groups
        return jax.lax.all_to_all(
            x, self.axes, split, concat, axis_index_groups=groups, tiled=True
        )

    def heads_of(self, x_N: jax.Array) -> jax.Array:
        """Returns this device's part of what there is for each head, where one group shares all."""
        size = x_N.shape[0] // self.size
        return jax.lax.dynamic_slice_in_dim(x_N, jax.lax.axis_index(self.axes) * size, size)

    def to_zigzag(self, x: jax.Array) -> jax.Array:
        """Returns the tokens [B, T, ...] of this station's two pieces, given its part of time.

        Station i has pieces 2 i and 2 i + 1 of the sequence, and gets i and its mirror image: of
        these one is even and one odd. So the even pieces move at once, and then the odd ones.
        """
        if not self.is_zigzag or self.is_paired:
            return x
        even, odd = (
            self._moved(part, self._ways(parity))
            for parity, part in enumerate(jnp.split(x, 2, axis=1))
        )
        return jnp.concatenate(self._swapped_if_odd(even, odd), axis=1)

    def from_zigzag(self, x: jax.Array) -> jax.Array:
        """Returns the inverse of `to_zigzag`."""
        if not self.is_zigzag or self.is_paired:
            return x
        parts = self._swapped_if_odd(*jnp.split(x, 2, axis=1))
        return jnp.concatenate([
            self._moved(part, [(end, start) for start, end in self._ways(parity)])
            for parity, part in enumerate(parts)
        ], axis=1)

    def _ways(self, parity: int) -> list[tuple[int, int]]:
        """Returns the station that has each even or odd piece, and the station that gets it."""
        num_pieces = 2 * self.num_stations
        return [(i // 2, min(i, num_pieces - 1 - i)) for i in range(parity, num_pieces, 2)]

    def _swapped_if_odd(self, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns x and y, in the other order on an odd station."""
        is_even = self.station() % 2 == 0
        return jnp.where(is_even, x, y), jnp.where(is_even, y, x)

    def _moved(self, x: jax.Array, stations: list[tuple[int, int]]) -> jax.Array:
        pairs = [
            pair for start, end in stations
            for pair in zip(self.groups[start], self.groups[end], strict=True)
        ]
        return jax.lax.ppermute(x, self.axes, pairs)

    def starts(self, station: jax.Array, length: int) -> list[tuple[jax.Array, int]]:
        """Returns the index of the first token, and the length, of each piece of a station.

        Args:
          length: of all its tokens.
        """
        if not self.is_zigzag:
            return [(station * length, length)]
        half = length // 2
        return [(station * half, half), ((2 * self.num_stations - 1 - station) * half, half)]

    def part_of(self, x: jax.Array, station: jax.Array, length: int) -> jax.Array:
        """Returns a station's pieces, of `length` tokens together, of a whole sequence [B, T]."""
        pieces = self.starts(station, length)
        parts = [jax.lax.dynamic_slice_in_dim(x, *piece, axis=1) for piece in pieces]
        return jnp.concatenate(parts, axis=1)
