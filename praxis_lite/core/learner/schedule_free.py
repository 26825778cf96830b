"""Evaluation weights of schedule-free optimizers, which train at other weights than their best.

Schedule-free optimizers (Defazio et al. 2024, "The Road Less Scheduled") compute gradients at y,
update z, and average the z into x: y = (1 - b1) z + b1 x. optax stores y as the parameters and z as
a slot; this file computes x from the two. Evaluating y would report worse metrics than the run has
reached.

    optimizer=fdl.Partial(optax.contrib.schedule_free_adamw, b1=0.95, weight_decay=0.1),
    learning_rate=fdl.Config(optax.warmup_constant_schedule, init_value=0.0, peak_value=2.5e-3,
                             warmup_steps=100),

The slots are z and the second moment, each of the weight's shape: as many bytes as Adam's. optax's
defaults are b1 0.9 (as in the paper), b2 0.999, eps 1e-8, weight_decay 0; the average is weighted
by max(rate so far)^2, where "so far" includes the next update's. Warmup is part of the schedule,
or `warmup_steps` if the rate is a number. Store the weights in float32: optax sums the average's
weights in their dtype, and a bfloat16 sum stops growing after about 256 steps. z starts as a copy
of the weights, so replacing the weights later requires new slots.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import ScheduleFreeState

PyTree = Any


def has_averages(opt_state: PyTree) -> bool:
    """Returns whether an optax state, or its shapes, contains weights for `evaluation_params`."""
    return any(map(_is_schedule_free, jax.tree.leaves(opt_state, is_leaf=_is_schedule_free)))


def evaluation_params(opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns the averaged weights if `opt_state` has them, otherwise `params`.

    Their dtypes are those of `params`. Before the first update they equal `params` bit for bit.

    Args:
      opt_state: An optax state, of separate weights or of a stack updated by `jax.vmap`, with the
        state of `optax.contrib.schedule_free` anywhere in it: in a chain, a mask, a partition.
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
            return y  # A weight or subtree of another optimizer.
        b1 = state.b1.astype(jnp.float32)
        b1 = b1.reshape(b1.shape + (1,) * (y.ndim - b1.ndim))  # One per layer of a stack.
        y_f32 = y.astype(jnp.float32)
        # In this form x equals z without rounding where y equals z.
        return (y_f32 + (1.0 / b1 - 1.0) * (y_f32 - z.astype(jnp.float32))).astype(y.dtype)

    return jax.tree.map(
        average, state.z, params, is_leaf=lambda node: isinstance(node, optax.MaskedNode)
    )
