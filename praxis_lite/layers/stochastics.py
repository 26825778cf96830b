"""Dropout, with its key as an argument."""

import jax
import jax.numpy as jnp

from praxis_lite.errors import ConfigError
from praxis_lite.weights import BaseLayer


class Dropout(BaseLayer):
    """Returns inputs of which a share is zeroed and the rest scaled up; all of them without a key.

    Srivastava et al. 2014. The mask depends on the key and the shape alone, not on the mesh
    (partitionable threefry).
    """

    def __init__(self, dropout_prob: float = 0.0):
        if not 0.0 <= dropout_prob < 1.0:
            raise ConfigError(f"Dropout.dropout_prob is {dropout_prob}; wanted is 0 <= p < 1.")
        self.dropout_prob = dropout_prob

    def __call__(self, inputs: jax.Array, key: jax.Array | None) -> jax.Array:
        if key is None or self.dropout_prob == 0.0:
            return inputs
        keep = jax.random.bernoulli(key, 1.0 - self.dropout_prob, inputs.shape)
        return jnp.where(keep, inputs / (1.0 - self.dropout_prob), 0.0).astype(inputs.dtype)
