"""Variables that stages assign, kept from tick to tick: those of each microbatch.

The stages work on a microbatch in different ticks; its loss, which may be of them, comes last.
"""

import jax
import jax.numpy as jnp

from praxis_lite.layers.stacking.pipelining.ticks import Values

# R repeats, S stages, P places of layers of one stage in one repeat, M microbatches. `values` are
# [R, S, P, ...], as a model has them; `kept` are [S, M, R, P, ...].


def room_for(values: Values, num_microbatches: int) -> Values:
    """Returns zeros to keep values of all microbatches."""
    return {
        path: jnp.zeros((a.shape[1], num_microbatches, a.shape[0], *a.shape[2:]), a.dtype)
        for path, a in values.items()
    }


def with_a_stage(
    kept: Values, new: Values, microbatch: jax.Array, repeat: jax.Array, is_valid: jax.Array
) -> Values:
    """Returns a stage's kept values [M, R, P, ...] with those of its tick, [P, ...], if it counts.

    Of `new` those that are not kept are left out.
    """
    return {
        path: a.at[microbatch, repeat].set(jnp.where(is_valid, new[path], a[microbatch, repeat]))
        for path, a in kept.items()
    }


def of_microbatch(kept: Values, microbatch: jax.Array) -> Values:
    """Returns the values of a microbatch."""
    return {path: jnp.moveaxis(a[:, microbatch], 0, 1) for path, a in kept.items()}


def with_microbatch(
    kept: Values, values: Values, microbatch: jax.Array, is_valid: jax.Array
) -> Values:
    """Returns kept values with those of a microbatch, if it counts."""
    return {
        path: a.at[:, microbatch].set(
            jnp.where(is_valid, jnp.moveaxis(values[path], 1, 0), a[:, microbatch])
        )
        for path, a in kept.items()
    }
