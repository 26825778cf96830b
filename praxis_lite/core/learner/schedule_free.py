"""Computes evaluation weights for schedule-free optimizers.

Schedule-free optimizers (Defazio et al. 2024, "The Road Less Scheduled") compute gradients at y,
update z, and average z over steps into x: y = (1 - b1) z + b1 x. optax stores y as the parameters
and z as a slot; this module computes x from these two. A model must be evaluated at x, because the
metrics at y are worse.

Store the weights in float32: optax sums the squares of learning rates in the weights' dtype, and a
bfloat16 sum stops growing after about 256 steps. z starts as a copy of the weights, so slots must
be reinitialized if the weights are replaced later.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import ScheduleFreeState

PyTree = Any


def has_averages(opt_state: PyTree) -> bool:
    """Returns whether an optax state (or its shapes) contains a schedule-free state."""
    return any(map(_is_schedule_free, jax.tree.leaves(opt_state, is_leaf=_is_schedule_free)))


def evaluation_params(opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns the averaged weights if `opt_state` is schedule-free, otherwise `params`.

    The averages have the dtypes of `params`. Before the first update, the averages are bitwise
    equal to `params`.

    Args:
      opt_state: An optax state for separate weights, or for a stack updated with `jax.vmap`. The
        state of `optax.contrib.schedule_free` may be nested in chains, masks and partitions.
      params: The nested dict that the optimizer updates.
    """
    for state in jax.tree.leaves(opt_state, is_leaf=_is_schedule_free):
        if _is_schedule_free(state):
            params = _averages(state, params)
    return params


def _is_schedule_free(node: Any) -> bool:
    return isinstance(node, ScheduleFreeState)


def _averages(state: ScheduleFreeState, params: PyTree) -> PyTree:
    def average(z: Any, y: Any) -> Any:
        if isinstance(z, optax.MaskedNode):
            return y  # Another optimizer updates this weight or subtree.
        b1 = state.b1.astype(jnp.float32)
        b1 = b1.reshape(b1.shape + (1,) * (y.ndim - b1.ndim))  # A stack has one b1 per layer.
        y_f32 = y.astype(jnp.float32)
        # Written this way, x equals z without rounding if y equals z.
        return (y_f32 + (1.0 / b1 - 1.0) * (y_f32 - z.astype(jnp.float32))).astype(y.dtype)

    return jax.tree.map(
        average, state.z, params, is_leaf=lambda node: isinstance(node, optax.MaskedNode)
    )
