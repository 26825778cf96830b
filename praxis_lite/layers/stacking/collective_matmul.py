"""Matmuls with explicit collectives: all-gather and reduce-scatter, or a ring (collective matmul).

Inside `jax.shard_map` each device has a piece of the tokens `x` and a part of the weights. Its
outputs for a piece are a term of the result: the sum of the terms of all devices along the axis,
which the device of the piece receives.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.layers.base.base_layer import pad_to

PyTree = Any
# (piece, the rows of its tokens) -> a term of the piece's outputs.
Term = Callable[[jax.Array, PyTree], jax.Array]


def gather_and_scatter(
    term: Term, x: jax.Array, rows: PyTree, axis: str, dim: int | None, length: int | None = None
) -> jax.Array:
    """Returns the outputs of this device's piece by an all-gather and a reduce-scatter.

    Args:
      x: this device's piece.
      rows: of the tokens of all devices along the axis.
      dim: the dim of x that the axis splits; None: x is replicated, and so are the outputs.
      length: of `dim` over all devices, without padding; None: there is no padding.
    """
    if dim is None:
        return jax.lax.psum(term(x, rows), axis)
    whole = jax.lax.all_gather(x, axis, axis=dim, tiled=True)
    outputs = term(jax.lax.slice_in_dim(whole, 0, length, axis=dim), rows)
    outputs = pad_to(outputs, whole.shape[dim], dim)
    return jax.lax.psum_scatter(outputs, axis, scatter_dimension=dim, tiled=True)


def ring_matmul(
    term: Term, x: jax.Array, rows: PyTree, axis: str, dim: int, halved_dim: int | None = None
) -> jax.Array:
    """Returns the outputs of this device's piece; pieces and partial sums go round a ring.

    The next piece is sent while a device computes on the current one (collective matmul; Wang et
    al. 2023, doi:10.1145/3567955.3567959).

    Args:
      x: this device's piece.
      rows: arrays of the tokens of all devices along the axis, in order; a dim of 1 is broadcast.
      dim: the dim of x and rows that the axis splits.
      halved_dim: a dim of x that is halved; the halves go round in opposite directions, to use both
        directions of the links. None: one direction.
    """
    num, index = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    size, num_halved = x.shape[dim], None if halved_dim is None else x.shape[halved_dim]
    directions = (1,) if num_halved is None or num_halved < 2 else (1, -1)

    def cut(piece: jax.Array) -> list[jax.Array]:
        if len(directions) == 1 or piece.shape[halved_dim] == 1:
            return [piece] * len(directions)
        return jnp.split(piece, [num_halved // 2], axis=halved_dim)

    def joined(halves: Sequence[jax.Array]) -> jax.Array:
        return halves[0] if len(directions) == 1 else jnp.concatenate(halves, axis=halved_dim)

    def of_turn(array: jax.Array, turn: int) -> jax.Array:
        """Returns the rows of the piece that this device has in a turn."""
        if array.shape[dim] == 1:
            pieces = [array] * len(directions)
        else:
            pieces = [
                jax.lax.dynamic_slice_in_dim(array, (index - way * turn) % num * size, size, dim)
                for way in directions
            ]
        halves = [cut(piece)[i] for i, piece in enumerate(pieces)]
        is_one = halved_dim is not None and array.shape[halved_dim] == 1
        return halves[0] if is_one else joined(halves)

    def sent(piece: jax.Array, way: int) -> jax.Array:
        return jax.lax.ppermute(piece, axis, [(i, (i + way) % num) for i in range(num)])

    pieces, local, sums = cut(x), [], []
    for turn in range(num):
        terms = cut(term(joined(pieces), jax.tree.map(lambda a, t=turn: of_turn(a, t), rows)))
        if turn == 0:
            local = terms
        elif turn == 1:
            sums = terms
        else:
            sums = [
                sent(total, way) + part
                for total, way, part in zip(sums, directions, terms, strict=True)
            ]
        if turn < num - 1:
            pieces = [sent(piece, way) for piece, way in zip(pieces, directions, strict=True)]
    return joined([
        sent(total, way) + part for total, way, part in zip(sums, directions, local, strict=True)
    ])
