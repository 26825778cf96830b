"""Pax's Lion: optax's, computed in the gradients' dtype, its momentum stored in bfloat16."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from praxis_lite.optimizers.optimizer_settings import (
    require_decay_rates,
    require_not_negative,
    stepped,
)

PyTree = Any


class LionState(NamedTuple):
    """m: momentum of the gradients, in `m_dtype`."""

    m: PyTree


def lion(
    learning_rate: optax.ScalarOrSchedule,
    *,
    beta1: float = 0.9,
    beta2: float = 0.99,
    clip_threshold: float = 1.0,
    weight_decay: float = 0.0,
    m_dtype: Any = jnp.bfloat16,
) -> optax.GradientTransformation:
    """Returns Pax's Lion (Chen et al. 2023, "Symbolic discovery of optimization algorithms").

    It is `optax.lion`, but for a momentum in bfloat16, which optax rounds once more on the way.
    optax's `weight_decay` is 1e-3 by default.

    Args:
      learning_rate: a number, or a schedule of the number of updates made.
      beta1: share of the momentum in what the sign is taken of.
      beta2: decay rate of the momentum.
      clip_threshold: the most that the root mean square of a tensor's update may be, before the
        learning rate. It is 1 or less without clipping, so only a threshold below 1 has an effect;
        0: no clipping.
      weight_decay: times the weights, all of them, added after the clipping. For one that leaves
        weights out, see `regularized`.
      m_dtype: of the momentum as it is stored.

    Raises:
      ConfigError: a setting is out of range.
    """
    require_decay_rates("lion", beta1=beta1, beta2=beta2)
    require_not_negative("lion", clip_threshold=clip_threshold, weight_decay=weight_decay)
    signs = optax.scale_by_lion(beta1, beta2)

    def init(params: PyTree) -> LionState:
        return LionState(optax.tree.zeros_like(params, dtype=m_dtype))

    def update(
        grads: PyTree, state: LionState, params: PyTree | None = None
    ) -> tuple[PyTree, LionState]:
        # Cast here: optax would compute in the dtype in which the momentum is stored.
        m = optax.tree.cast_like(state.m, grads)
        inner = optax.ScaleByLionState(count=jnp.zeros((), jnp.int32), mu=m)  # It counts in vain.
        updates, inner = signs.update(grads, inner, params)
        return updates, LionState(optax.tree.cast(inner.mu, m_dtype))

    direction = optax.GradientTransformation(init, update)
    return stepped(direction, learning_rate, clip_threshold, weight_decay)
