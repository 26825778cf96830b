"""Dense layers: linear, bias, feed-forward, MLP. Names and numerics are Pax's."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.errors import ConfigError, did_you_mean
from praxis_lite.sharding import SplitDims, constrain
from praxis_lite.weights import BaseLayer, Initializer, require_positive, xavier, zeros

# D input dims, F output dims.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,  # the tanh approximation, Pax's default
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "identity": lambda x: x,
}


def activation_fn(name: str, layer: object) -> Callable[[jax.Array], jax.Array]:
    """Returns the activation called `name`.

    Raises:
      ConfigError: no activation has that name; names the layer's class and the choices.
    """
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"{type(layer).__name__}.activation is {name!r}; wanted is one of "
            f"{sorted(ACTIVATIONS)}.{did_you_mean(str(name), ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


class Linear(BaseLayer):
    """Returns `inputs @ w`: [..., input_dims] -> [..., output_dims]."""

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

    def __call__(self, inputs: jax.Array) -> jax.Array:
        outputs = jnp.einsum("...d,df->...f", inputs, self.w[...].astype(inputs.dtype))
        return constrain(outputs, self.activation_split_dims_mapping)


class Bias(BaseLayer):
    """Returns `inputs + b`: [..., dims] -> [..., dims]."""

    def __init__(
        self,
        dims: int,
        *,
        weight_split_dims_mapping: SplitDims = None,
        activation_split_dims_mapping: SplitDims = None,
        rngs: nnx.Rngs,
    ):
        require_positive(self, dims=dims)
        self.b = self.weight((dims,), weight_split_dims_mapping, init=zeros, rngs=rngs)
        self.activation_split_dims_mapping = activation_split_dims_mapping

    def __call__(self, inputs: jax.Array) -> jax.Array:
        b = self.b[...].astype(inputs.dtype)
        outputs = inputs + b.reshape((1,) * (inputs.ndim - 1) + b.shape)
        return constrain(outputs, self.activation_split_dims_mapping)


class FeedForward(BaseLayer):
    """Returns `activation(inputs @ w + b)`: [..., input_dims] -> [..., output_dims].

    The bias splits as the weight's output dim does.
    """

    def __init__(
        self,
        input_dims: int,
        output_dims: int,
        *,
        has_bias: bool = True,
        activation: str = "relu",
        weight_split_dims_mapping: SplitDims = None,
        activation_split_dims_mapping: SplitDims = None,
        rngs: nnx.Rngs,
    ):
        require_positive(self, input_dims=input_dims, output_dims=output_dims)
        self.linear = Linear(
            input_dims,
            output_dims,
            weight_split_dims_mapping=weight_split_dims_mapping,
            activation_split_dims_mapping=activation_split_dims_mapping,
            rngs=rngs,
        )
        output_split = tuple(weight_split_dims_mapping or ())[1:2]
        self.bias = (
            Bias(output_dims, weight_split_dims_mapping=output_split, rngs=rngs)
            if has_bias
            else None
        )
        activation_fn(activation, self)
        self.activation = activation

    def __call__(self, inputs: jax.Array) -> jax.Array:
        outputs = self.linear(inputs)
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
        activation: str = "relu",
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
