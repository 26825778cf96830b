"""Buffers for microbatches waiting in a pipeline, and transfers between the pipeline's stages."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.layers.stacking.pipelining.pipeline_schedules import Schedule

# S stages, M microbatches. Name suffixes give the leading dims of arrays.


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def shift(x_S: jax.Array, by: int) -> jax.Array:
    """Rolls `x_S` by `by` stages."""
    return jnp.roll(x_S, by, axis=0)


# JAX differentiates a roll into pads and an addition, which would need two collective-permutes.
shift.defvjp(
    lambda x_S, by: (shift(x_S, by), None),
    lambda by, _, grad_S: (jnp.roll(grad_S, -by, axis=0),),
)


class Buffer:
    """A buffer for all microbatches, allocated on every stage but used only on stage 0.

    A microbatch waits there before, between and after its repeats, always at the same index. Other
    stages allocate the buffer as well, because all stages run the same code.

    Args:
      schedule: The pipeline's schedule.
      layout: A StageLayout.
    """

    def __init__(self, schedule: Schedule, layout: Any):
        self._schedule, self._layout = schedule, layout

    def start(self, x_M: jax.Array) -> jax.Array:
        """Returns the buffer before the first tick: [S, M + 1, rows, ...]."""
        # Until the first microbatch leaves the last stage, outputs are written to an extra last
        # index. A select would also work, but each tick would save a mask for the backward pass.
        x_M = jnp.concatenate([x_M, x_M[:1]])
        x_SM = jnp.broadcast_to(x_M, (self._schedule.num_stages, *x_M.shape))
        return self._layout.constrain(x_SM, row_dim=2)

    def take(
        self, stored_SM: jax.Array, arrived_S: jax.Array, t: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns stage 0's input at tick t, [S, rows, ...], and the buffer."""
        schedule = self._schedule
        index = jnp.minimum(t % schedule.period, schedule.num_microbatches - 1)
        return jax.lax.dynamic_index_in_dim(stored_SM, index, axis=1, keepdims=False), stored_SM

    def put(
        self, stored_SM: jax.Array, x_S: jax.Array, arrived_S: jax.Array, t: jax.Array
    ) -> jax.Array:
        """Returns the buffer after tick t, given the stages' outputs before and after `shift`."""
        schedule = self._schedule
        elapsed = t - (schedule.num_stages - 1)
        index, num_indices = elapsed % schedule.period, schedule.num_microbatches
        index = jnp.where((elapsed >= 0) & (index < num_indices), index, num_indices)
        stored_SM = jax.lax.dynamic_update_index_in_dim(stored_SM, arrived_S, index, axis=1)
        return self._layout.constrain(stored_SM, row_dim=2)

    def outputs(self, stored_SM: jax.Array) -> jax.Array:
        """Returns x_M after the last tick."""
        return stored_SM[0, : self._schedule.num_microbatches]


class StreamBuffer:
    """A buffer for the microbatches, sharded over the stages, with C = ceil(M / S) columns.

    At tick t, stage 0 takes its element of column t % C. The column then moves by one stage towards
    stage 0, and the last stage writes its output to the element that becomes free. Between repeats,
    up to M - S microbatches wait in a second buffer on stage 0.
    """

    def __init__(self, schedule: Schedule, layout: Any):
        self._schedule, self._layout = schedule, layout
        self._num_columns = -(-schedule.num_microbatches // schedule.num_stages)
        self._num_waiting = max(schedule.num_microbatches - schedule.num_stages, 0)

    def start(self, x_M: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        num_stages = self._schedule.num_stages
        if num_padding := num_stages * self._num_columns - len(x_M):
            # Pad with copies of the first microbatch, as in `Handover.start`.
            x_M = jnp.concatenate([x_M, jnp.broadcast_to(x_M[:1], (num_padding, *x_M.shape[1:]))])
        stream = x_M.reshape(num_stages, self._num_columns, *x_M.shape[1:])
        waiting = None
        if self._schedule.circular_repeat > 1 and self._num_waiting:
            empty = jnp.zeros((num_stages, self._num_waiting, *x_M.shape[1:]), x_M.dtype)
            waiting = self._layout.constrain(empty, row_dim=2)
        return self._layout.constrain(stream, row_dim=2), waiting

    def take(self, stored: tuple, arrived_S: jax.Array, t: jax.Array) -> tuple[jax.Array, tuple]:
        stream, waiting = stored
        entering = self._column(stream, t)
        if self._schedule.circular_repeat == 1:
            return entering, stored
        returning = arrived_S
        if waiting is not None:
            index = t % self._num_waiting
            returning = jax.lax.dynamic_index_in_dim(waiting, index, axis=1, keepdims=False)
            waiting = jax.lax.dynamic_update_index_in_dim(waiting, arrived_S, index, axis=1)
            waiting = self._layout.constrain(waiting, row_dim=2)
        # Select by a scalar: jnp.where would save a mask of x's shape for the backward pass.
        is_first_repeat = t < self._schedule.num_microbatches
        return jax.lax.select(is_first_repeat, entering, returning), (stream, waiting)

    def put(self, stored: tuple, x_S: jax.Array, arrived_S: jax.Array, t: jax.Array) -> tuple:
        stream, waiting = stored
        num_stages = self._schedule.num_stages
        is_last = (jnp.arange(num_stages) == num_stages - 1).reshape(-1, *[1] * (x_S.ndim - 1))
        column = jnp.where(is_last, x_S, shift(self._column(stream, t), -1))
        index = t % self._num_columns
        stream = jax.lax.dynamic_update_index_in_dim(stream, column, index, axis=1)
        return self._layout.constrain(stream, row_dim=2), waiting

    def outputs(self, stored: tuple) -> jax.Array:
        # The last tick wrote the last microbatch; the others are in preceding columns.
        stream = jnp.roll(stored[0], -(self._schedule.num_ticks % self._num_columns), axis=1)
        x_M = stream.reshape(-1, *stream.shape[2:])
        return x_M[len(x_M) - self._schedule.num_microbatches :]

    def _column(self, stream: jax.Array, t: jax.Array) -> jax.Array:
        index = t % self._num_columns
        return jax.lax.dynamic_index_in_dim(stream, index, axis=1, keepdims=False)


class Handover:
    """The transfer of activations between stages at the start and end of a tick.

    The transfer is linear in all arrays, so its gradient does not depend on their values.

    Args:
      schedule: The pipeline's schedule.
      layout: A StageLayout.
      stream_io: See Pipeline.
    """

    def __init__(self, schedule: Schedule, layout: Any, stream_io: bool):
        self.schedule, self.layout = schedule, layout
        self._buffer = (StreamBuffer if stream_io else Buffer)(schedule, layout)

    def start(self, x_M: jax.Array) -> tuple[jax.Array, Any]:
        """Returns (x_S, stored) before the first tick, where `stored` contains the buffers."""
        # Until its first microbatch arrives, a stage processes rows of the batch as dummy inputs.
        x_S = jnp.broadcast_to(x_M[:1], (self.schedule.num_stages, *x_M.shape[1:]))
        return self.layout.constrain(x_S, row_dim=1), self._buffer.start(x_M)

    def enter(self, x_S: jax.Array, stored: Any, t: jax.Array) -> tuple[jax.Array, Any]:
        """Returns the stages' inputs at tick t, [S, rows, ...], and the buffers."""
        is_first = (jnp.arange(self.schedule.num_stages) == 0).reshape(-1, *[1] * (x_S.ndim - 1))
        entering, stored = self._buffer.take(stored, x_S, t)
        return self.layout.constrain(jnp.where(is_first, entering, x_S), row_dim=1), stored

    def leave(self, x_S: jax.Array, stored: Any, t: jax.Array) -> tuple[jax.Array, Any]:
        """Moves the stages' outputs to the next stages; returns the moved outputs and buffers."""
        arrived_S = self.layout.constrain(shift(x_S, 1), row_dim=1)
        return arrived_S, self._buffer.put(stored, x_S, arrived_S, t)

    def outputs(self, stored: Any) -> jax.Array:
        """Returns x_M after the last tick."""
        return self._buffer.outputs(stored)


def transpose(function: Callable[..., Any], like: tuple, grads: Any) -> Any:
    """Maps gradients of the results of a linear function to gradients of its arguments.

    Args:
      function: A linear function, such as a method of Handover.
      like: Arrays, or their shapes, like the arguments of the function.
      grads: Gradients of its results.
    """
    # The function is linear, so any point gives the same gradient. `jax.linear_transpose` does not
    # support the custom gradient of `shift`.
    zeros = jax.tree.map(jnp.zeros_like, like)
    return jax.vjp(function, *zeros)[1](grads)
