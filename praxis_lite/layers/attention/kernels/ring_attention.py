"""Attention round a ring: keys and values are sent on while a station attends to those it has.

Liu et al. 2023, arXiv:2310.01889. Inside `jax.shard_map`; the backward pass is by hand.
"""

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from praxis_lite.layers.attention.kernels.chunks import inner_products, of_outputs
from praxis_lite.layers.attention.kernels.stations import Ring
from praxis_lite.layers.attention.masks import AttentionMask
from praxis_lite.layers.base.activation_names import kept

# B batch, T queries, S keys, G heads of keys and values, R heads of queries that share one of
# these, K dims per head.


class OfAStation(Protocol):
    """Attention of this station's queries to the keys of the station that is `step` before it.

    `mask` is of all queries and keys, with their places as indices; arrays are a station's.
    """

    def attended(
        self, q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, ring: Ring,
        step: int | jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns float32 [B, T, G, R, K] and [B, G, R, T], as `attended_in_chunks`."""
        ...

    def gradients(
        self, q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, ring: Ring,
        step: int | jax.Array, log_sums: jax.Array, inner: jax.Array, d_encoded: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns float32 gradients of q, k and v, as `gradients_in_chunks`."""
        ...


def _num_steps(ring: Ring, mask: AttentionMask, num_keys: int) -> int:
    """Returns the number of stations whose keys a station's queries may see, itself counted."""
    if mask.right_context != 0 or mask.left_context is None:
        return ring.num_stations
    return min(ring.num_stations, 1 + -(-(mask.left_context - 1) // num_keys))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def round_ring(q, k, v, mask, ring, of_a_station, kept_as):
    """Returns the attended values of this station's queries [B, T, G, R, K], and their log sums.

    Both are as of `attention_with_log_sums`. The backward pass sends keys and values round once
    more, with the gradients that come of them; what is kept is a station's own.
    """
    num_steps = _num_steps(ring, mask, k.shape[1])

    def added(step: Any, kv: Any, result: Any) -> tuple[jax.Array, jax.Array]:
        return joined(result, of_a_station.attended(q, *kv, mask, ring, step))

    def turn(step: Any, carry: Any) -> Any:
        kv, result = carry
        following = ring.sent(kv, 1)  # On its way while this device attends.
        return following, added(step, kv, result)

    following = ring.sent((k, v), 1) if num_steps > 1 else (k, v)
    result = of_a_station.attended(q, k, v, mask, ring, 0)
    if num_steps > 1:
        following, result = jax.lax.fori_loop(1, num_steps - 1, turn, (following, result))
        result = added(num_steps - 1, following, result)
    return kept((result[0].astype(q.dtype), result[1]), kept_as)


def joined(*parts: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the values that are attended over the keys of all parts, and their log sums."""
    log_sums = functools.reduce(jnp.logaddexp, (each for _, each in parts))
    encoded = sum(of_outputs(jnp.exp(each - log_sums)) * x for x, each in parts)
    return encoded, log_sums


def _forward(q, k, v, mask, ring, of_a_station, kept_as):
    encoded, log_sums = round_ring(q, k, v, mask, ring, of_a_station, None)
    encoded, log_sums = kept((encoded, log_sums), kept_as)
    return (encoded, log_sums), (q, k, v, mask, encoded, log_sums)


def _backward(ring, of_a_station, kept_as, residuals, grads):
    q, k, v, mask, encoded, log_sums = residuals
    d_encoded, d_log_sums = grads
    inner = inner_products(d_encoded, encoded) - d_log_sums
    num_steps = _num_steps(ring, mask, k.shape[1])

    def gradients(step: Any, kv: Any) -> tuple[jax.Array, tuple]:
        dq, *d_kv = of_a_station.gradients(
            q, *kv, mask, ring, step, log_sums, inner, d_encoded
        )
        return dq, tuple(d_kv)

    def added(step: Any, kv: Any, dq: jax.Array, d_kv: Any) -> tuple[jax.Array, Any]:
        arrived = ring.sent(d_kv, 1)
        more, d_here = gradients(step, kv)
        return dq + more, jax.tree.map(jnp.add, arrived, d_here)

    def turn(step: Any, carry: Any) -> Any:
        kv, dq, d_kv = carry
        return ring.sent(kv, 1), *added(step, kv, dq, d_kv)

    following = ring.sent((k, v), 1) if num_steps > 1 else (k, v)
    dq, d_kv = gradients(0, (k, v))
    if num_steps > 1:
        following, dq, d_kv = jax.lax.fori_loop(1, num_steps - 1, turn, (following, dq, d_kv))
        dq, d_kv = added(num_steps - 1, following, dq, d_kv)
        d_kv = ring.sent(d_kv, 1 - num_steps)  # Home.
    dk, dv = d_kv
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


round_ring.defvjp(_forward, _backward)
