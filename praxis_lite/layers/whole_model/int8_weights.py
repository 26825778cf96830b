"""A matrix kept in int8 with a scale per output channel, for decoding."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

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
