"""The ticks of a pipeline: a scan, in which every stage works and then hands on its result.

The stages are a dim of every array; `jax.vmap` over it and a roll along it are all there is, and
XLA makes of them one program per device and a collective-permute.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from praxis_lite.collectives.varying import varying_alike
from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.sharding.split_dims import (
    DimSplit,
    SplitDims,
    to_partition_spec,
    without_axes,
)
from praxis_lite.layers.base.variables import assigned_values
from praxis_lite.layers.stacking.pipeline_buffers import Buffer, StreamBuffer, shift
from praxis_lite.layers.stacking.pipeline_schedules import Schedule

# R repeats, S stages, P layers of one stage in one repeat, M microbatches. Names end with the
# leading dims of their arrays: x_M is [M, rows, ...].

PyTree = Any
Values = dict[tuple, jax.Array]


@dataclasses.dataclass(frozen=True)
class StageLayout:
    """How arrays with a dim of stages lie on the mesh that is set."""

    stage_axis: DimSplit  # How that dim splits.
    row_split: SplitDims  # How [rows, ...] of activations split; None: XLA's choice.

    @property
    def axis(self) -> Any:
        """The mesh axis (or axes) of the stages, None without a mesh."""
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return None
        split = (self.stage_axis,)
        return to_partition_spec(split, mesh.axis_names, path="Pipeline.stage_axis")[0]

    @property
    def num_devices(self) -> int:
        """Devices along the stages; 1 where the mesh has no such axis."""
        mesh = jax.sharding.get_abstract_mesh()
        if isinstance(self.stage_axis, str) and self.stage_axis not in mesh.axis_names:
            return 1
        return math.prod(mesh.shape[axis] for axis in axes_of(self.axis))

    def constrain(
        self, x: jax.Array, *, dim: int = 0, row_dim: int | None = None, rank: int | None = None
    ) -> jax.Array:
        """Returns `x` with its layout stated: stages along `dim`, rows from `row_dim` on.

        Args:
          rank: how many of the entries of row_split count; None: all.
        """
        axis, mesh = self.axis, jax.sharding.get_abstract_mesh()
        if axis is None:
            return x
        entries = [PartitionSpec.UNCONSTRAINED] * x.ndim
        entries[dim] = axis
        if row_dim is not None and self.row_split is not None:
            rows = to_partition_spec(
                tuple(self.row_split)[:rank], mesh.axis_names,
                path="Pipeline.activation_split_dims_mapping",
            )
            rows = without_axes(rows, mesh.manual_axes)
            entries[row_dim : row_dim + len(rows)] = rows
        return jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))


def apply_layer(
    block: Any, x: jax.Array, layer: jax.Array, microbatch: jax.Array | int, *,
    key: jax.Array | None, cache: PyTree, **inputs: Any,
) -> tuple[jax.Array, PyTree, Values]:
    """Returns a block's (x, cache) and its assignments; its key folds in layer, microbatch."""
    if key is not None:
        key = jax.random.fold_in(jax.random.fold_in(key, layer), microbatch)
    x, cache = block(x, key=key, cache=cache, **inputs)
    return x, cache, assigned_values(block)


def run_ticks(
    blocks: Any, x_M: jax.Array, inputs_M: PyTree, others: dict[str, Any], key: jax.Array | None,
    cache: PyTree, *, schedule: Schedule, stream_io: bool,
    rematerialized: Callable[..., AbstractContextManager[Any]], layout: StageLayout,
) -> tuple[jax.Array, PyTree, Values]:
    """Returns x_M after all blocks, the cache, and the assigned variables' new values.

    Args:
      blocks: a module whose arrays are [R, S, P, ...].
      x_M: [M, rows, ...].
      inputs_M: the blocks' inputs, [M, rows, ...], or [1, 1, ...] of one for all rows.
      others: the inputs that are not arrays.
      cache: [R, S, P, ...], of one microbatch; or None.
      rematerialized: `remat` of a function of x and more, with its other arguments.
    """
    num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
    stages = jnp.arange(num_stages)

    def work(
        x: jax.Array, blocks_RP: Any, cache_RP: PyTree, inputs_M: PyTree,
        stage: jax.Array, microbatch: jax.Array, repeat: jax.Array, is_valid: jax.Array,
    ) -> tuple[jax.Array, PyTree, Values]:
        """Returns a stage's results in a tick."""
        inputs = jax.tree.map(lambda a: pick(a, microbatch), inputs_M)
        block_P, cache_P = jax.tree.map(lambda a: pick(a, repeat), (blocks_RP, cache_RP))

        def without_gradient_if_idle(a: jax.Array) -> jax.Array:
            # Idle stages work on rows of the batch, but with another layer: that may give NaN,
            # and in the backward pass zero times NaN, NaN again. This select cuts the gradient.
            if not jnp.issubdtype(a.dtype, jnp.inexact):
                return a
            return jnp.where(is_valid, a, jax.lax.stop_gradient(a))

        block_P, x, inputs = jax.tree.map(without_gradient_if_idle, (block_P, x, inputs))
        num_layers = jax.tree.leaves(block_P)[0].shape[0]
        first = (repeat * num_stages + stage) * num_layers

        def step(x: jax.Array, layer: tuple) -> tuple[jax.Array, tuple]:
            block, index, cache = layer
            x, cache, values = apply_layer(
                block, x, index, microbatch, key=key, cache=cache, **inputs, **others
            )
            return x, (cache, values)

        layers = block_P, first + jnp.arange(num_layers), cache_P
        x, (new_cache_P, values_P) = jax.lax.scan(step, x, layers)
        cache_RP = jax.tree.map(
            lambda all_R, old, new: jax.lax.dynamic_update_index_in_dim(
                all_R, jnp.where(is_valid, new, old), repeat, axis=0
            ),
            cache_RP, cache_P, new_cache_P,
        )
        return x, cache_RP, values_P

    # A copy per stage, so that the gradients of the stages add up once, after the last tick.
    inputs_SM = jax.tree.map(
        lambda a: layout.constrain(
            jnp.broadcast_to(a, (num_stages, *a.shape)), row_dim=None if a.shape[1] == 1 else 2,
            rank=1,
        ),
        inputs_M,
    )
    buffer = (StreamBuffer if stream_io else Buffer)(schedule, layout)
    is_first_stage = (stages == 0).reshape(num_stages, *[1] * (x_M.ndim - 1))
    old_values = assigned_values(blocks)

    def tick(work_S: Callable[..., Any], carry: tuple, t: jax.Array) -> tuple[tuple, None]:
        x_S, stored, cache, values = carry
        microbatch, repeat, is_valid = schedule.work(t, stages)
        entering, stored = buffer.take(stored, x_S, t)
        x_S = layout.constrain(jnp.where(is_first_stage, entering, x_S), row_dim=1)
        x_S, cache, new_values = work_S(
            x_S, blocks, cache, inputs_SM, stages, microbatch, repeat, is_valid
        )
        x_S = layout.constrain(x_S, row_dim=1)
        repeats = jnp.arange(schedule.circular_repeat)[:, None]
        is_worked_RS = (repeats == repeat[None]) & is_valid[None]
        for path, new in new_values.items():
            value = _gathered(
                values[path], old_values[path], new, is_worked_RS, num_microbatches
            )
            values = {**values, path: layout.constrain(value, dim=1)}
        arrived_S = layout.constrain(shift(x_S, 1), row_dim=1)
        stored = buffer.put(stored, x_S, arrived_S, t)
        return (arrived_S, stored, cache, values), None

    # Rows of the batch, too, for the stages that wait for their first.
    x_S = layout.constrain(jnp.broadcast_to(x_M[:1], (num_stages, *x_M.shape[1:])), row_dim=1)
    carry = varying_alike((x_S, buffer.start(x_M), cache, old_values), blocks)
    ticks = jnp.arange(schedule.num_ticks)
    with rematerialized(work) as work:
        # No spmd_axis_name: under it a block's shard_map over other axes fails (jax 0.10), and XLA
        # finds the stages' layout from what is stated before and after.
        work_S = jax.vmap(work, in_axes=(0, 1, 1, 0, 0, 0, 0, 0), out_axes=(0, 1, 0))
        (_, stored, cache, values), _ = jax.lax.scan(
            functools.partial(tick, work_S), carry, ticks
        )
    return buffer.outputs(stored), cache, values


def mean_update(old: jax.Array, new_M: jax.Array) -> jax.Array:
    """Returns an assigned variable's value after microbatches that all began with `old`."""
    if not jnp.issubdtype(old.dtype, jnp.inexact):
        return new_M[-1]
    # Of the differences: a value that no microbatch changed stays the same to the last bit.
    return old + jnp.mean(new_M - old[None], axis=0)


def _gathered(
    value_RSP: jax.Array, old_RSP: jax.Array, new_SP: jax.Array, is_worked_RS: jax.Array,
    num_microbatches: int,
) -> jax.Array:
    """Returns `mean_update` of the microbatches so far."""
    is_worked = is_worked_RS.reshape(*is_worked_RS.shape, *[1] * (value_RSP.ndim - 2))
    if num_microbatches == 1 or not jnp.issubdtype(value_RSP.dtype, jnp.inexact):
        return jnp.where(is_worked, new_SP[None], value_RSP)
    change = (new_SP[None] - old_RSP) / num_microbatches
    return value_RSP + jnp.where(is_worked, change, jnp.zeros_like(change))


def pick(a: jax.Array, index: jax.Array | int) -> jax.Array:
    """Returns `a[index]`, or the only part there is."""
    if a.shape[0] == 1:
        return a[0]
    return jax.lax.dynamic_index_in_dim(a, index, axis=0, keepdims=False)
