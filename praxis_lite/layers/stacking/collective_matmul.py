"""Matmuls with explicit collectives: all-gather and reduce-scatter, or a ring (collective matmul).

Inside `jax.shard_map` each device has a shard of the tokens `x` and a shard of the weights. What it
computes for a shard of tokens is a partial sum; the sum over all devices along the axis goes to the
device that has the tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.layers.base.base_layer import pad_to

PyTree = Any
# (shard of tokens, the rows of these tokens) -> a partial sum of their outputs.
PartialSum = Callable[[jax.Array, PyTree], jax.Array]


def gather_and_scatter(
    term: PartialSum, x: jax.Array, rows: PyTree, axis: str, dim: int | None,
    length: int | None = None,
) -> jax.Array:
    """Returns the outputs of this device's tokens by an all-gather and a reduce-scatter.

    Args:
      term: Computes a partial sum of outputs.
      x: This device's shard of tokens.
      rows: Arrays with the rows of the tokens of all devices along the axis.
      axis: A manual mesh axis.
      dim: The dim of x that the axis splits; None: x is replicated, and so are the outputs.
      length: Size of `dim` over all devices, without padding; None: there is no padding.
    """
    if dim is None:
        return jax.lax.psum(term(x, rows), axis)
    tokens = jax.lax.all_gather(x, axis, axis=dim, tiled=True)
    outputs = term(jax.lax.slice_in_dim(tokens, 0, length, axis=dim), rows)
    outputs = pad_to(outputs, tokens.shape[dim], dim)
    return jax.lax.psum_scatter(outputs, axis, scatter_dimension=dim, tiled=True)


def ring_matmul(
    term: PartialSum, x: jax.Array, rows: PyTree, axis: str, dim: int, halved_dim: int | None = None
) -> jax.Array:
    """Returns the outputs of this device's tokens; shards and partial sums circulate in a ring.

    The next shard is sent while a device computes on the current one (collective matmul; Wang et
    al. 2023, doi:10.1145/3567955.3567959).

    Args:
      term: Computes a partial sum of outputs.
      x: This device's shard of tokens.
      rows: Arrays with the rows of the tokens of all devices along the axis, in order; a dim of
        size 1 is broadcast.
      axis: A manual mesh axis.
      dim: The dim of x and rows that the axis splits.
      halved_dim: A dim of x along which shards are halved; the halves circulate in opposite
        directions, to use both directions of the links. None: one direction.
    """
    num, index = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    size = x.shape[dim]
    num_halved = 0 if halved_dim is None else x.shape[halved_dim]
    directions = (1,) if num_halved < 2 else (1, -1)

    def halve(shard: jax.Array) -> list[jax.Array]:
        if halved_dim is None or len(directions) == 1 or shard.shape[halved_dim] == 1:
            return [shard] * len(directions)
        return jnp.split(shard, [num_halved // 2], axis=halved_dim)

    def join(halves: Sequence[jax.Array]) -> jax.Array:
        if halved_dim is None or len(directions) == 1:
            return halves[0]
        return jnp.concatenate(halves, axis=halved_dim)

    def rows_of_step(array: jax.Array, step: int) -> jax.Array:
        """Returns the rows of the shard that this device has in a step of the ring."""
        if array.shape[dim] == 1:
            shards = [array] * len(directions)
        else:
            shards = [
                jax.lax.dynamic_slice_in_dim(array, (index - way * step) % num * size, size, dim)
                for way in directions
            ]
        halves = [halve(shard)[i] for i, shard in enumerate(shards)]
        is_broadcast = halved_dim is not None and array.shape[halved_dim] == 1
        return halves[0] if is_broadcast else join(halves)

    def send(shard: jax.Array, way: int) -> jax.Array:
        return jax.lax.ppermute(shard, axis, [(i, (i + way) % num) for i in range(num)])

    shards, local, sums = halve(x), [], []
    for step in range(num):
        rows_now = jax.tree.map(lambda array, step=step: rows_of_step(array, step), rows)
        terms = halve(term(join(shards), rows_now))
        if step == 0:
            local = terms
        elif step == 1:
            sums = terms
        else:
            sums = [
                send(total, way) + part
                for total, way, part in zip(sums, directions, terms, strict=True)
            ]
        if step < num - 1:
            shards = [send(shard, way) for shard, way in zip(shards, directions, strict=True)]
    return join([
        send(total, way) + part for total, way, part in zip(sums, directions, local, strict=True)
    ])
