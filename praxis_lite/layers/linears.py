"""Linear, Bias, FeedForward, Mlp and Einsum layers, with Pax's names."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.split_dims import constrain
from praxis_lite.layers.activations import ActivationFn, activation_fn
from praxis_lite.layers.base.activation_names import named
from praxis_lite.layers.base.base_layer import BaseLayer, Initializer, broadcast_as, xavier, zeros
from praxis_lite.layers.base.calls import require_positive
from praxis_lite.layers.base.dense import Dense
from praxis_lite.layers.base.dims import Dim, SplitSetting, matrix_of, splits
from praxis_lite.layers.initializers import WeightInit

# D input dims, F output dims.


class Linear(Dense):
    """Computes `inputs @ w`: [..., input_dims] -> [..., output_dims]."""

    splits = splits(weight=(None, None), activation=())
    equation = "...d,df->...f"

    def __init__(
        self,
        input_dims: int,
        output_dims: int,
        *,
        weight_init: Initializer = xavier,
        rngs: nnx.Rngs,
        weight_split_dims_mapping: SplitSetting = None,
        activation_split_dims_mapping: SplitSetting = None,
    ):
        require_positive(self, input_dims=input_dims, output_dims=output_dims)
        self.make(*self.dims(input_dims, output_dims), init=weight_init, rngs=rngs)

    def factors(self, inputs: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        """Returns pairs ([..., d], [d, F]) whose products add up to the outputs.

        A chunked softmax uses these pairs to compute logits, one chunk of F at a time.
        """
        return self.product.factors(self, inputs)

    def column_factors(self) -> list[tuple[jax.Array, jax.Array | None]]:
        """Returns pairs ([F, d], [d, D]) whose products add up to the transpose of w.

        A second factor of None is the identity. A softmax that embeds ids reads rows of the first
        factors.
        """
        return self.product.column_factors(self)


class Bias(BaseLayer):
    """Computes `inputs + b`: [..., dims] -> [..., dims].

    Args:
      dims: Size of the last dim.
      bias_init: Initial value of all elements of b.
      rngs: The random streams for initialization.
    """

    splits = splits(weight=(None,), activation=())

    def __init__(
        self,
        dims: int,
        *,
        bias_init: float = 0.0,
        rngs: nnx.Rngs,
        weight_split_dims_mapping: SplitSetting = None,
        activation_split_dims_mapping: SplitSetting = None,
    ):
        require_positive(self, dims=dims)
        init = jax.nn.initializers.constant(bias_init)
        self.b = self.weight(self.dims(dims), init=init, rngs=rngs)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        outputs = inputs + broadcast_as(self.b[...], inputs)
        return constrain(outputs, self.activation_split_dims_mapping)


class FeedForward(BaseLayer):
    """Computes `activation(inputs @ w + b)`: [..., input_dims] -> [..., output_dims].

    The bias is sharded like the weight's output dim.

    Args:
      input_dims: Size of the last input dim.
      output_dims: Size of the last output dim.
      has_bias: Whether to add a bias.
      activation: A name or a function; see `activation_fn`.
      weight_init: Initializer of the weight.
      bias_init: Initial value of all elements of the bias.
      checkpoint_str: Checkpoint name of `inputs @ w`, for remat policies.
      linear_tpl: Template of the linear layer; called with the sizes, `weight_init`, the sharding
        of its outputs and `rngs`.
      bias_tpl: Template of the bias; called with output_dims, `bias_init` and `rngs`.
      weight_split_dims_mapping: Sharding of the weight, [input_dims, output_dims].
    """

    splits = splits(weight=(None, None), activation=())

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
        rngs: nnx.Rngs,
        weight_split_dims_mapping: SplitSetting = None,
        activation_split_dims_mapping: SplitSetting = None,
    ):
        require_positive(self, input_dims=input_dims, output_dims=output_dims)
        activation_fn(activation, self)
        D, F = self.dims(input_dims, output_dims)
        self.linear = linear_tpl(
            D,
            F,
            weight_init=weight_init,
            activation_split_dims_mapping=self.activation_split_dims_mapping,
            rngs=rngs,
        )
        self.bias = bias_tpl(F, bias_init=bias_init, rngs=rngs) if has_bias else None
        self.activation, self.checkpoint_str = activation, checkpoint_str

    def __call__(self, inputs: jax.Array) -> jax.Array:
        outputs = self.linear(inputs)
        if self.checkpoint_str is not None:
            outputs = named(outputs, self.checkpoint_str)
        if self.bias is not None:
            outputs = self.bias(outputs)
        return activation_fn(self.activation, self)(outputs)


class Mlp(BaseLayer):
    """Computes class logits from flattened inputs: [B, ...] -> [B, output_dims].

    Args:
      input_dims: Product of the input dims except the first.
      hidden_dims: Width of each hidden layer.
      output_dims: Number of classes.
      activation: Activation of the hidden layers.
      weight_split_dims_mapping: Sharding of each layer's weight, [input, output].
      activation_split_dims_mapping: Sharding of each hidden activation, [batch, hidden].
    """

    splits = splits(weight=(None, None), activation=())

    def __init__(
        self,
        input_dims: int,
        hidden_dims: Sequence[int],
        output_dims: int,
        *,
        activation: str | ActivationFn = "relu",
        rngs: nnx.Rngs,
        weight_split_dims_mapping: SplitSetting = None,
        activation_split_dims_mapping: SplitSetting = None,
    ):
        require_positive(self, input_dims=input_dims, output_dims=output_dims)
        for i, width in enumerate(hidden_dims):
            require_positive(self, **{f"hidden_dims[{i}]": width})
        activation_fn(activation, self)
        widths = [input_dims, *hidden_dims]
        split = self.activation_split_dims_mapping
        self.hidden = nnx.List(
            FeedForward(
                *self.dims(width, next_width),
                activation=activation,
                activation_split_dims_mapping=split,
                rngs=rngs,
            )
            for width, next_width in zip(widths, widths[1:], strict=False)
        )
        D, F = self.dims(widths[-1], Dim(output_dims, "vocab"))
        self.logits = FeedForward(D, F, activation="identity", rngs=rngs)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        outputs = inputs.reshape(inputs.shape[0], -1)
        for layer in self.hidden:
            outputs = layer(outputs)
        return self.logits(outputs)


_EQUATION = re.compile(r"(\.\.\.)?([a-zA-Z]*),([a-zA-Z]+)->(\.\.\.)?([a-zA-Z]*)")


class Einsum(Dense):
    """Computes `einsum(equation, inputs, w) + b`.

    `Einsum("...d,dnk->...nk", (8, 2, 4))` projects [..., 8] to [..., 2, 4].

    Args:
      equation: Einsum equation for inputs and weight. "..." stands for any leading dims of the
        inputs, which are preserved in the outputs.
      weight_shape: Size of each dim of the weight, in the order of its subscripts in the equation.
      has_bias: Whether to add b. Its dims are the output dims that come from the weight, in the
        order of the outputs, and are sharded as in the weight.
      weight_init: Initializer of the weight. If None, Pax's default (Xavier) with the fan-in and
        fan-out of the equation: contracted subscripts are inputs, subscripts in the weight but not
        in the inputs are outputs, and subscripts shared by inputs, weight and outputs stack
        independent layers.
      bias_init: Initializer of the bias.
      weight_split_dims_mapping: Sharding of the weight.
      activation_split_dims_mapping: Sharding of the outputs.

    Raises:
      ConfigError: The equation is invalid, or does not match the weight's shape.
    """

    splits = splits(weight=(), activation=())

    def __init__(
        self,
        equation: str,
        weight_shape: tuple[int, ...],
        *,
        has_bias: bool = False,
        weight_init: Initializer | None = None,
        bias_init: Initializer = zeros,
        rngs: nnx.Rngs,
        weight_split_dims_mapping: SplitSetting = None,
        activation_split_dims_mapping: SplitSetting = None,
    ):
        weight = _weight_letters(equation)
        require_positive(self, **{f"weight_shape[{i}]": n for i, n in enumerate(weight_shape)})
        if len(weight) != len(weight_shape):
            raise ConfigError(
                f"Einsum.weight_shape is {tuple(weight_shape)}, but the weight in {equation!r} has "
                f"{len(weight)} letters, {weight!r}. Specify a size for each letter."
            )
        weight_shape = tuple(weight_shape)
        if weight_init is None:
            input_dims, output_dims = matrix_of(equation, weight)
            weight_init = WeightInit("xavier", fan_in_axes=input_dims, fan_out_axes=output_dims)
        self.equation = equation.replace(" ", "")
        self.make(
            *self.dims(*weight_shape),
            init=weight_init,
            bias_init=bias_init if has_bias else None,
            rngs=rngs,
        )


def _weight_letters(equation: str) -> str:
    """Returns the weight's subscripts; raises ConfigError if the equation is invalid."""
    match = _EQUATION.fullmatch(equation.replace(" ", "")) if isinstance(equation, str) else None
    if match is None or bool(match[1]) != bool(match[4]):
        raise ConfigError(
            f"Einsum.equation is {equation!r}; expected an equation for inputs and a weight, such "
            "as '...d,df->...f', where both inputs and outputs start with '...', or neither does."
        )
    inputs, weight, outputs = match[2], match[3], match[5]
    for letters in (inputs, weight, outputs):
        if len(set(letters)) != len(letters):
            raise ConfigError(
                f"Einsum.equation {equation!r} repeats a letter in {letters!r}. Use different "
                "letters for different dims."
            )
    if set(outputs) - set(inputs + weight) or not set(inputs) & set(weight):
        raise ConfigError(
            f"Einsum.equation is {equation!r}; expected inputs and weight to share a letter, and "
            "every output letter to occur in the inputs or the weight."
        )
    return weight
