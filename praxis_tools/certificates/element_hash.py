"""Hashes array elements by bits and position, so that digests do not depend on the mesh.

The same hash provides pseudorandom signs for projections and perturbations.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def digest(x: jax.Array, index: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Returns the digest of a block of an array, as uint32 [2].

    The digests of an array's blocks add up to the digest of the array, modulo 2^32.

    Args:
      x: Elements of the block.
      index: Position of each element in the array, uint32; see `indices`.
      mask: False for padding elements, which are ignored. None if the block has no padding.
    """
    first = _mix(_bits(x) ^ _mix(index * jnp.uint32(0x9E3779B9) + jnp.uint32(0x7F4A7C15)))
    second = _mix(first ^ jnp.uint32(0x85EBCA6B))
    lanes = []
    for lane in (first, second):
        masked = lane if mask is None else jnp.where(mask, lane, jnp.uint32(0))
        lanes.append(jnp.sum(masked, dtype=jnp.uint32))
    return jnp.stack(lanes)


def indices(shape: tuple[int, ...], array_shape: tuple[int, ...], starts: Any = None) -> jax.Array:
    """Returns the row-major position of each element in a block within the array, modulo 2^32.

    Args:
      shape: Shape of the block.
      array_shape: Logical shape of the array.
      starts: Start of the block along each dim, or None for zeros.
    """
    position, stride = jnp.zeros(shape, jnp.uint32), 1
    for dim in reversed(range(len(shape))):
        along = lax.broadcasted_iota(jnp.uint32, shape, dim)
        if starts is not None:
            along = along + jnp.asarray(starts[dim]).astype(jnp.uint32)
        position = position + along * jnp.uint32(stride % 2**32)
        stride *= array_shape[dim]
    return position


def signs(index: jax.Array, salt: jax.Array, num_signs: int) -> jax.Array:
    """Returns pseudorandom signs (1.0 or -1.0) for each element, as float32 [num_signs, ...].

    Args:
      index: Position of each element in its array; see `indices`.
      salt: Seed for the signs, uint32.
      num_signs: Number of signs per element, at most 4.
    """
    hashed = _mix(_mix(index ^ salt) + salt)
    bits = jnp.stack([(hashed >> jnp.uint32(7 * k + 1)) & jnp.uint32(1) for k in range(num_signs)])
    return 1.0 - 2.0 * bits.astype(jnp.float32)


def leaf_salt(salt: jax.Array, leaf_index: int) -> jax.Array:
    """Returns a uint32 salt that is different for each leaf in a tree."""
    return _mix(salt + jnp.uint32((leaf_index + 1) * 0x9E3779B9 % 2**32))


def _mix(x: jax.Array) -> jax.Array:
    """Mixes the bits of uint32 numbers so that each bit depends on all input bits (MurmurHash3)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))


def _bits(x: jax.Array) -> jax.Array:
    """Returns the bits of each element as a uint32, mixing both halves of 64-bit types."""
    if x.dtype == jnp.bool_ or x.dtype.itemsize * 8 != _num_bits(x.dtype):
        return x.astype(jnp.int32).astype(jnp.uint32)
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{min(_num_bits(x.dtype), 32)}"))
    if bits.ndim > x.ndim:
        bits = _mix(bits[..., 0].astype(jnp.uint32)) ^ bits[..., 1].astype(jnp.uint32)
    return bits.astype(jnp.uint32)


def _num_bits(dtype: Any) -> int:
    """Returns the bits per element. For types such as int4, JAX stores more bits."""
    info = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    return 8 * dtype.itemsize if jnp.issubdtype(dtype, jnp.complexfloating) else info(dtype).bits
