"""bfloat16 slots for any optimizer, with stochastic rounding so that averages do not get stuck.

Adjacent bfloat16 numbers differ by 1/256 or more, relatively. An average that decays by 0.999
changes by less than half of that, so rounding to nearest would never change it. If the probability
of rounding up is the position between the two neighbors, it changes on average as much as in
float32. JAX has this rounding only inside TPU kernels (`pallas.tpu.stochastic_round`).
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
    """The number of updates, which determines the random bits, and the optimizer's state."""

    count: jax.Array
    slots: PyTree


def low_precision_slots(
    learning_rate: optax.ScalarOrSchedule,
    *,
    optimizer: Callable[..., optax.GradientTransformation],
    dtype: str = "bfloat16",
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that computes in float32 and stores its float32 slots in bfloat16.

    Slots of rank 0 and of other dtypes (counts) are not changed. The random bits depend only on the
    count and the path of a slot, so a run is repeatable and the same on every mesh; the layers of a
    stack share them. Not for optimizers whose slots are weights themselves (schedule-free).

    Args:
      learning_rate: The learning rate of `optimizer`.
      optimizer: Builds the optax transformation from `learning_rate`, such as
        `fdl.Partial(optax.adamw, b2=0.98)`.
      dtype: The dtype of stored slots; "bfloat16", which has the range of float32.

    Raises:
      ConfigError: The dtype is not "bfloat16".
    """
    require(
        dtype == "bfloat16", "low_precision_slots' dtype", dtype, "'bfloat16'",
        "Other dtypes have a smaller range than float32, so second moments would become 0.",
    )
    inner = optax.with_extra_args_support(optimizer(learning_rate=learning_rate))

    def to_storage(slots: PyTree, count: jax.Array) -> PyTree:
        # An explicit type: other key types, as defaults, can give different bits on other meshes.
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
        # Slots that the optimizer itself keeps in bfloat16 are passed in bfloat16.
        shapes = jax.eval_shape(inner.init, updates if params is None else params)
        slots = jax.tree.map(lambda shape, slot: slot.astype(shape.dtype), shapes, state.slots)
        updates, slots = inner.update(updates, slots, params, **extra)
        count = optax.safe_increment(state.count)
        return updates, LowPrecisionSlotsState(count, to_storage(slots, count))

    return optax.GradientTransformationExtraArgs(init, update)


def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """Rounds float32 `x` to bfloat16, up or down at random, so that the mean is `x`.

    Numbers that bfloat16 can represent, infinities and NaN do not change.
    """
    # bfloat16 is the upper half of float32's bits. Adding random bits to the lower half carries
    # with a probability equal to the cut off fraction. Done on integers, since float operations may
    # flush denormals.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits += jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    # The carry would turn a NaN into another number.
    return jnp.where(jnp.isnan(x), x.astype(jnp.bfloat16), rounded)
