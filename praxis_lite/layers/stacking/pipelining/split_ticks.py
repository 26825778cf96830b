"""The tick loop of a pipeline with a split backward pass: input gradients, then weight gradients.

In a backward tick, a stage computes only the gradient with respect to its inputs, because the
previous stage is waiting for that gradient. Stage s computes its weight gradients s ticks later.
All stages then compute the weight gradients of the same microbatch in the same tick, and no stage
is idle: only forward passes and input gradients have bubbles (zero bubble, arXiv:2401.10241).

The forward pass is one scan. The backward pass is two scans: the first runs S - 1 ticks without
weight gradients, the second runs the remaining ticks with them.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.collectives.varying import varying_alike
from praxis_lite.layers.base.variables import assigned_values
from praxis_lite.layers.stacking.pipelining.buffers import Handover, transpose
from praxis_lite.layers.stacking.pipelining.pipeline_schedules import Place, Schedule
from praxis_lite.layers.stacking.pipelining.stage_work import StageWork, add_at, floats_of
from praxis_lite.layers.stacking.pipelining.ticks import (
    StageLayout,
    Values,
    pick,
    scan_ticks,
)

# R repeats, S stages, P layers per stage and repeat, M microbatches, T ticks. Name suffixes give
# the leading dims of arrays: x_M is [M, rows, ...]. X is R for weights, and M for inputs.

PyTree = Any


def run_split_ticks(
    blocks: Any,
    x_M: jax.Array,
    inputs_M: PyTree,
    others: dict[str, Any],
    key: jax.Array | None,
    *,
    schedule: Schedule,
    num_layers: int,
    stream_io: bool,
    layout: StageLayout,
) -> tuple[jax.Array, Values]:
    """Runs all ticks, and returns x_M after all blocks, and the assigned values.

    The inputs of each tick are saved, and the backward pass recomputes the tick from its inputs.
    The backward pass also stores the residuals of S microbatches for their weight gradients. See
    `run_ticks` for the arguments.
    """
    # A custom_vjp needs all arrays as arguments. Arrays without a batch dim get one.
    scalars = {
        name: jax.tree.map(lambda a: a[None], value)
        for name, value in others.items()
        if jax.tree.leaves(value)
        and all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))
    }
    leaves, treedef = jax.tree.flatten(blocks)
    inputs, inputs_treedef = jax.tree.flatten({**inputs_M, **scalars})
    others = {name: value for name, value in others.items() if name not in scalars}
    work = StageWork(
        treedef, len(leaves), inputs_treedef, others, schedule.num_stages, num_layers, layout
    )
    ticks = _Ticks(work, schedule, Handover(schedule, layout, stream_io))

    # x_TS, the input of each stage in each tick, is the only activation that is saved.
    @jax.custom_vjp
    def run(leaves: list, inputs: list, x_M: jax.Array, key: Any) -> tuple:
        return ticks.forward(leaves, inputs, x_M, key)[0]

    def run_fwd(leaves: list, inputs: list, x_M: jax.Array, key: Any) -> tuple:
        results, x_TS = ticks.forward(leaves, inputs, x_M, key)
        return results, (leaves, inputs, key, x_TS)

    run.defvjp(run_fwd, ticks.backward)
    return run(leaves, inputs, x_M, key)


@dataclasses.dataclass(frozen=True)
class _Ticks:
    """The forward and backward tick loops."""

    work: StageWork
    schedule: Schedule
    handover: Handover

    def forward(self, leaves: list, inputs: list, x_M: jax.Array, key: Any) -> tuple:
        """Returns ((x_M, assigned values), the stages' inputs in each tick)."""
        old_values = assigned_values(jax.tree.unflatten(self.work.treedef, leaves))
        arrays = self.work.arrays(leaves, inputs)

        def work(arrays: list, place: Place, x: Any) -> tuple:
            return self.work.work(self.work.picked(arrays, place), key, place, x)

        work_S = self.work.vmap(work, in_axes=(1, 0, 0))

        def run_stages(x_S: Any, cache: None, place: Place, _: Any) -> tuple:
            y_S, values = work_S(arrays, place, x_S)
            return y_S, cache, values

        x_M, _, values, x_TS = scan_ticks(
            run_stages, self.handover, x_M, None, old_values, varying_like=leaves, saves_inputs=True
        )
        return (x_M, values), x_TS

    def backward(self, saved: tuple, gradients: tuple) -> tuple:
        """Runs the ticks of `forward` in reverse order.

        Returns:
          The gradients with respect to the arguments of `forward`; None for integers and keys.
        """
        leaves, inputs, key, x_TS = saved
        arrays = self.work.arrays(leaves, inputs)
        floats = floats_of(arrays)
        grad_outputs, grad_values = gradients
        grad_values = {
            path: grad_value / self.schedule.num_microbatches
            for path, grad_value in grad_values.items()
            if grad_value.dtype != jax.dtypes.float0
        }
        # `split.first` computes input gradients and residuals; `split.second` computes weight
        # gradients from the residuals.
        split = self.work.split(arrays, floats, key, x_TS[0], grad_values)
        handover, started = self.handover, jax.eval_shape(self.handover.start, grad_outputs)
        num_stages, num_ticks = self.schedule.num_stages, self.schedule.num_ticks

        def input_grads(arrays: list, place: Place, x: Any, grad_y: Any, grad_values: Any) -> tuple:
            grad_values = {path: pick(a, place.repeat) for path, a in grad_values.items()}
            picked = self.work.picked(arrays, place)
            return split.first(picked, key, place, x, grad_y, grad_values)

        input_grads_S = self.work.vmap(input_grads, split, in_axes=(1, 0, 0, 0, 1))

        def input_grads_tick(carry: tuple, tick: tuple) -> tuple[tuple, None]:
            # The carry contains the gradients of the arrays that arrived at the stages and of the
            # handover's buffers, and the residuals of the last S ticks.
            grad_arrived_S, grad_stored, residuals = carry
            t, x_S = tick
            microbatch, repeat, is_valid = self.schedule.work(t, self.work.stages)
            leave, enter = (functools.partial(f, t=t) for f in (handover.leave, handover.enter))
            grad_y_S, grad_stored = transpose(leave, started, (grad_arrived_S, grad_stored))
            place = Place(self.work.stages, microbatch, repeat)
            grad_x_S, new_residuals = input_grads_S(arrays, place, x_S, grad_y_S, grad_values)
            # Idle stages may produce NaN.
            is_valid = is_valid.reshape(-1, *[1] * (grad_x_S.ndim - 1))
            grad_x_S = self.work.layout.constrain(jnp.where(is_valid, grad_x_S, 0), row_dim=1)
            residuals = [
                self.work.layout.constrain(
                    jax.lax.dynamic_update_index_in_dim(old, new, t % num_stages, axis=1)
                )
                for old, new in zip(residuals, new_residuals, strict=True)
            ]
            return (*transpose(enter, started, (grad_x_S, grad_stored)), residuals), None

        def weight_grads(arrays: list, place: Place, residuals: list, t: Any) -> list:
            # The microbatch that stage 0 has at tick t was on stage s at tick t + s.
            residuals = [pick(residual, (t + place.stage) % num_stages) for residual in residuals]
            return split.second(residuals, self.work.picked(arrays, place), key, place)

        def weight_grads_tick(carry: tuple, tick: tuple) -> tuple[tuple, None]:
            carry, grad_floats = carry
            carry, _ = input_grads_tick(carry, tick)
            t, _ = tick
            microbatch, repeat, is_valid = self.schedule.work(t, 0)
            place = Place(self.work.stages, microbatch, repeat)
            # carry[-1] contains the residuals, including those that this tick has just stored.
            new = self.work.vmap(weight_grads, split, in_axes=(1, Place(0, None, None), 0, None))(
                arrays, place, carry[-1], t
            )
            grad_floats = [
                jax.tree.map(
                    lambda total, part, i=i: add_at(
                        total, jnp.where(is_valid, part, 0), self.work.index(i, place)
                    ),
                    totals,
                    parts,
                )
                for i, totals, parts in zip(floats, grad_floats, new, strict=True)
            ]
            return (carry, grad_floats), None

        # The initial carry. Residuals are [S, S, ...]: a slot per tick, modulo S, for each stage.
        _, residuals = jax.eval_shape(
            input_grads_S, arrays, Place(*[self.work.stages] * 3), x_TS[0], x_TS[0], grad_values
        )
        empty = [jnp.zeros((num_stages, num_stages, *a.shape[1:]), a.dtype) for a in residuals]
        totals = [self.work.unstack_layers(i, jnp.zeros_like(arrays[i]), 2) for i in floats]
        after_last = transpose(lambda _, stored: handover.outputs(stored), started, grad_outputs)
        carry, grad_floats = varying_alike(((*after_last, empty), totals), (leaves, grad_outputs))
        # Backward ticks run in reverse order. The first S - 1 compute no weight gradients.
        ticks = jnp.arange(num_ticks)[::-1], x_TS[::-1]
        before, after = (
            jax.tree.map(lambda a, part=part: a[part], ticks)
            for part in (slice(num_stages - 1), slice(num_stages - 1, None))
        )
        if num_stages > 1:
            carry, _ = jax.lax.scan(input_grads_tick, carry, before)
        (carry, grad_floats), _ = jax.lax.scan(weight_grads_tick, (carry, grad_floats), after)
        grad_floats = [
            self.work.stack_layers(i, grad) for i, grad in zip(floats, grad_floats, strict=True)
        ]
        # Map the gradients back to the arguments. Every stage had a copy of the inputs, so their
        # gradients are summed over stages.
        grad_arrays = dict(zip(floats, grad_floats, strict=True))
        grad_leaves = [grad_arrays.get(i) for i in range(self.work.num_leaves)]
        grad_inputs = [grad_arrays.get(i) for i in range(self.work.num_leaves, len(arrays))]
        grad_inputs = [None if a is None else jnp.sum(a, axis=1) for a in grad_inputs]
        (grad_x_M,) = transpose(handover.start, (grad_outputs,), carry[:2])
        return grad_leaves, grad_inputs, grad_x_M, None
