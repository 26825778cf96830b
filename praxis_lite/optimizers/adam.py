"""Pax's Adam, which stores bias-corrected moments and clips the update for each tensor."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from praxis_lite.optimizers.optimizer_settings import (
    build_clipped_optimizer,
    require_decay_rates,
    require_not_negative,
)

PyTree = Any


class AdamState(NamedTuple):
    """Slots of Adam: the number of updates, and bias-corrected float32 moments m and v."""

    count: jax.Array  # type: ignore[assignment]  # Hides tuple.count, as in optax.
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

    Without clipping, the updates are the same as with `optax.adam` and with Pax's
    `sharded_adam=False`, but the slots differ. Pax corrects the decay rates for the bias (Shazeer
    and Stern 2018, "Adafactor", section 7.1). optax instead corrects the values that it reads from
    the slots, so optax's m is (1 - beta1**count) times Pax's m. Do not convert v from optax's
    slots: the error would be 2e-5 after 1,000 updates. Slots are float32 for weights of any dtype.
    Pax's `maybe_inf_to_nan` is not needed, because the learner skips steps with gradients that are
    not finite.

    Args:
      learning_rate: A number, or a schedule that maps the number of updates to a rate.
      beta1: Decay rate of m.
      beta2: Decay rate of v.
      epsilon: Constant that is added to the square root. In optax, the default is 1e-8.
      epsilon_root: Constant that is added inside the square root.
      clip_threshold: Maximum root mean square of a tensor's update before the learning rate is
        applied, or 0 for no clipping, as in optax.
      weight_decay: Weight decay factor for all weights. The decay is added after clipping. To
        exclude weights, use `regularized`.

    Raises:
      ConfigError: A setting is out of range.
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
    return build_clipped_optimizer(direction, learning_rate, clip_threshold, weight_decay)


def _bias_corrected(beta: float, count: jax.Array) -> jax.Array:
    """Returns the decay rate for the next update that keeps the moment unbiased."""
    t = count.astype(jnp.float32)
    return beta * (1.0 - beta**t) / (1.0 - beta ** (t + 1.0))
