"""Slots of any optimizer in bfloat16, rounded up or down at random so that they do not get stuck.

bfloat16 numbers lie a 256th apart or more, so an average that decays by 0.999 moves by less than
half of that: rounded to the nearest it never would. Rounded up with the probability of its place
between two numbers, it moves as far on average as in float32. JAX rounds so inside of TPU kernels
only (`pallas.tpu.stochastic_round`).
"""

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from praxis_lite.core.errors import require

PyTree = Any


class LowPrecisionSlotsState(NamedTuple):
    """The number of updates made, which the random bits follow from, and the optimizer's state."""

    count: jax.Array
    slots: PyTree


def low_precision_slots(
    learning_rate: optax.ScalarOrSchedule,
    *,
    optimizer: Callable[..., optax.GradientTransformation],
    dtype: str = "bfloat16",
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that computes in float32 and keeps its float32 slots in bfloat16.

    Slots of rank 0 and of other dtypes (counts) stay as they are. The random bits follow from the
    count and the slot's path alone, so a run is repeatable and the same on every mesh; layers of a
    stack share them. Not for an optimizer whose slots are weights themselves (schedule-free).

    Args:
      learning_rate: passed on.
      optimizer: called with `learning_rate`, returns the optax transformation, such as
        `fdl.Partial(optax.adamw, b2=0.98)`.
      dtype: of the stored slots; "bfloat16", which has the range of float32.

    Raises:
      ConfigError: another dtype.
    """
    require(
        dtype == "bfloat16", "low_precision_slots' dtype", dtype, "'bfloat16'",
        "Others have less range than float32, and second moments would vanish in them.",
    )
    inner = optax.with_extra_args_support(optimizer(learning_rate=learning_rate))

    def stored(slots: PyTree, count: jax.Array) -> PyTree:
        # Named, as a default of other key types may give other bits on other meshes.
        key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), count)

        def store(path: tuple, slot: jax.Array) -> jax.Array:
            if slot.dtype != jnp.float32 or slot.ndim == 0:
                return slot
            path_hash = zlib.crc32(jax.tree_util.keystr(path).encode())
            return stochastically_rounded(slot, jax.random.fold_in(key, path_hash))

        return jax.tree.map_with_path(store, slots)

    def init(params: PyTree) -> LowPrecisionSlotsState:
        count = jnp.zeros((), jnp.int32)
        return LowPrecisionSlotsState(count, stored(inner.init(params), count))

    def update(
        updates: PyTree, state: LowPrecisionSlotsState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, LowPrecisionSlotsState]:
        # A slot that the optimizer itself keeps in bfloat16 is given to it so.
        shapes = jax.eval_shape(inner.init, updates if params is None else params)
        slots = jax.tree.map(lambda shape, slot: slot.astype(shape.dtype), shapes, state.slots)
        updates, slots = inner.update(updates, slots, params, **extra)
        count = optax.safe_increment(state.count)
        return updates, LowPrecisionSlotsState(count, stored(slots, count))

    return optax.GradientTransformationExtraArgs(init, update)


def stochastically_rounded(x: jax.Array, key: jax.Array) -> jax.Array:
    """Returns float32 `x` in bfloat16, up or down at random, equal to `x` on average.

    A number that bfloat16 has, infinities and NaN stay what they are.
    """
    # bfloat16 is the upper half of float32's bits. A random lower half carries into it with a
    # probability of just the share that is cut off. Integers, as floats may flush denormals.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits += jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    # The carry would turn a NaN into another number.
    return jnp.where(jnp.isnan(x), x.astype(jnp.bfloat16), rounded)
