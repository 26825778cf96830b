"""Attention round a ring: keys and values are sent on while a station attends to those it has.

Liu et al. 2023, arXiv:2310.01889. Inside `jax.shard_map`; the backward pass is by hand.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.layers.attention.kernels.chunks import (
    attended_in_chunks,
    gradients_in_chunks,
    inner_products,
    of_outputs,
)
from praxis_lite.layers.attention.kernels.stations import Ring
from praxis_lite.layers.attention.masks import AttentionMask

# B batch, T queries, S keys, G heads of keys and values, R heads of queries that share one of
# these, K dims per head.


def of_queries(mask: AttentionMask, ring: Ring, num_queries: int) -> AttentionMask:
    """Returns the mask of this station's queries, which have their places as indices."""
    pieces = ring.starts(ring.station(), num_queries)
    index = [start + jnp.arange(length, dtype=jnp.int32) for start, length in pieces]
    segments = mask.q_segments_BT
    if segments is not None:
        parts = [jax.lax.dynamic_slice_in_dim(segments, *piece, axis=1) for piece in pieces]
        segments = jnp.concatenate(parts, axis=1)
    return dataclasses.replace(
        mask, q_index_BT=jnp.concatenate(index)[None], q_segments_BT=segments
    )


def _of_pieces(
    mask: AttentionMask, ring: Ring, station: jax.Array, *arrays: jax.Array
) -> list[tuple[AttentionMask, list[jax.Array]]]:
    """Returns, for each piece of a station's keys, the mask of it and the part of `arrays`.

    Args:
      mask: of this station's queries and all keys.
      arrays: [B, S, ...] of the station's keys.
    """
    pieces, first = [], 0
    for start, length in ring.starts(station, arrays[0].shape[1]):
        of_keys = {
            name: jax.lax.dynamic_slice_in_dim(x, start, length, axis=1)
            for name in ("kv_segments_BS", "kv_visible_BS")
            if (x := getattr(mask, name)) is not None
        }
        # Keys count from the first of the piece: chunks that no query sees are then skipped.
        seen = dataclasses.replace(mask, q_index_BT=mask.q_index_BT - start, **of_keys)
        pieces.append((seen, [x[:, first : first + length] for x in arrays]))
        first += length
    return pieces


def _num_steps(ring: Ring, mask: AttentionMask, num_keys: int) -> int:
    """Returns the number of stations whose keys a station's queries may see, itself counted."""
    if mask.right_context != 0 or mask.left_context is None:
        return ring.num_stations
    return min(ring.num_stations, 1 + -(-(mask.left_context - 1) // num_keys))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def round_ring(q, k, v, mask, ring, options, chunk_size):
    """Returns the attended values of this station's queries [B, T, G, R, K], and their log sums.

    Both are as of `attention_with_log_sums`. The backward pass sends keys and values round once
    more, with the gradients that come of them; what is kept is a station's own.
    """
    station, num_steps = ring.station(), _num_steps(ring, mask, k.shape[1])
    seen = of_queries(mask, ring, q.shape[1])

    def attended(step: Any, k: jax.Array, v: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        owner = (station - step) % ring.num_stations
        return [
            attended_in_chunks(q, *kv, of_piece, options, chunk_size, jnp.float32)
            for of_piece, kv in _of_pieces(seen, ring, owner, k, v)
        ]

    def turn(step: Any, carry: Any) -> Any:
        (k, v), result = carry
        following = ring.sent((k, v), 1)  # On its way while this device attends.
        return following, functools.reduce(_joined, attended(step, k, v), result)

    following = ring.sent((k, v), 1) if num_steps > 1 else (k, v)
    result = functools.reduce(_joined, attended(0, k, v))
    if num_steps > 1:
        following, result = jax.lax.fori_loop(1, num_steps - 1, turn, (following, result))
        result = functools.reduce(_joined, attended(num_steps - 1, *following), result)
    return result[0].astype(q.dtype), result[1]


def _joined(
    first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns the values that are attended over the keys of both, and their log sums."""
    log_sums = jnp.logaddexp(first[1], second[1])
    encoded = sum(of_outputs(jnp.exp(each - log_sums)) * x for x, each in (first, second))
    return encoded, log_sums


def _forward(q, k, v, mask, ring, options, chunk_size):
    encoded, log_sums = round_ring(q, k, v, mask, ring, options, chunk_size)
    return (encoded, log_sums), (q, k, v, mask, encoded, log_sums)


def _backward(ring, options, chunk_size, residuals, grads):
    q, k, v, mask, encoded, log_sums = residuals
    d_encoded, d_log_sums = grads
    inner = inner_products(d_encoded, encoded) - d_log_sums
    station, num_steps = ring.station(), _num_steps(ring, mask, k.shape[1])
    seen = of_queries(mask, ring, q.shape[1])

    def gradients(step: Any, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple]:
        owner = (station - step) % ring.num_stations
        dq, dk, dv = zip(*(
            gradients_in_chunks(
                q, *kv, of_piece, options, chunk_size, log_sums, inner, d_encoded, jnp.float32
            )
            for of_piece, kv in _of_pieces(seen, ring, owner, k, v)
        ), strict=True)
        return sum(dq), (jnp.concatenate(dk, axis=1), jnp.concatenate(dv, axis=1))

    def added(step: Any, kv: Any, dq: jax.Array, d_kv: Any) -> tuple[jax.Array, Any]:
        arrived = ring.sent(d_kv, 1)
        more, d_here = gradients(step, *kv)
        return dq + more, jax.tree.map(jnp.add, arrived, d_here)

    def turn(step: Any, carry: Any) -> Any:
        kv, dq, d_kv = carry
        return ring.sent(kv, 1), *added(step, kv, dq, d_kv)

    following = ring.sent((k, v), 1) if num_steps > 1 else (k, v)
    dq, d_kv = gradients(0, k, v)
    if num_steps > 1:
        following, dq, d_kv = jax.lax.fori_loop(1, num_steps - 1, turn, (following, dq, d_kv))
        dq, d_kv = added(num_steps - 1, following, dq, d_kv)
        d_kv = ring.sent(d_kv, 1 - num_steps)  # Home.
    dk, dv = d_kv
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


round_ring.defvjp(_forward, _backward)
