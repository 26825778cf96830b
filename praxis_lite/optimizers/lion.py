"""Pax's Lion: like optax's, but computed in the gradients' dtype, with a bfloat16 momentum."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from praxis_lite.optimizers.optimizer_settings import (
    build_clipped_optimizer,
    require_decay_rates,
    require_not_negative,
)

PyTree = Any


class LionState(NamedTuple):
    """Slots of Lion: the momentum m of the gradients, stored in `m_dtype`."""

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

    The updates are the same as with `optax.lion`, except that optax rounds a bfloat16 momentum one
    more time. In optax, `weight_decay` defaults to 1e-3.

    Args:
      learning_rate: A number, or a schedule that maps the number of updates to a rate.
      beta1: Weight of the momentum in the average whose sign is the update.
      beta2: Decay rate of the momentum.
      clip_threshold: Maximum root mean square of a tensor's update before the learning rate is
        applied, or 0 for no clipping. The root mean square is never above 1, so only thresholds
        below 1 have an effect.
      weight_decay: Weight decay factor for all weights. The decay is added after clipping. To
        exclude weights, use `regularized`.
      m_dtype: Dtype of the stored momentum.

    Raises:
      ConfigError: A setting is out of range.
    """
    require_decay_rates("lion", beta1=beta1, beta2=beta2)
    require_not_negative("lion", clip_threshold=clip_threshold, weight_decay=weight_decay)
    signs = optax.scale_by_lion(beta1, beta2)

    def init(params: PyTree) -> LionState:
        return LionState(optax.tree.zeros_like(params, dtype=m_dtype))

    def update(
        grads: PyTree, state: LionState, params: PyTree | None = None
    ) -> tuple[PyTree, LionState]:
        # Cast here, because optax would compute in the dtype of the stored momentum.
        m = optax.tree.cast_like(state.m, grads)
        # ScaleByLionState requires a count, but it is not used.
        inner = optax.ScaleByLionState(count=jnp.zeros((), jnp.int32), mu=m)
        updates, inner = signs.update(grads, inner, params)
        return updates, LionState(optax.tree.cast(inner.mu, m_dtype))

    direction = optax.GradientTransformation(init, update)
    return build_clipped_optimizer(direction, learning_rate, clip_threshold, weight_decay)
