"""Pax's Lion: optax's, computed in the dtype of gradients, with the momentum stored in bfloat16."""

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
    """The momentum m of the gradients, in `m_dtype`."""

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

    It is `optax.lion`, except for a bfloat16 momentum, which optax rounds once more. The default
    `weight_decay` of optax is 1e-3.

    Args:
      learning_rate: A number, or a schedule of the number of updates.
      beta1: The fraction of the momentum in the average whose sign is used.
      beta2: The decay rate of the momentum.
      clip_threshold: The maximum root mean square of a tensor's update before the learning rate is
        applied. Without clipping it is at most 1, so only a threshold below 1 has an effect; 0: no
        clipping.
      weight_decay: The factor of the weights, all of them, that is added after clipping. To exclude
        weights, see `regularized`.
      m_dtype: The dtype of the stored momentum.

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
        # The count is required by the type, but not used.
        inner = optax.ScaleByLionState(count=jnp.zeros((), jnp.int32), mu=m)
        updates, inner = signs.update(grads, inner, params)
        return updates, LionState(optax.tree.cast(inner.mu, m_dtype))

    direction = optax.GradientTransformation(init, update)
    return build_clipped_optimizer(direction, learning_rate, clip_threshold, weight_decay)
