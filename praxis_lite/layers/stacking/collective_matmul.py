"""Matmuls with explicit collectives: all-gather and reduce-scatter, or a ring (collective matmul).

Inside `jax.shard_map`, each device has a shard of the tokens `x` and a shard of the weights. With
its shard of the weights, a device can compute a partial sum of the outputs for any tokens. The
device that owns the tokens receives the sum over all devices along the axis.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.layers.base.base_layer import pad_to

PyTree = Any
# Takes (a shard of tokens, the per-row arrays of these tokens), and returns a partial sum of their
# outputs.
PartialSum = Callable[[jax.Array, PyTree], jax.Array]


def gather_and_scatter(
    term: PartialSum,
    x: jax.Array,
    rows: PyTree,
    axis: str,
    dim: int | None,
    length: int | None = None,
) -> jax.Array:
    """Computes the outputs for this device's tokens with an all-gather and a reduce-scatter.

    Args:
      term: Computes a partial sum of outputs.
      x: This device's shard of tokens.
      rows: Per-row arrays for the tokens of all devices along the axis.
      axis: A manual mesh axis.
      dim: The dim of x that is sharded over the axis. If None, x and the outputs are replicated.
      length: Size of `dim` over all devices without padding, or None if there is no padding.
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
    """Computes the outputs for this device's tokens in a ring of devices.

    Shards of tokens circulate, and a device receives the next shard while it processes the current
    shard (collective matmul; Wang et al. 2023, doi:10.1145/3567955.3567959). The sum for a shard
    circulates with the shard: each device adds a partial sum, and the owner, which comes last, adds
    the partial sum that it computed in the first step.

    Args:
      term: Computes a partial sum of outputs.
      x: This device's shard of tokens.
      rows: Per-row arrays for the tokens of all devices along the axis, in order; dims of size 1
        are broadcast.
      axis: A manual mesh axis.
      dim: The dim of x and rows that is sharded over the axis.
      halved_dim: A dim of x along which shards are halved, so that the halves can circulate in
        opposite directions and use both directions of the links. If None, shards circulate in one
        direction.
    """
    num, index = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    size = x.shape[dim]
    num_halved = 0 if halved_dim is None else x.shape[halved_dim]
    # A direction of 1 sends to the next device, so in step i, device d processes the shard of
    # device d - i. `shards`, `local` and `sums` have an entry per direction.
    directions = (1,) if num_halved < 2 else (1, -1)

    def halve(shard: jax.Array) -> list[jax.Array]:
        if halved_dim is None or len(directions) == 1 or shard.shape[halved_dim] == 1:
            # One direction needs no halves, and a dim of size 1 is broadcast to both.
            return [shard] * len(directions)
        return jnp.split(shard, [num_halved // 2], axis=halved_dim)

    def join(halves: Sequence[jax.Array]) -> jax.Array:
        if halved_dim is None or len(directions) == 1:
            return halves[0]
        return jnp.concatenate(halves, axis=halved_dim)

    def rows_of_step(array: jax.Array, step: int) -> jax.Array:
        """Returns the per-row array for the shard that this device processes in a step."""
        if array.shape[dim] == 1:
            shards = [array] * len(directions)
        else:
            shards = [
                jax.lax.dynamic_slice_in_dim(array, (index - sign * step) % num * size, size, dim)
                for sign in directions
            ]
        # Each direction carries a different half of its shard.
        halves = [halve(shard)[i] for i, shard in enumerate(shards)]
        is_broadcast = halved_dim is not None and array.shape[halved_dim] == 1
        return halves[0] if is_broadcast else join(halves)

    def send(shard: jax.Array, sign: int) -> jax.Array:
        return jax.lax.ppermute(shard, axis, [(i, (i + sign) % num) for i in range(num)])

    # After step i > 0, `sums` are the sums for the shards that this device processed in step i,
    # without the terms of the shards' owners.
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
                send(total, sign) + part
                for total, sign, part in zip(sums, directions, terms, strict=True)
            ]
        if step < num - 1:
            shards = [send(shard, sign) for shard, sign in zip(shards, directions, strict=True)]
    # The sums arrive at the owners, which add the terms from step 0.
    return join(
        [
            send(total, sign) + part
            for total, sign, part in zip(sums, directions, local, strict=True)
        ]
    )
