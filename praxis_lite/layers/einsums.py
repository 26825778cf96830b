"""A dense layer that an equation describes."""

import re

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.errors import ConfigError
from praxis_lite.layers.base_layer import (
    BaseLayer,
    Initializer,
    broadcast_as,
    require_positive,
    zeros,
)
from praxis_lite.layers.initializers import WeightInit
from praxis_lite.sharding import SplitDims, constrain

_EQUATION = re.compile(r"(\.\.\.)?([a-zA-Z]*),([a-zA-Z]+)->(\.\.\.)?([a-zA-Z]*)")


class Einsum(BaseLayer):
    """Returns `einsum(equation, inputs, w) + b`.

    `Einsum("...d,dnk->...nk", (8, 2, 4))` projects [..., 8] to [..., 2, 4].

    Args:
      equation: of two operands, inputs and weight; "..." stands for any leading dims of the
        inputs, which the outputs keep.
      weight_shape: a size for each letter of the weight.
      has_bias: add b, whose dims are those that the weight gives to the outputs, in their order,
        and split as the weight's.
      weight_init: None: Pax's default (Xavier), with the fans that the equation tells: summed
        letters are inputs, letters of the weight alone are outputs, and those that inputs, weight
        and outputs share are as many layers side by side.
      weight_split_dims_mapping: of the weight.
      activation_split_dims_mapping: of the outputs.

    Raises:
      ConfigError: the equation is not of this form, or does not fit the weight's shape.
    """

    def __init__(
        self,
        equation: str,
        weight_shape: tuple[int, ...],
        *,
        has_bias: bool = False,
        weight_init: Initializer | None = None,
        bias_init: Initializer = zeros,
        weight_split_dims_mapping: SplitDims = None,
        activation_split_dims_mapping: SplitDims = None,
        rngs: nnx.Rngs,
    ):
        inputs, weight, outputs = _letters(equation)
        require_positive(self, **{f"weight_shape[{i}]": n for i, n in enumerate(weight_shape)})
        if len(weight) != len(weight_shape):
            raise ConfigError(
                f"Einsum.weight_shape is {tuple(weight_shape)}, but the weight of {equation!r} has "
                f"the {len(weight)} letters {weight!r}. Give a size for each."
            )
        if weight_init is None:
            weight_init = WeightInit(
                "xavier",
                fan_in_axes=tuple(i for i, dim in enumerate(weight) if dim not in outputs),
                fan_out_axes=tuple(i for i, dim in enumerate(weight) if dim not in inputs),
            )
        self.w = self.weight(
            tuple(weight_shape), weight_split_dims_mapping, init=weight_init, rngs=rngs
        )
        size_of = dict(zip(weight, weight_shape, strict=True))
        splits = (*(weight_split_dims_mapping or ()), *(None,) * len(weight))
        split_of = dict(zip(weight, splits, strict=False))
        bias_dims = [dim for dim in outputs if dim in size_of]
        self.b = (
            self.weight(
                tuple(size_of[dim] for dim in bias_dims),
                tuple(split_of[dim] for dim in bias_dims),
                init=bias_init,
                rngs=rngs,
            )
            if has_bias
            else None
        )
        # Every letter of the outputs, for the bias: 1 where the weight has none.
        self.bias_shape = tuple(size_of.get(dim, 1) for dim in outputs)
        self.equation = equation
        self.activation_split_dims_mapping = activation_split_dims_mapping

    def __call__(self, inputs: jax.Array) -> jax.Array:
        outputs = jnp.einsum(self.equation, inputs, self.w[...].astype(inputs.dtype))
        if self.b is not None:
            lead = (1,) * (outputs.ndim - len(self.bias_shape))
            outputs += broadcast_as(self.b[...].reshape(lead + self.bias_shape), outputs)
        return constrain(outputs, self.activation_split_dims_mapping)


def _letters(equation: str) -> tuple[str, str, str]:
    """Returns the letters of the inputs, the weight and the outputs."""
    match = _EQUATION.fullmatch(equation.replace(" ", "")) if isinstance(equation, str) else None
    if match is None or bool(match[1]) != bool(match[4]):
        raise ConfigError(
            f"Einsum.equation is {equation!r}; wanted is one of inputs and weight, such as "
            "'...d,df->...f', with dots before both inputs and outputs or neither."
        )
    inputs, weight, outputs = match[2], match[3], match[5]
    for letters in (inputs, weight, outputs):
        if len(set(letters)) != len(letters):
            raise ConfigError(f"Einsum.equation {equation!r} has a letter twice in {letters!r}.")
    missing = set(outputs) - set(inputs + weight)
    if missing or not set(inputs) & set(weight):
        raise ConfigError(
            f"Einsum.equation is {equation!r}; wanted are a letter that inputs and weight share, "
            "and no letter in the outputs that neither has."
        )
    return inputs, weight, outputs
