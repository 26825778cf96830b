"""Dropout of elements, and of residual branches (stochastic depth)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import require
from praxis_lite.layers.base.base_layer import BaseLayer


class Dropout(BaseLayer):
    """Sets a random fraction of the inputs to zero and scales up the rest.

    Without a key, the inputs are returned unchanged. Srivastava et al. 2014. The mask depends only
    on the key and the shape, not on the mesh (partitionable threefry).

    Args:
      dropout_prob: Probability that an element is dropped; Pax's `1 - keep_prob`.
      noise_shape_broadcast_dims: Dims along which elements are dropped together.
    """

    def __init__(
        self, dropout_prob: float = 0.0, *, noise_shape_broadcast_dims: Sequence[int] = ()
    ):
        is_valid = 0.0 <= dropout_prob < 1.0
        require(is_valid, "Dropout.dropout_prob", dropout_prob, "0 <= p < 1")
        self.dropout_prob = dropout_prob
        self.noise_shape_broadcast_dims = tuple(noise_shape_broadcast_dims)

    def __call__(self, inputs: jax.Array, key: jax.Array | None) -> jax.Array:
        if key is None or self.dropout_prob == 0.0:
            return inputs
        shape = list(inputs.shape)
        for dim in self.noise_shape_broadcast_dims:
            shape[dim] = 1
        keep = jax.random.bernoulli(key, 1.0 - self.dropout_prob, shape)
        return jnp.where(keep, inputs / (1.0 - self.dropout_prob), 0.0)


class StochasticResidual(BaseLayer):
    """Computes `inputs + residual_weight * residual`, and drops the residuals of random examples.

    With a key, an example's residual is kept with probability `survival_prob` and then divided by
    `survival_prob`. Without a key, all residuals are kept. Stochastic depth, Huang et al. 2016,
    arXiv:1603.09382.

    Args:
      residual_weight: Factor that multiplies the residual.
      survival_prob: Probability that an example's residual is kept.
    """

    def __init__(self, *, residual_weight: float = 1.0, survival_prob: float = 1.0):
        require(
            0.0 < survival_prob <= 1.0,
            "StochasticResidual.survival_prob",
            survival_prob,
            "0 < p <= 1",
            "It is 1 - residual_droppath_prob: set 0 <= residual_droppath_prob < 1.",
        )
        self.residual_weight, self.survival_prob = residual_weight, survival_prob

    def __call__(self, inputs: jax.Array, residual: jax.Array, key: jax.Array | None) -> jax.Array:
        """Returns the sum, [B, ...].

        Args:
          inputs: [B, ...].
          residual: [B, ...].
          key: Random key in training, otherwise None.
        """
        if key is not None and self.survival_prob < 1.0:
            shape = (residual.shape[0], *(1,) * (residual.ndim - 1))
            keep = jax.random.bernoulli(key, self.survival_prob, shape)
            residual = jnp.where(keep, residual / self.survival_prob, 0.0).astype(residual.dtype)
        if self.residual_weight != 1.0:
            residual = residual * self.residual_weight
        return inputs + residual
