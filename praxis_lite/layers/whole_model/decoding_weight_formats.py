"""Forms in which decoding stores dense weights: int8 per output channel, or transposed."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.layers.base.dense import Dense, StoredWeight, in_order


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Int8Weight(StoredWeight):
    """A weight as whole numbers from -127 to 127 times a scale.

    Attributes:
      values: int8, of the weight's shape.
      scale: of the weight's dtype and rank, 1 in the dims that a product sums over.
    """

    values: Any
    scale: Any

    @property
    def dtype(self) -> Any:
        return self.scale.dtype

    def astype(self, dtype: Any) -> jax.Array:
        return (self.values.astype(jnp.float32) * self.scale.astype(jnp.float32)).astype(dtype)

    def multiplied(self, layer: Dense, inputs: jax.Array) -> jax.Array:
        # Beside the inputs a loop reads the int8: XLA else makes floats of them before it.
        values, inputs = jax.lax.optimization_barrier((self.values, inputs))
        kernel = values.astype(inputs.dtype).reshape(layer.kernel_shape)
        outputs = jnp.einsum(
            in_order(layer.equation), inputs, kernel, preferred_element_type=jnp.float32
        )
        return (outputs * layer.beside(outputs, self.scale)).astype(inputs.dtype)


def in_int8(weight: jax.Array, summed_dims: Sequence[int]) -> Int8Weight:
    """Returns a weight rounded to the nearest, the largest of each output channel being 127.

    Args:
      summed_dims: that a product with the weight sums over.
    """
    exact = weight.astype(jnp.float32)
    largest = jnp.max(jnp.abs(exact), axis=tuple(summed_dims), keepdims=True)
    scale = jnp.where(largest > 0, largest / 127, 1).astype(weight.dtype)
    values = jnp.round(exact / scale.astype(jnp.float32))
    return Int8Weight(jnp.clip(values, -127, 127).astype(jnp.int8), scale)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["summed_dims"]
)
@dataclasses.dataclass(frozen=True)
class TransposedWeight(StoredWeight):
    """A weight stored transposed, [out, in], for faster decoding on a CPU.

    XLA's CPU backend repacks the second factor of a product for each token, and reads the first in
    place. With few rows repacking takes most of the time.

    Attributes:
      values: the weight, transposed.
      summed_dims: the weight's dims that are last in `values`, counted from the end.
    """

    values: Any
    summed_dims: tuple[int, ...]

    @staticmethod
    def is_for(equation: str) -> bool:
        """Returns True if inputs and outputs have the weight's letters in the weight's order."""
        operands, results = equation.split("->")
        of_inputs, of_weight = operands.split(",")
        kept = "".join(letter for letter in of_weight if letter in results)
        summed = "".join(letter for letter in of_weight if letter not in results)
        return of_inputs == f"...{summed}" and results.replace("...", "") == kept

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    def astype(self, dtype: Any) -> jax.Array:
        order = _order(self.values.ndim, self.summed_dims)
        return jnp.transpose(self.values, np.argsort(order)).astype(dtype)

    def multiplied(self, layer: Dense, inputs: jax.Array) -> jax.Array:
        operands, results = layer.equation.split("->")
        of_inputs, of_weight = operands.split(",")
        sizes = dict(zip(of_weight, layer.kernel_shape, strict=True))
        summed = [letter for letter in of_weight if letter not in results]
        num_rows_dims = inputs.ndim - len(summed)
        rows_RD = inputs.reshape(math.prod(inputs.shape[:num_rows_dims]), -1)
        weight_FD = self.values.reshape(-1, rows_RD.shape[1]).astype(inputs.dtype)
        # Without the barriers XLA makes it the product of inputs and a weight again.
        barrier = jax.lax.optimization_barrier
        outputs_RF = barrier(weight_FD @ barrier(rows_RD.T)).T
        dims = [sizes[letter] for letter in of_weight if letter in results]
        outputs = outputs_RF.reshape(*inputs.shape[:num_rows_dims], *dims)
        # Dims that the equation has before the rows.
        num_before = len(results.split("...")[0])
        return jnp.moveaxis(
            outputs, range(num_rows_dims, num_rows_dims + num_before), range(num_before)
        )


def transposed(weight: jax.Array, summed_dims: Sequence[int]) -> TransposedWeight:
    """Returns a weight with the dims last, counted from the end, that a product sums over."""
    summed_dims = tuple(summed_dims)
    return TransposedWeight(jnp.transpose(weight, _order(weight.ndim, summed_dims)), summed_dims)


def _order(ndim: int, summed_dims: Sequence[int]) -> tuple[int, ...]:
    last = [dim % ndim for dim in summed_dims]
    return (*(dim for dim in range(ndim) if dim not in last), *last)
