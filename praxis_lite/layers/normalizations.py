"""Layer norm, RMS norm and weight norm in float32, with Pax's names and numerics."""

import abc
import math

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.errors import is_number, require
from praxis_lite.core.sharding.split_dims import constrain
from praxis_lite.layers.base.base_layer import BaseLayer, ones, zeros
from praxis_lite.layers.base.calls import require_positive
from praxis_lite.layers.base.dims import SplitSetting, splits
from praxis_lite.layers.base.result_types import elementwise, reshard_like


def check_epsilon(layer: object, epsilon: float) -> None:
    """Checks a norm's epsilon.

    Raises:
      ConfigError: Epsilon is not a non-negative number.
    """
    is_valid = is_number(epsilon) and 0.0 <= epsilon < math.inf
    require(is_valid, f"{type(layer).__name__}.epsilon", epsilon, "a non-negative number")


class Norm(BaseLayer):
    """Base class of norms, which all take the same arguments and are therefore interchangeable."""

    @abc.abstractmethod
    def __call__(
        self,
        inputs: jax.Array,
        paddings: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the normalized inputs.

        Args:
          inputs: [..., dim].
          paddings: [...], or only its leading dims; 1.0 for padding. Norms over only the last dim
            ignore paddings.
          key: Random key, passed only in training, for norms with batch statistics.
        """


class _LastDimNorm(Norm):
    """Normalizes inputs [..., dim] over the last dim, and returns them in their dtype."""

    splits = splits(weight=(None,), activation=())

    def __call__(
        self,
        inputs: jax.Array,
        paddings: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
    ) -> jax.Array:
        outputs = self._normalized(inputs.astype(jnp.float32)).astype(inputs.dtype)
        return constrain(outputs, self.activation_split_dims_mapping)

    @abc.abstractmethod
    def _normalized(self, x: jax.Array) -> jax.Array:
        """Returns the normalized float32 inputs."""


class LayerNorm(_LastDimNorm):
    """Computes `(x - mean) / sqrt(variance + epsilon) * scale + bias` over the last dim.

    Outputs have the shape and dtype of the inputs. Statistics, scale and bias are always computed
    in float32, as with Pax's `reductions_in_fp32`. Ba et al. 2016, arXiv:1607.06450.

    Args:
      dim: Size of the last dim.
      direct_scale: Whether the stored weight is the scale. If False, the scale is 1 + the stored
        weight, so that weight decay pulls it towards 1.
      epsilon: Added to the variance.
      use_scale: Whether to multiply by a learned scale.
      use_bias: Whether to add a learned bias.
      weight_split_dims_mapping: Sharding of scale and bias, [dim].
    """

    def __init__(
        self,
        dim: int,
        *,
        direct_scale: bool = False,
        epsilon: float = 1e-6,
        use_scale: bool = True,
        use_bias: bool = True,
        rngs: nnx.Rngs,
        weight_split_dims_mapping: SplitSetting = None,
        activation_split_dims_mapping: SplitSetting = None,
    ):
        require_positive(self, dim=dim)
        check_epsilon(self, epsilon)
        dims, init = self.dims(dim), ones if direct_scale else zeros
        self.scale = self.weight(dims, init=init, rngs=rngs) if use_scale else None
        self.bias = self.weight(dims, init=zeros, rngs=rngs) if use_bias else None
        self.direct_scale, self.epsilon = direct_scale, epsilon

    def _normalized(self, x: jax.Array) -> jax.Array:
        mean = jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)
        outputs = (x - mean) * jax.lax.rsqrt(variance + self.epsilon)
        if self.scale is not None:
            scale = _to_rank(self.scale[...], x)
            outputs *= scale if self.direct_scale else 1.0 + scale
        return outputs if self.bias is None else outputs + _to_rank(self.bias[...], x)


class RmsNorm(_LastDimNorm):
    """Computes `x / sqrt(mean(x^2) + epsilon) * scale` over the last dim.

    Outputs have the shape and dtype of the inputs. Intermediate values are float32, as with Pax's
    `intermediate_dtype`. Zhang and Sennrich 2019, arXiv:1910.07467.

    Args:
      dim: Size of the last dim.
      epsilon: Added to the mean of squares.
      direct_scale: Whether the stored weight is the scale. If False, the scale is 1 + the stored
        weight, as in Gemma.
      weight_split_dims_mapping: Sharding of the scale, [dim].
    """

    def __init__(
        self,
        dim: int,
        *,
        epsilon: float = 1e-6,
        direct_scale: bool = True,
        rngs: nnx.Rngs,
        weight_split_dims_mapping: SplitSetting = None,
        activation_split_dims_mapping: SplitSetting = None,
    ):
        require_positive(self, dim=dim)
        check_epsilon(self, epsilon)
        init = ones if direct_scale else zeros
        self.scale = self.weight(self.dims(dim), init=init, rngs=rngs)
        self.direct_scale, self.epsilon = direct_scale, epsilon

    def _normalized(self, x: jax.Array) -> jax.Array:
        scale = _to_rank(self.scale[...], x)
        return _over_rms(x, self.epsilon) * (scale if self.direct_scale else 1.0 + scale)


class RmsNormNoScale(_LastDimNorm):
    """Computes `x / sqrt(mean(x^2) + epsilon)` over the last dim: RmsNorm without a weight.

    Args:
      dim: Unused; accepted so that this norm can replace other norms. The default is Pax's.
      epsilon: Added to the mean of squares.
      rngs: Unused.
    """

    splits = splits(activation=())

    def __init__(
        self,
        dim: int = 0,
        *,
        epsilon: float = 1e-6,
        rngs: nnx.Rngs | None = None,
        activation_split_dims_mapping: SplitSetting = None,
    ):
        check_epsilon(self, epsilon)
        self.epsilon = epsilon

    def _normalized(self, x: jax.Array) -> jax.Array:
        return _over_rms(x, self.epsilon)


class IdentityNorm(Norm):
    """Returns its inputs unchanged; for templates that require a norm."""

    def __init__(self, dim: int = 0, *, rngs: nnx.Rngs | None = None):
        pass

    def __call__(
        self,
        inputs: jax.Array,
        paddings: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
    ) -> jax.Array:
        return inputs


class WeightNormL2(BaseLayer):
    """Rescales the columns of a weight [..., dim] to length 1 + g, for `Conv2D.weight_norm_tpl`.

    Salimans and Kingma 2016, arXiv:1602.07868.
    """

    splits = splits(weight=(None,))

    def __init__(
        self,
        dim: int,
        *,
        rngs: nnx.Rngs,
        weight_split_dims_mapping: SplitSetting = None,
    ):
        require_positive(self, dim=dim)
        self.g = self.weight(self.dims(dim), init=zeros, rngs=rngs)

    def __call__(self, w: jax.Array) -> jax.Array:
        squares = jnp.sum(jnp.square(w), axis=tuple(range(w.ndim - 1)), keepdims=True)
        return w * jax.lax.rsqrt(squares + 1e-12) * (1.0 + _to_rank(self.g[...], w))


def _to_rank(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Reshapes a weight [dim] to float32 [1, ..., 1, dim], to broadcast with `x`."""
    weight = elementwise(weight).astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return reshard_like(weight, x)


def _over_rms(x: jax.Array, epsilon: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)
