"""Adafactor's slots of a weight: their kinds and shapes, and the stored momentum."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Shape = tuple[int, ...]

MOMENTUM_DTYPES = ("int8", "int16", "bfloat16", "float32")


class WeightSlots(NamedTuple):
    """The slots of a weight. A slot that it does not have is zeros of shape [1], as in Pax.

    So the state has the same leaves whatever is factored, and `slots.py` can compare states of
    other sizes. Orbax does not save empty arrays.

    Attributes:
      m: momentum, of the weight's shape.
      m_scale: of an integer momentum: the weight's shape without the first dim.
      vr, vc: row and column means of the second moment: the weight's shape without one dim.
      v: second moment of a weight that is not factored: its shape.
    """

    m: jax.Array
    m_scale: jax.Array
    vr: jax.Array
    vc: jax.Array
    v: jax.Array


def zero_slots(
    shape: Shape, dims: tuple[int, int] | None, momentum_dtype: str | None
) -> WeightSlots:
    """Returns the slots of a weight before the first update.

    Args:
      shape: of the weight.
      dims: the two that are factored, rows' statistics dropping the first; None: not factored.
      momentum_dtype: None: no momentum.
    """
    absent = jnp.zeros((1,), jnp.float32)
    if momentum_dtype is None:
        m, m_scale = absent, absent
    else:
        m, m_scale = stored_momentum(jnp.zeros(shape, jnp.float32), momentum_dtype)
    if dims is None:
        return WeightSlots(m, m_scale, absent, absent, jnp.zeros(shape, jnp.float32))
    vr, vc = (jnp.zeros(shape[:dim] + shape[dim + 1 :], jnp.float32) for dim in dims)
    return WeightSlots(m, m_scale, vr, vc, absent)


def factored_dims(shape: Shape, by_size: bool, min_size: int) -> tuple[int, int] | None:
    """Returns the dims that the row and the column statistics drop; None for no factoring.

    Args:
      by_size: the largest and second largest dims; else the last and the one before. Of equals
        the last counts as larger, as in optax, and `slots.py` relies on that; in Pax the first
        does, so that `vr` and `vc` of such a weight are the other way round.
      min_size: with `by_size`, the least size of both.
    """
    if len(shape) < 2:
        return None
    if not by_size:
        return len(shape) - 1, len(shape) - 2
    *_, second, largest = sorted(range(len(shape)), key=lambda dim: (shape[dim], dim))
    return (largest, second) if shape[second] >= min_size else None


def stored_momentum(m: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Returns (m, m_scale): a float32 momentum as it is kept.

    Integers are symmetric about 0, the largest of each column at the end of the range. A scalar
    has no column and stays float32.
    """
    if dtype in ("bfloat16", "float32"):
        return m.astype(dtype), jnp.zeros((1,), jnp.float32)
    if not m.ndim:
        return m, jnp.zeros((1,), jnp.float32)
    scale = jnp.max(jnp.abs(m), axis=0) / jnp.iinfo(dtype).max
    rounded = jnp.round(m / jnp.where(scale > 0, scale, 1.0)[None])
    return rounded.astype(dtype), scale


def momentum_of(m: jax.Array, m_scale: jax.Array) -> jax.Array:
    """Returns the float32 momentum of what `stored_momentum` returned."""
    if jnp.issubdtype(m.dtype, jnp.integer):
        return m.astype(jnp.float32) * m_scale[None]
    return m.astype(jnp.float32)
