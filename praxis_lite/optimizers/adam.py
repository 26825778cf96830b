"""Pax's Adam: the moments it stores are free of bias, and each tensor's update is clipped."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from praxis_lite.optimizers.optimizer_settings import (
    require_decay_rates,
    require_not_negative,
    stepped,
)

PyTree = Any


class AdamState(NamedTuple):
    """count: updates made; m, v: float32 moments of the gradients, their bias corrected."""

    count: jax.Array
    m: PyTree
    v: PyTree


def adam(
    learning_rate: optax.ScalarOrSchedule,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-6,
    epsilon_root: float = 0.0,
    clip_threshold: float = 1.0,
    weight_decay: float = 0.0,
) -> optax.GradientTransformation:
    """Returns Pax's Adam: m / (sqrt(v + epsilon_root) + epsilon), clipped, plus weight decay.

    Up to the clipping it is `optax.adam`, which is also what Pax's `sharded_adam=False` is. The
    slots differ: Pax corrects the decay rates for the bias (Shazeer and Stern 2018, "Adafactor",
    section 7.1), optax what is read from the slots, so optax's m is (1 - beta1**count) times this
    one; made of optax's, this v would be 2e-5 off after 1,000 updates. Slots are float32 whatever
    the weights are. Pax's `maybe_inf_to_nan` is not needed: the learner skips a step whose gradient
    is not finite.

    Args:
      learning_rate: a number, or a schedule of the number of updates made.
      beta1: decay rate of m.
      beta2: decay rate of v.
      epsilon: added to the root; optax's default is 1e-8.
      epsilon_root: added under the root.
      clip_threshold: the most that the root mean square of a tensor's update may be, before the
        learning rate; 0: no clipping, as in optax.
      weight_decay: times the weights, all of them, added after the clipping. For one that leaves
        weights out, see `regularized`.

    Raises:
      ConfigError: a setting is out of range.
    """
    require_decay_rates("adam", beta1=beta1, beta2=beta2)
    require_not_negative(
        "adam", epsilon=epsilon, epsilon_root=epsilon_root, clip_threshold=clip_threshold,
        weight_decay=weight_decay,
    )  # fmt: skip

    def init(params: PyTree) -> AdamState:
        zeros = optax.tree.zeros_like(params, dtype=jnp.float32)
        return AdamState(count=jnp.zeros((), jnp.int32), m=zeros, v=zeros)

    def update(
        grads: PyTree, state: AdamState, params: PyTree | None = None
    ) -> tuple[PyTree, AdamState]:
        del params
        decay1, decay2 = (_bias_corrected(beta, state.count) for beta in (beta1, beta2))
        m = optax.tree.update_moment(grads, state.m, decay1, 1)
        v = optax.tree.update_moment(grads, state.v, decay2, 2)
        updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v + epsilon_root) + epsilon), m, v)
        return updates, AdamState(optax.safe_increment(state.count), m, v)

    direction = optax.GradientTransformation(init, update)
    return stepped(direction, learning_rate, clip_threshold, weight_decay)


def _bias_corrected(beta: float, count: jax.Array) -> jax.Array:
    """Returns the decay rate with which a moment, begun with the first gradient, has no bias."""
    t = count.astype(jnp.float32)
    return beta * (1.0 - beta**t) / (1.0 - beta ** (t + 1.0))
