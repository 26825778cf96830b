"""Stores the slots of any optimizer in bfloat16, with stochastic rounding.

The relative distance between adjacent bfloat16 numbers is at least 1/256. An average with a decay
of 0.999 changes by less than half of this distance per update, so rounding to nearest would never
change it. Stochastic rounding rounds up with a probability that is proportional to the distance
from the lower neighbor, so that, in expectation, the average changes as much as in float32. JAX
provides this rounding only inside TPU kernels (`pallas.tpu.stochastic_round`).
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
    """The slots of the optimizer, and the number of updates, which seeds the random bits."""

    count: jax.Array  # type: ignore[assignment]  # Hides tuple.count, as in optax.
    slots: PyTree


def low_precision_slots(
    learning_rate: optax.ScalarOrSchedule,
    *,
    optimizer: Callable[..., optax.GradientTransformation],
    dtype: str = "bfloat16",
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that computes in float32 and stores its float32 slots in bfloat16.

    Scalar slots and slots with other dtypes (counts) are not changed. The random bits depend only
    on the count and on the slot's path, so runs are repeatable and do not depend on the mesh. The
    layers of a stack share the random bits. Do not use this for optimizers whose slots are weights,
    such as schedule-free optimizers.

    Args:
      learning_rate: Learning rate of `optimizer`.
      optimizer: Takes `learning_rate` and returns an optax transformation, such as
        `fdl.Partial(optax.adamw, b2=0.98)`.
      dtype: Dtype of stored slots: "bfloat16", the only 16-bit float with the range of float32.

    Raises:
      ConfigError: The dtype is not "bfloat16".
    """
    require(
        dtype == "bfloat16",
        "low_precision_slots' dtype",
        dtype,
        "'bfloat16'",
        "Other dtypes have a smaller range than float32, so second moments would become 0.",
    )
    inner = optax.with_extra_args_support(optimizer(learning_rate=learning_rate))

    def to_storage(slots: PyTree, count: jax.Array) -> PyTree:
        # Set the key type explicitly: the bits of other types may depend on the mesh.
        key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), count)

        def slot_to_storage(path: tuple, slot: jax.Array) -> jax.Array:
            if slot.dtype != jnp.float32 or slot.ndim == 0:
                return slot
            path_hash = zlib.crc32(jax.tree_util.keystr(path).encode())
            return round_stochastically(slot, jax.random.fold_in(key, path_hash))

        return jax.tree.map_with_path(slot_to_storage, slots)

    def init(params: PyTree) -> LowPrecisionSlotsState:
        count = jnp.zeros((), jnp.int32)
        return LowPrecisionSlotsState(count, to_storage(inner.init(params), count))

    def update(
        updates: PyTree, state: LowPrecisionSlotsState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, LowPrecisionSlotsState]:
        # Slots that the optimizer itself stores in bfloat16 stay in bfloat16.
        shapes = jax.eval_shape(inner.init, updates if params is None else params)
        slots = jax.tree.map(lambda shape, slot: slot.astype(shape.dtype), shapes, state.slots)
        updates, slots = inner.update(updates, slots, params, **extra)
        count = optax.safe_increment(state.count)
        return updates, LowPrecisionSlotsState(count, to_storage(slots, count))

    return optax.GradientTransformationExtraArgs(init, update)


def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """Rounds float32 `x` randomly up or down to bfloat16, so that the expected value is `x`.

    Numbers that bfloat16 can represent, infinities and NaN do not change.
    """
    # bfloat16 is the upper half of the bits of float32. Adding random bits to the lower half
    # carries with a probability equal to the truncated fraction. Use integers, because float
    # operations may flush denormals.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits += jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    # The carry could turn a NaN into a different value.
    return jnp.where(jnp.isnan(x), x.astype(jnp.bfloat16), rounded)
