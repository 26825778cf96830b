"""Computes logit thresholds for top-k and top-p (nucleus) sampling without sorting.

A binary search over float32 values requires 32 sums over the vocabulary. Sorting takes many times
longer on CPUs and accelerators.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from praxis_lite.core.collectives.varying import varying_alike

# R rows, V classes.


def kth_logit(logits_RV: jax.Array, k_R: jax.Array) -> jax.Array:
    """Returns the k-th largest logit [R, 1] of each row, for 1 <= k <= V."""
    return _smallest_threshold(
        logits_RV, lambda above_RV: jnp.sum(above_RV, axis=-1, dtype=jnp.int32) < k_R
    )


def nucleus_end(logits_RV: jax.Array, p: float | jax.Array) -> jax.Array:
    """Returns the smallest logit [R, 1] in the nucleus of each row.

    A token is in the nucleus if the total probability of all more likely tokens is at most p.

    Args:
      logits_RV: Logits of each row.
      p: Probability in (0, 1], either a number for all rows or an array [R].
    """
    probs_RV = jax.nn.softmax(logits_RV, axis=-1)
    return _smallest_threshold(
        logits_RV, lambda above_RV: jnp.sum(jnp.where(above_RV, probs_RV, 0.0), axis=-1) <= p
    )


def _smallest_threshold(
    logits_RV: jax.Array, is_valid: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Returns the smallest valid threshold [R, 1] for the logits of each row, or -inf.

    Args:
      logits_RV: Logits of each row.
      is_valid: Function that takes a mask [R, V] of the logits that exceed a threshold and returns
        a bool array [R] that is True for rows whose threshold is valid. It must be monotonic: if a
        threshold is valid, all larger thresholds are valid. The largest logit must be a valid
        threshold.
    """
    # Search over int32 values that have the same order as the floats.
    keys_RV = _convert_ordered(logits_RV.astype(jnp.float32), jnp.int32)
    smallest_key = _convert_ordered(jnp.float32(-jnp.inf), jnp.int32)

    # The invariant is that `low` is invalid and `high` is valid.
    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low_R, high_R = ends
        middle_R = (low_R & high_R) + ((low_R ^ high_R) >> 1)  # The mean, without overflow.
        is_valid_R = is_valid(keys_RV > middle_R[:, None])
        return jnp.where(is_valid_R, low_R, middle_R), jnp.where(is_valid_R, middle_R, high_R)

    high_R = jnp.max(keys_RV, axis=-1)
    ends = varying_alike((jnp.full_like(high_R, smallest_key - 1), high_R))
    high_R = jnp.maximum(jax.lax.fori_loop(0, 32, halve, ends)[1], smallest_key)
    return _convert_ordered(high_R, jnp.float32)[:, None]


def _convert_ordered(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Converts float32 to int32 with the same order, or back.

    If the sign bit is set, all other bits are flipped.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jax.lax.bitcast_convert_type(bits ^ ((bits >> 31) & 0x7FFFFFFF), dtype)
