"""Hashes of elements by their bits and positions, the same on every mesh; random signs likewise."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def digest(x: jax.Array, index: jax.Array, counts: jax.Array | None = None) -> jax.Array:
    """Returns the digest [2], uint32, of some elements of an array.

    Digests of parts of an array add up to the digest of the array, modulo 2^32.

    Args:
      x: the elements.
      index: uint32, the position of each element in the complete array; see `indices`.
      counts: False: the element is padding; None: none is.
    """
    first = _mixed(_bits(x) ^ _mixed(index * jnp.uint32(0x9E3779B9) + jnp.uint32(0x7F4A7C15)))
    second = _mixed(first ^ jnp.uint32(0x85EBCA6B))
    lanes = []
    for lane in (first, second):
        kept = lane if counts is None else jnp.where(counts, lane, jnp.uint32(0))
        lanes.append(jnp.sum(kept, dtype=jnp.uint32))
    return jnp.stack(lanes)


def indices(shape: tuple[int, ...], array_shape: tuple[int, ...], starts: Any = None) -> jax.Array:
    """Returns the position of each element of a block in its array, a number modulo 2^32.

    Args:
      shape: of the block.
      array_shape: the logical shape of the array.
      starts: of the block along each dim; None: zeros.
    """
    result, stride = jnp.zeros(shape, jnp.uint32), 1
    for dim in reversed(range(len(shape))):
        along = lax.broadcasted_iota(jnp.uint32, shape, dim)
        if starts is not None:
            along = along + jnp.asarray(starts[dim]).astype(jnp.uint32)
        result = result + along * jnp.uint32(stride % 2**32)
        stride *= array_shape[dim]
    return result


def signs(index: jax.Array, salt: jax.Array, number: int) -> jax.Array:
    """Returns random signs [number, ...], 1.0 and -1.0, a function of the place and the salt."""
    drawn = _mixed(_mixed(index ^ salt) + salt)
    bits = jnp.stack([(drawn >> jnp.uint32(7 * k + 1)) & jnp.uint32(1) for k in range(number)])
    return 1.0 - 2.0 * bits.astype(jnp.float32)


def salted(salt: jax.Array, number: int) -> jax.Array:
    """Returns the salt, a uint32, for the leaf of this number."""
    return _mixed(salt + jnp.uint32((number + 1) * 0x9E3779B9 % 2**32))


def _mixed(x: jax.Array) -> jax.Array:
    """Returns numbers of 32 bits whose bits depend on all given bits (MurmurHash3)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))


def _bits(x: jax.Array) -> jax.Array:
    """Returns the bits of each element as a uint32; of a wider type both halves, mixed."""
    if x.dtype == jnp.bool_ or x.dtype.itemsize * 8 != _width(x.dtype):
        return x.astype(jnp.int32).astype(jnp.uint32)
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{min(_width(x.dtype), 32)}"))
    if bits.ndim > x.ndim:
        bits = _mixed(bits[..., 0].astype(jnp.uint32)) ^ bits[..., 1].astype(jnp.uint32)
    return bits.astype(jnp.uint32)


def _width(dtype: Any) -> int:
    """Returns how many bits an element has; int4 and its like have fewer than they take."""
    kind = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    return 8 * dtype.itemsize if jnp.issubdtype(dtype, jnp.complexfloating) else kind(dtype).bits
