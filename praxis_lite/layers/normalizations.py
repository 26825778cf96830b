"""Layer norm and RMS norm, with statistics in float32. Numerics are Pax's."""

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.sharding import SplitDims, constrain
from praxis_lite.weights import BaseLayer, ones, require_positive, zeros


class LayerNorm(BaseLayer):
    """Returns `(x - mean) / sqrt(var + epsilon) * (1 + scale) + bias` over the last dim.

    As Pax's LayerNorm, the scale is stored less one. Ba et al. 2016, arXiv:1607.06450.
    """

    def __init__(
        self,
        dim: int,
        *,
        epsilon: float = 1e-6,
        weight_split_dims_mapping: SplitDims = None,
        activation_split_dims_mapping: SplitDims = None,
        rngs: nnx.Rngs,
    ):
        require_positive(self, dim=dim)
        self.scale = self.weight((dim,), weight_split_dims_mapping, init=zeros, rngs=rngs)
        self.bias = self.weight((dim,), weight_split_dims_mapping, init=zeros, rngs=rngs)
        self.epsilon = epsilon
        self.activation_split_dims_mapping = activation_split_dims_mapping

    def __call__(self, inputs: jax.Array) -> jax.Array:
        x = inputs.astype(jnp.float32)
        mean = jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)
        normed = (x - mean) * jax.lax.rsqrt(variance + self.epsilon)
        lead = (1,) * (inputs.ndim - 1)
        scale, bias = self.scale[...].reshape(*lead, -1), self.bias[...].reshape(*lead, -1)
        outputs = (normed * (1.0 + scale) + bias).astype(inputs.dtype)
        return constrain(outputs, self.activation_split_dims_mapping)


class RmsNorm(BaseLayer):
    """Returns `x / sqrt(mean(x^2) + epsilon) * scale` over the last dim.

    Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    def __init__(
        self,
        dim: int,
        *,
        epsilon: float = 1e-6,
        weight_split_dims_mapping: SplitDims = None,
        activation_split_dims_mapping: SplitDims = None,
        rngs: nnx.Rngs,
    ):
        require_positive(self, dim=dim)
        self.scale = self.weight((dim,), weight_split_dims_mapping, init=ones, rngs=rngs)
        self.epsilon = epsilon
        self.activation_split_dims_mapping = activation_split_dims_mapping

    def __call__(self, inputs: jax.Array) -> jax.Array:
        x = inputs.astype(jnp.float32)
        normed = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon)
        scale = self.scale[...].reshape((1,) * (inputs.ndim - 1) + (-1,))
        return constrain((normed * scale).astype(inputs.dtype), self.activation_split_dims_mapping)
