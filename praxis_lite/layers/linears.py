"""Dense layers: linear, bias, feed-forward, MLP. Names and numerics are Pax's."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from praxis_lite.layers.activations import ActivationFn, activation_fn
from praxis_lite.layers.base_layer import (
    BaseLayer,
    Initializer,
    broadcast_as,
    require_positive,
    xavier,
)
from praxis_lite.sharding import SplitDims, constrain

# D input dims, F output dims.


class Linear(BaseLayer):
    """Returns `inputs @ w`: [..., input_dims] -> [..., output_dims].

    Raises:
      ConfigError: a size is not positive.
    """

    def __init__(
        self,
        input_dims: int,
        output_dims: int,
        *,
        weight_init: Initializer = xavier,
        weight_split_dims_mapping: SplitDims = None,
        activation_split_dims_mapping: SplitDims = None,
        rngs: nnx.Rngs,
    ):
        require_positive(self, input_dims=input_dims, output_dims=output_dims)
        self.w = self.weight(
            (input_dims, output_dims), weight_split_dims_mapping, init=weight_init, rngs=rngs
        )
        self.activation_split_dims_mapping = activation_split_dims_mapping

    def factors(self, inputs: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        """Returns pairs of arrays ([..., d], [d, F]) whose products add up to the outputs.

        For who takes the outputs a part of F at a time: a chunked softmax.
        """
        return [(inputs, self.w[...])]

    def column_factors(self) -> list[tuple[jax.Array, jax.Array | None]]:
        """Returns pairs ([F, d], [d, D]) whose products add up to w transposed; None: identity.

        For who takes a few columns of w: a softmax that embeds ids.
        """
        return [(self.w[...].T, None)]

    def __call__(self, inputs: jax.Array) -> jax.Array:
        outputs = jnp.einsum("...d,df->...f", inputs, self.w[...].astype(inputs.dtype))
        return constrain(outputs, self.activation_split_dims_mapping)


class Bias(BaseLayer):
    """Returns `inputs + b`: [..., dims] -> [..., dims].

    Args:
      bias_init: what each element of b starts with.

    Raises:
      ConfigError: dims is not positive.
    """

    def __init__(
        self,
        dims: int,
        *,
        bias_init: float = 0.0,
        weight_split_dims_mapping: SplitDims = None,
        activation_split_dims_mapping: SplitDims = None,
        rngs: nnx.Rngs,
    ):
        require_positive(self, dims=dims)
        self.b = self.weight(
            (dims,),
            weight_split_dims_mapping,
            init=jax.nn.initializers.constant(bias_init),
            rngs=rngs,
        )
        self.activation_split_dims_mapping = activation_split_dims_mapping

    def __call__(self, inputs: jax.Array) -> jax.Array:
        b = self.b[...].reshape((1,) * (inputs.ndim - 1) + self.b.shape)
        outputs = inputs + broadcast_as(b, inputs)
        return constrain(outputs, self.activation_split_dims_mapping)


class FeedForward(BaseLayer):
    """Returns `activation(inputs @ w + b)`: [..., input_dims] -> [..., output_dims].

    The bias splits as the weight's output dim does.

    Args:
      activation: a name or a function, see `activation_fn`.
      bias_init: what each element of the bias starts with.
      checkpoint_str: a name of `inputs @ w`, by which a remat policy can keep it.
      linear_tpl: the product; called with the sizes, `weight_init`, the splits and `rngs`.
      bias_tpl: the sum; called with output_dims, `bias_init`, its split and `rngs`.
      weight_split_dims_mapping: of the weight, [input_dims, output_dims].

    Raises:
      ConfigError: a size is not positive, or no activation has that name.
    """

    def __init__(
        self,
        input_dims: int,
        output_dims: int,
        *,
        has_bias: bool = True,
        activation: str | ActivationFn = "relu",
        weight_init: Initializer = xavier,
        bias_init: float = 0.0,
        checkpoint_str: str | None = None,
        linear_tpl: Callable[..., Any] = Linear,
        bias_tpl: Callable[..., Any] = Bias,
        weight_split_dims_mapping: SplitDims = None,
        activation_split_dims_mapping: SplitDims = None,
        rngs: nnx.Rngs,
    ):
        require_positive(self, input_dims=input_dims, output_dims=output_dims)
        activation_fn(activation, self)
        self.linear = linear_tpl(
            input_dims,
            output_dims,
            weight_init=weight_init,
            weight_split_dims_mapping=weight_split_dims_mapping,
            activation_split_dims_mapping=activation_split_dims_mapping,
            rngs=rngs,
        )
        bias_split = tuple(weight_split_dims_mapping or ())[1:2]
        self.bias = (
            bias_tpl(
                output_dims, bias_init=bias_init, weight_split_dims_mapping=bias_split, rngs=rngs
            )
            if has_bias
            else None
        )
        self.activation, self.checkpoint_str = activation, checkpoint_str

    def __call__(self, inputs: jax.Array) -> jax.Array:
        outputs = self.linear(inputs)
        if self.checkpoint_str is not None:
            outputs = checkpoint_name(outputs, self.checkpoint_str)
        if self.bias is not None:
            outputs = self.bias(outputs)
        return activation_fn(self.activation, self)(outputs)


class Mlp(BaseLayer):
    """Returns class logits of flattened inputs: [B, ...] -> [B, output_dims].

    Args:
      input_dims: product of the input's dims but the first.
      hidden_dims: width of each hidden layer.
      weight_split_dims_mapping: of each layer's weight, [input, output].
      activation_split_dims_mapping: of each hidden activation, [batch, hidden].
    """

    def __init__(
        self,
        input_dims: int,
        hidden_dims: Sequence[int],
        output_dims: int,
        *,
        activation: str | ActivationFn = "relu",
        weight_split_dims_mapping: SplitDims = None,
        activation_split_dims_mapping: SplitDims = None,
        rngs: nnx.Rngs,
    ):
        require_positive(self, input_dims=input_dims, output_dims=output_dims)
        for i, width in enumerate(hidden_dims):
            require_positive(self, **{f"hidden_dims[{i}]": width})
        activation_fn(activation, self)
        widths = [input_dims, *hidden_dims]
        self.hidden = nnx.List(
            FeedForward(
                width,
                next_width,
                activation=activation,
                weight_split_dims_mapping=weight_split_dims_mapping,
                activation_split_dims_mapping=activation_split_dims_mapping,
                rngs=rngs,
            )
            for width, next_width in zip(widths, widths[1:], strict=False)
        )
        self.logits = FeedForward(
            widths[-1],
            output_dims,
            activation="identity",
            weight_split_dims_mapping=weight_split_dims_mapping,
            rngs=rngs,
        )

    def __call__(self, inputs: jax.Array) -> jax.Array:
        outputs = inputs.reshape(inputs.shape[0], -1)
        for layer in self.hidden:
            outputs = layer(outputs)
        return self.logits(outputs)
