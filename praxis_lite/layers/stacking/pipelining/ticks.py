"""The tick loop of a pipeline: in each tick, every stage runs once and passes on its output.

Every array has a stage dim, which is sharded over the stage axis. XLA partitions a `jax.vmap` over
this dim, so that each device runs only its own stages, and compiles a roll along this dim to a
collective-permute.
"""

import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from praxis_lite.core.collectives.varying import varying_alike
from praxis_lite.core.collectives.vmapped_axes import vmap_over
from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.sharding.split_dims import (
    DimSplit,
    SplitDims,
    to_partition_spec,
    without_axes,
)
from praxis_lite.layers.base.variables import assigned_values
from praxis_lite.layers.stacking.pipelining.buffers import Handover
from praxis_lite.layers.stacking.pipelining.pipeline_schedules import Place, Schedule

# R repeats, S stages, P layers per stage and repeat, M microbatches. Name suffixes give the leading
# dims of arrays: x_M is [M, rows, ...].

PyTree = Any
Values = dict[tuple, jax.Array]


@dataclasses.dataclass(frozen=True)
class StageLayout:
    """The sharding of arrays with a stage dim on the current mesh.

    Attributes:
      stage_axis: Mesh axis over which the stage dim is sharded, or None.
      row_split: Sharding of activations [rows, ...]. If None, XLA chooses the sharding.
    """

    stage_axis: DimSplit
    row_split: SplitDims

    @property
    def axis(self) -> Any:
        """The mesh axis (or axes) of the stages; None without a mesh."""
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return None
        split = (self.stage_axis,)
        return to_partition_spec(split, mesh.axis_names, path="Pipeline.stage_axis")[0]

    @property
    def num_devices(self) -> int:
        """Number of devices along the stage axis; 1 if the mesh does not have this axis."""
        mesh = jax.sharding.get_abstract_mesh()
        if isinstance(self.stage_axis, str) and self.stage_axis not in mesh.axis_names:
            return 1
        return math.prod(mesh.shape[axis] for axis in axes_of(self.axis))

    def vmapped_axes(self, num_stages: int) -> tuple[str, ...]:
        """Returns the mesh axes over which a vmap over the stages can be sharded.

        Returns () if the number of stages is not divisible by the number of devices, or inside a
        `jax.shard_map`, where JAX rejects values that vary over the vmap's axes.
        """
        is_inside = bool(jax.sharding.get_abstract_mesh().manual_axes)
        divides = num_stages % self.num_devices == 0
        return axes_of(self.axis) if divides and not is_inside else ()

    def constrain(
        self, x: jax.Array, *, dim: int = 0, row_dim: int | None = None, rank: int | None = None
    ) -> jax.Array:
        """Constrains the sharding of the stage dim of `x` and, if given, of the activation dims.

        Args:
          x: An array with a stage dim.
          dim: Index of the stage dim.
          row_dim: Index of the first activation dim, rows. If None, activation dims are not
            constrained.
          rank: Number of leading entries of row_split to apply. If None, all are applied.
        """
        axis, mesh = self.axis, jax.sharding.get_abstract_mesh()
        if axis is None:
            return x
        # The compiler chooses the sharding of the other dims.
        entries = [PartitionSpec.UNCONSTRAINED] * x.ndim
        entries[dim] = axis
        if row_dim is not None and self.row_split is not None:
            rows = to_partition_spec(
                tuple(self.row_split)[:rank],
                mesh.axis_names,
                path="Pipeline.activation_split_dims_mapping",
            )
            rows = without_axes(rows, mesh.manual_axes)
            entries[row_dim : row_dim + len(rows)] = rows
        return jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))


def apply_layer(
    block: Any,
    x: jax.Array,
    layer: jax.Array,
    microbatch: jax.Array | int,
    *,
    key: jax.Array | None,
    cache: PyTree,
    **inputs: Any,
) -> tuple[jax.Array, PyTree, Values]:
    """Applies a block with the key for this layer and microbatch.

    Returns:
      (x, cache, assigned values).
    """
    if key is not None:
        key = jax.random.fold_in(jax.random.fold_in(key, layer), microbatch)
    x, cache = block(x, key=key, cache=cache, **inputs)
    return x, cache, assigned_values(block)


def run_ticks(
    blocks: Any,
    x_M: jax.Array,
    inputs_M: PyTree,
    others: dict[str, Any],
    key: jax.Array | None,
    cache: PyTree,
    *,
    schedule: Schedule,
    num_layers: int,
    stream_io: bool,
    rematerialized: Callable[..., AbstractContextManager[Any]],
    layout: StageLayout,
) -> tuple[jax.Array, PyTree, Values]:
    """Runs all ticks, and returns x_M after all blocks, the cache, and the assigned values.

    Args:
      blocks: Module with arrays [R, S, P, ...].
      x_M: Input of the first block, [M, rows, ...].
      inputs_M: Other inputs of the blocks, [M, rows, ...], or [1, 1, ...] if shared by all rows.
      others: Inputs that are not arrays.
      key: Random key of the pass, or None.
      cache: Cache [R, S, P, ...] for one microbatch, or None.
      schedule: The tick schedule.
      num_layers: Number of layers per repeat, at most S P.
      stream_io: See Pipeline.
      rematerialized: `remat` with every argument bound except the function.
      layout: The sharding of arrays with a stage dim.
    """
    num_stages = schedule.num_stages

    def work(
        x: jax.Array,
        blocks_RP: Any,
        cache_RP: PyTree,
        inputs_M: PyTree,
        place: Place,
        is_valid: jax.Array,
    ) -> tuple[jax.Array, PyTree, Values]:
        """Runs one stage in one tick."""
        inputs = jax.tree.map(lambda a: pick(a, place.microbatch), inputs_M)
        block_P, cache_P = jax.tree.map(lambda a: pick(a, place.repeat), (blocks_RP, cache_RP))
        # Idle stages also compute, with an arbitrary layer and rows of the batch.
        block_P, x, inputs = stop_gradient_unless(is_valid, (block_P, x, inputs))
        layers_per_stage = jax.tree.leaves(block_P)[0].shape[0]
        first = place.stage * layers_per_stage

        def step(x: jax.Array, layer: tuple) -> tuple[jax.Array, tuple]:
            block, index_in_repeat, cache = layer
            x, cache, values = apply_layer_at(
                block,
                x,
                index_in_repeat,
                place,
                num_layers=num_layers,
                has_padding_layers=layers_per_stage * num_stages > num_layers,
                key=key,
                cache=cache,
                **inputs,
                **others,
            )
            return x, (cache, values)

        layers = block_P, first + jnp.arange(layers_per_stage), cache_P
        x, (new_cache_P, values_P) = jax.lax.scan(step, x, layers)
        # Idle stages must not write to the cache.
        cache_RP = jax.tree.map(
            lambda all_R, old, new: jax.lax.dynamic_update_index_in_dim(
                all_R, jnp.where(is_valid, new, old), place.repeat, axis=0
            ),
            cache_RP,
            cache_P,
            new_cache_P,
        )
        return x, cache_RP, values_P

    inputs_SM = copy_to_stages(inputs_M, num_stages, layout)
    # The stage dim is the second dim of blocks and cache, [R, S, P, ...], and the first of other
    # arrays.
    with rematerialized(work) as work:
        work_S = vmap_over(
            layout.vmapped_axes(num_stages),
            work,
            in_axes=(0, 1, 1, 0, 0, 0),
            out_axes=(0, 1, 0),
        )
        x_M, cache, values, _ = scan_ticks(
            lambda x_S, cache, *at: work_S(x_S, blocks, cache, inputs_SM, *at),
            Handover(schedule, layout, stream_io),
            x_M,
            cache,
            assigned_values(blocks),
            varying_like=blocks,
        )
    return x_M, cache, values


def scan_ticks(
    work_S: Callable[..., tuple[jax.Array, PyTree, Values]],
    handover: Handover,
    x_M: jax.Array,
    cache: PyTree,
    old_values: Values,
    *,
    varying_like: PyTree,
    saves_inputs: bool = False,
) -> tuple[jax.Array, PyTree, Values, jax.Array | None]:
    """Scans over the ticks of a forward pass.

    Args:
      work_S: Runs all stages; takes (x_S, cache, place, is_valid), the last two with an entry per
        stage, and returns (x_S, cache, values assigned in the tick [S, P, ...]).
      handover: The transfer of activations between stages.
      x_M: See `run_ticks`.
      cache: See `run_ticks`.
      old_values: Values of the assigned variables before the pass, [R, S, P, ...].
      varying_like: Arrays that vary over the same manual mesh axes as the results.
      saves_inputs: Whether to also return the stages' inputs in each tick.
    """
    schedule, layout = handover.schedule, handover.layout
    stages, repeats = jnp.arange(schedule.num_stages), jnp.arange(schedule.circular_repeat)[:, None]

    def tick(carry: tuple, t: jax.Array) -> tuple[tuple, jax.Array | None]:
        # The carry contains the stages' next inputs, the handover's buffers, the cache, and the
        # values that layers have assigned.
        x_S, stored, cache, values = carry
        microbatch, repeat, is_valid = schedule.work(t, stages)
        x_S, stored = handover.enter(x_S, stored, t)
        y_S, cache, new_values = work_S(x_S, cache, Place(stages, microbatch, repeat), is_valid)
        y_S = layout.constrain(y_S, row_dim=1)
        is_updated_RS = (repeats == repeat[None]) & is_valid[None]
        for path, new in new_values.items():
            value = _accumulate(
                values[path], old_values[path], new, is_updated_RS, schedule.num_microbatches
            )
            values = {**values, path: layout.constrain(value, dim=1)}
        arrived_S, stored = handover.leave(y_S, stored, t)
        return (arrived_S, stored, cache, values), x_S if saves_inputs else None

    carry = varying_alike((*handover.start(x_M), cache, old_values), varying_like)
    (_, stored, cache, values), x_TS = jax.lax.scan(tick, carry, jnp.arange(schedule.num_ticks))
    return handover.outputs(stored), cache, values, x_TS


def apply_layer_at(
    block: Any,
    x: jax.Array,
    index_in_repeat: jax.Array,
    place: Place,
    *,
    num_layers: int,
    has_padding_layers: bool,
    cache: PyTree,
    **inputs: Any,
) -> tuple[jax.Array, PyTree, Values]:
    """Applies a layer in a repeat, or returns x unchanged for a padding layer.

    Returns:
      (x, cache, assigned values).
    """
    layer, microbatch = place.repeat * num_layers + index_in_repeat, place.microbatch
    if not has_padding_layers:
        return apply_layer(block, x, layer, microbatch, cache=cache, **inputs)
    exists = index_in_repeat < num_layers
    block, given = stop_gradient_unless(exists, (block, x))
    new_x, cache, values = apply_layer(block, given, layer, microbatch, cache=cache, **inputs)
    return jnp.where(exists, new_x, x), cache, values


def stop_gradient_unless(is_valid: jax.Array, tree: PyTree) -> PyTree:
    """Stops gradients through `tree` unless the results are valid.

    Unused results may be NaN; their gradient would then be NaN as well (zero times NaN).
    """

    def cut(a: jax.Array) -> jax.Array:
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            return a
        return jnp.where(is_valid, a, jax.lax.stop_gradient(a))

    return jax.tree.map(cut, tree)


def copy_to_stages(
    inputs_M: PyTree, num_stages: int, layout: StageLayout, *, dim: int = 0
) -> PyTree:
    """Copies the blocks' inputs [M, rows, ...] to every stage, with S as a new dim `dim`.

    Gradients with respect to the copies are summed only once, after the last tick.
    """

    def copied(a: jax.Array) -> jax.Array:
        shape = *a.shape[:dim], num_stages, *a.shape[dim:]
        copies = jnp.broadcast_to(jnp.expand_dims(a, dim), shape)
        has_rows = a.ndim > 1 and a.shape[1] > 1
        return layout.constrain(copies, dim=dim, row_dim=2 if has_rows else None, rank=1)

    return jax.tree.map(copied, inputs_M)


def mean_update(old: jax.Array, new_M: jax.Array) -> jax.Array:
    """Returns the mean of a variable over microbatches that all started from `old`."""
    if not jnp.issubdtype(old.dtype, jnp.inexact):
        return new_M[-1]
    # Average the differences, so that values that no microbatch changes stay bit-identical.
    return old + jnp.mean(new_M - old[None], axis=0)


def _accumulate(
    value_RSP: jax.Array,
    old_RSP: jax.Array,
    new_SP: jax.Array,
    is_updated_RS: jax.Array,
    num_microbatches: int,
) -> jax.Array:
    """Returns the running `mean_update` of one variable."""
    is_updated = is_updated_RS.reshape(*is_updated_RS.shape, *[1] * (value_RSP.ndim - 2))
    # With several microbatches, floats change by the mean over microbatches. Other values are
    # replaced.
    if num_microbatches == 1 or not jnp.issubdtype(value_RSP.dtype, jnp.inexact):
        return jnp.where(is_updated, new_SP[None], value_RSP)
    change = (new_SP[None] - old_RSP) / num_microbatches
    return value_RSP + jnp.where(is_updated, change, jnp.zeros_like(change))


def pick(a: jax.Array, index: jax.Array | int) -> jax.Array:
    """Returns `a[index]`, or `a[0]` if that is the only entry."""
    if a.shape[0] == 1:
        return a[0]
    return jax.lax.dynamic_index_in_dim(a, index, axis=0, keepdims=False)
