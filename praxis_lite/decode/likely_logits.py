"""The least logit that may be drawn, among the k most likely or within a probability p.

Found by halving the range of floats: 32 sums over the vocabulary, where a sort takes many times as
long, on CPU as on accelerators.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from praxis_lite.core.collectives.varying import varying_alike

# R rows, V classes.


def kth_logit(logits_RV: jax.Array, k_R: jax.Array) -> jax.Array:
    """Returns the k-th largest logit of each row, [R, 1]; 1 <= k <= V."""
    return _least(
        logits_RV, lambda above_RV: jnp.sum(above_RV, axis=-1, dtype=jnp.int32) < k_R
    )


def nucleus_end(logits_RV: jax.Array, p: float | jax.Array) -> jax.Array:
    """Returns the least logit of each row, [R, 1], that stays for p.

    A token stays if the more likely ones together do not yet exceed p.

    Args:
      p: of all rows, or [R].
    """
    probs_RV = jax.nn.softmax(logits_RV, axis=-1)
    return _least(
        logits_RV, lambda above_RV: jnp.sum(jnp.where(above_RV, probs_RV, 0.0), axis=-1) <= p
    )


def _least(logits_RV: jax.Array, stays: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Returns the least logit of each row that stays, [R, 1], or -inf.

    Args:
      stays: from bool [R, V], which logits are above a number, to bool [R]: True if that number
        stays. If one does, all larger ones do; the largest logit does.
    """
    # int32 numbers in the order of the floats.
    places_RV = _turned(logits_RV.astype(jnp.float32), jnp.int32)
    least = _turned(jnp.float32(-jnp.inf), jnp.int32)

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out_R, in_R = ends
        middle_R = (out_R & in_R) + ((out_R ^ in_R) >> 1)  # The mean, without an overflow.
        is_in_R = stays(places_RV > middle_R[:, None])
        return jnp.where(is_in_R, out_R, middle_R), jnp.where(is_in_R, middle_R, in_R)

    in_R = jnp.max(places_RV, axis=-1)
    ends = varying_alike((jnp.full_like(in_R, least - 1), in_R))
    in_R = jnp.maximum(jax.lax.fori_loop(0, 32, halve, ends)[1], least)
    return _turned(in_R, jnp.float32)[:, None]


def _turned(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the same bits as another dtype, all but the sign turned where that is set."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jax.lax.bitcast_convert_type(bits ^ ((bits >> 31) & 0x7FFFFFFF), dtype)
