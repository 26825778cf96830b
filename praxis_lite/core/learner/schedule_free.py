"""The weights to evaluate with when an optimizer trains at another point than its best.

Schedule-free optimizers (Defazio et al. 2024, "The Road Less Scheduled") take gradients at y, step
at z, and their result is x, the average of the z: y = (1 - b1) z + b1 x. optax keeps y as the
parameters and z as a slot; x is worked out of the two here. An evaluation of y would show worse
numbers than the run has reached.

    optimizer=fdl.Partial(optax.contrib.schedule_free_adamw, b1=0.95, weight_decay=0.1),
    learning_rate=fdl.Config(optax.warmup_constant_schedule, init_value=0.0, peak_value=2.5e-3,
                             warmup_steps=100),

Slots: z and the second moment, each of the weight's shape: as many bytes as Adam's two. optax's
defaults are b1 0.9 (the paper's), b2 0.999, eps 1e-8, weight_decay 0, and in the average a weight
of max(rate so far)^2, where "so far" includes the next update's. A warmup is the schedule's, or
`warmup_steps` if the rate is a number. Keep the weights in float32: optax sums the average's in
their dtype, and a bfloat16 sum stops growing after some 256 steps. z starts as a copy of the
weights: weights that are replaced later need fresh slots.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import ScheduleFreeState

PyTree = Any


def has_averages(opt_state: PyTree) -> bool:
    """Returns True if `evaluation_params` finds averaged weights in an optax state, or shapes."""
    return any(map(_is_schedule_free, jax.tree.leaves(opt_state, is_leaf=_is_schedule_free)))


def evaluation_params(opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns the averaged weights where `opt_state` holds them, else `params` as they are.

    The dtypes are those of `params`. Before the first update they come back bit for bit.

    Args:
      opt_state: an optax state, of single weights or of a stack that `jax.vmap` went over, with the
        state of `optax.contrib.schedule_free` anywhere in it: in a chain, a mask, a partition.
      params: the nested dict that the optimizer updates.
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
            return y  # The weights, or subtree, of another optimizer.
        b1 = state.b1.astype(jnp.float32)
        b1 = b1.reshape(b1.shape + (1,) * (y.ndim - b1.ndim))  # One per layer of a stack.
        y_f32 = y.astype(jnp.float32)
        # As a difference: where y is z, so is x, without rounding.
        return (y_f32 + (1.0 / b1 - 1.0) * (y_f32 - z.astype(jnp.float32))).astype(y.dtype)

    return jax.tree.map(
        average, state.z, params, is_leaf=lambda node: isinstance(node, optax.MaskedNode)
    )
