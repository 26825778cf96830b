"""4-bit weights with a scale per block: rounding, packing and multiplication.

In memory, files and communication, a byte stores two numbers. One float32 scale per block of 64
adds half a bit per number. Qwix has the same types, but its "nf4" stores one number per byte and
flattens weights, so sharded weights would have to be gathered.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.layers.base.base_layer import pad_to_multiple
from praxis_lite.layers.base.dense import Dense, StoredWeight, in_order, is_dense
from praxis_lite.layers.base.result_types import einsum
from praxis_lite.layers.whole_model.packed_weights import Pack

# Types that are only used for weights.
WEIGHT_QTYPES = ("int4", "nf4")
BLOCK_SIZE = 64  # As in QLoRA.
# QLoRA's NormalFloat: quantiles of a normal distribution (arXiv:2305.14314, appendix E).
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FourBitWeight(StoredWeight):
    """A weight whose elements are 4-bit numbers, times a scale per block.

    Attributes:
      codes: Uint8, with the weight's shape except in `dim`; two numbers per byte.
      scale: Float32, with the weight's shape except in `dim`; one scale per block.
      qtype: "int4" or "nf4".
      dim: Negative index of the dim that is divided into blocks.
      size: Size of this dim in the weight.
      block_size: Number of elements that share a scale.
    """

    codes: Any
    scale: Any
    qtype: str = dataclasses.field(metadata={"static": True})
    dim: int = dataclasses.field(metadata={"static": True})
    size: int = dataclasses.field(metadata={"static": True})
    block_size: int = dataclasses.field(metadata={"static": True})

    @property
    def dtype(self) -> Any:
        return self.scale.dtype

    def astype(self, dtype: Any) -> jax.Array:
        codes = self.codes
        dim = codes.ndim + self.dim
        before, after = codes.shape[:dim], codes.shape[dim + 1 :]
        codes = codes.reshape(*before, -1, -(-self.block_size // 2), *after)
        # Unpack each byte. Blocks of odd size end with a padding code.
        codes = jnp.stack([codes & 15, codes >> 4], axis=dim + 2)
        codes = codes.reshape(*before, codes.shape[dim], -1, *after)
        codes = jax.lax.slice_in_dim(codes, 0, self.block_size, axis=dim + 1)
        values = _values(codes, self.qtype) * jnp.expand_dims(self.scale, dim + 1)
        values = values.reshape(*before, -1, *after)
        return jax.lax.slice_in_dim(values, 0, self.size, axis=dim).astype(dtype)

    def multiplied(self, layer: Dense, inputs: jax.Array) -> jax.Array:
        # The backward pass recomputes the floats, so only the 4-bit weight is a residual.
        @jax.checkpoint
        def product(weight: FourBitWeight, inputs: jax.Array) -> jax.Array:
            kernel = weight.astype(inputs.dtype).reshape(layer.kernel_shape)
            return einsum(in_order(layer.equation), inputs, kernel)

        return product(self, inputs)


def to_4_bits(weight: jax.Array, qtype: str, block_size: int, dim: int) -> FourBitWeight:
    """Rounds a weight to 4-bit numbers with a scale per block.

    "int4" uses the integers from -7 to 7. "nf4" uses the values of NF4, which are bit-identical to
    those in bitsandbytes.

    Args:
      weight: The weight.
      qtype: "int4" or "nf4".
      block_size: Number of elements that share a scale.
      dim: Negative index of the dim to divide into blocks; the last block is padded with zeros.
    """
    size, pos_dim = weight.shape[dim], weight.ndim + dim
    block_size = min(block_size, size)
    before, after = weight.shape[:pos_dim], weight.shape[pos_dim + 1 :]
    # Divide `dim` into blocks of numbers that share a scale.
    padded = pad_to_multiple(weight.astype(jnp.float32), block_size, pos_dim)
    blocks = padded.reshape(*before, -1, block_size, *after)
    largest = jnp.max(jnp.abs(blocks), axis=pos_dim + 1)
    scale = jnp.where(largest > 0, largest / (7 if qtype == "int4" else 1), 1)
    codes = _codes(blocks / jnp.expand_dims(scale, pos_dim + 1), qtype)
    # Pack two codes into a byte.
    codes = pad_to_multiple(codes, 2, pos_dim + 1)
    num_codes = codes.shape[pos_dim + 1]
    low, high = (jax.lax.slice_in_dim(codes, i, num_codes, 2, axis=pos_dim + 1) for i in (0, 1))
    packed = (low | (high << 4)).reshape(*before, -1, *after)
    return FourBitWeight(packed, scale, qtype, dim, size, block_size)


def four_bit_packs(module: nnx.Module, qtype: str) -> Mapping[str, Pack]:
    """Returns pack functions, keyed by weight path, for dense layers that do not compute logits."""
    return {
        "/".join(("params", *map(str, path), "w")): functools.partial(
            to_4_bits, qtype=qtype, block_size=BLOCK_SIZE, dim=node.contracted_dims[-1]
        )
        for path, node in nnx.compat.iter_graph(module)
        if is_dense(node) and node.contracted_dims and not node.makes_logits
    }


def _codes(x: jax.Array, qtype: str) -> jax.Array:
    """Returns the uint8 codes, 0 to 15, for numbers that are already divided by their scales."""
    if qtype == "int4":
        return jnp.clip(jnp.round(x), -7, 7).astype(jnp.int8).astype(jnp.uint8) & 15
    bounds = [(a + b) / 2 for a, b in zip(NF4, NF4[1:], strict=False)]
    return sum((x > jnp.float32(bound)).astype(jnp.uint8) for bound in bounds)


def _values(codes: jax.Array, qtype: str) -> jax.Array:
    """Returns the float32 values for codes."""
    if qtype == "int4":
        return (codes ^ 8).astype(jnp.float32) - 8
    # For each bit, select from pairs of values; a table lookup would be a gather per element.
    values: list[Any] = [jnp.float32(value) for value in NF4]
    for bit in range(4):
        is_set = (codes >> bit) & 1 == 1
        values = [
            jnp.where(is_set, high, low)
            for low, high in zip(values[::2], values[1::2], strict=True)
        ]
    return values[0]
