"""Formats of dense weights for decoding: int8 with a scale per output channel, or transposed."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.layers.base.dense import Dense, StoredWeight, in_order


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Weight(StoredWeight):
    """A weight stored as integers from -127 to 127, times a scale.

    Attributes:
      values: Int8, with the weight's shape.
      scale: The scales, with the weight's dtype and rank; contracted dims have size 1.
    """

    values: Any
    scale: Any

    @property
    def dtype(self) -> Any:
        return self.scale.dtype

    def astype(self, dtype: Any) -> jax.Array:
        return (self.values.astype(jnp.float32) * self.scale.astype(jnp.float32)).astype(dtype)

    def multiplied(self, layer: Dense, inputs: jax.Array) -> jax.Array:
        # The barrier prevents XLA from converting int8 to floats before an enclosing loop.
        values, inputs = jax.lax.optimization_barrier((self.values, inputs))
        kernel = values.astype(inputs.dtype).reshape(layer.kernel_shape)
        outputs = jnp.einsum(
            in_order(layer.equation), inputs, kernel, preferred_element_type=jnp.float32
        )
        return (outputs * layer.reshape_for_broadcast(self.scale, outputs)).astype(inputs.dtype)


def to_int8(weight: jax.Array, contracted_dims: Sequence[int]) -> Int8Weight:
    """Rounds a weight to int8, with the largest value of each output channel scaled to 127.

    Args:
      weight: The weight.
      contracted_dims: The contracted dims of the weight.
    """
    unrounded = weight.astype(jnp.float32)
    largest = jnp.max(jnp.abs(unrounded), axis=tuple(contracted_dims), keepdims=True)
    scale = jnp.where(largest > 0, largest / 127, 1).astype(weight.dtype)
    values = jnp.round(unrounded / scale.astype(jnp.float32))
    return Int8Weight(jnp.clip(values, -127, 127).astype(jnp.int8), scale)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TransposedWeight(StoredWeight):
    """A weight stored transposed, [out, in], for faster decoding on CPU.

    XLA's CPU backend repacks the second operand of a matmul for each token, but reads the first
    operand in place. With a small batch, repacking takes most of the time.

    Attributes:
      values: The transposed weight.
      contracted_dims: Negative indices of the weight's contracted dims, which are last in `values`.
    """

    values: Any
    contracted_dims: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @staticmethod
    def supports(equation: str) -> bool:
        """Returns whether inputs and outputs contain the weight's subscripts in the same order."""
        operands, results = equation.split("->")
        input_letters, weight_letters = operands.split(",")
        output_letters = "".join(letter for letter in weight_letters if letter in results)
        summed = "".join(letter for letter in weight_letters if letter not in results)
        return input_letters == f"...{summed}" and results.replace("...", "") == output_letters

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    def astype(self, dtype: Any) -> jax.Array:
        order = _order(self.values.ndim, self.contracted_dims)
        return jnp.transpose(self.values, tuple(np.argsort(order))).astype(dtype)

    def multiplied(self, layer: Dense, inputs: jax.Array) -> jax.Array:
        operands, results = layer.equation.split("->")
        _, weight_letters = operands.split(",")
        sizes = dict(zip(weight_letters, layer.kernel_shape, strict=True))
        summed = [letter for letter in weight_letters if letter not in results]
        num_rows_dims = inputs.ndim - len(summed)
        rows_RD = inputs.reshape(math.prod(inputs.shape[:num_rows_dims]), -1)
        weight_FD = self.values.reshape(-1, rows_RD.shape[1]).astype(inputs.dtype)
        # Without the barriers, XLA would swap the operands back.
        barrier = jax.lax.optimization_barrier
        outputs_RF = barrier(weight_FD @ barrier(rows_RD.T)).T
        dims = [sizes[letter] for letter in weight_letters if letter in results]
        outputs = outputs_RF.reshape(*inputs.shape[:num_rows_dims], *dims)
        # Move the dims that precede the rows in the equation.
        num_before = len(results.split("...")[0])
        return jnp.moveaxis(
            outputs, range(num_rows_dims, num_rows_dims + num_before), range(num_before)
        )


def to_transposed(weight: jax.Array, contracted_dims: Sequence[int]) -> TransposedWeight:
    """Transposes a weight so that its contracted dims (negative indices) are last."""
    contracted_dims = tuple(contracted_dims)
    return TransposedWeight(
        jnp.transpose(weight, _order(weight.ndim, contracted_dims)), contracted_dims
    )


def _order(ndim: int, contracted_dims: Sequence[int]) -> tuple[int, ...]:
    last = [dim % ndim for dim in contracted_dims]
    return (*(dim for dim in range(ndim) if dim not in last), *last)
