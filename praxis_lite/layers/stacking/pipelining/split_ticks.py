"""The ticks of a pipeline whose backward pass is cut in two: gradients of inputs, then of weights.

In the backward ticks a stage computes the gradient of its inputs, for which the stage before waits.
Stage s computes the gradients of weights s ticks later, so that all stages do that for the same
microbatch in the same tick, and none is idle: only the forward ticks and the gradients of inputs
have bubbles (zero bubble, arXiv:2401.10241). One scan forward and two backward: S - 1 ticks without
weights, the others with them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.collectives.varying import varying_alike
from praxis_lite.layers.base.variables import assigned_values
from praxis_lite.layers.stacking.pipelining.buffers import Handover
from praxis_lite.layers.stacking.pipelining.schedules import Schedule
from praxis_lite.layers.stacking.pipelining.ticks import (
    StageLayout,
    Values,
    apply_layer_at,
    gathered,
    of_each_stage,
    pick,
)
from praxis_lite.layers.stacking.pipelining.split_backward import SplitProgram, split_program

# R repeats, S stages, P places of layers of one stage in one repeat, M microbatches, T ticks. Names
# end with the leading dims of their arrays: x_M is [M, rows, ...]. X is R or M, of weights or of
# inputs.

PyTree = Any


def run_split_ticks(
    blocks: Any, x_M: jax.Array, inputs_M: PyTree, others: dict[str, Any], key: jax.Array | None,
    *, schedule: Schedule, num_layers: int, stream_io: bool, layout: StageLayout,
) -> tuple[jax.Array, Values]:
    """Returns x_M after all blocks, and the assigned variables' new values.

    Each tick's inputs are kept, and the tick computed again from them. Besides, of S microbatches
    the arrays are kept of which the gradients of weights are made.

    Args: as of `run_ticks`.
    """
    # A custom_vjp takes its arrays as arguments; those without rows go with those that have some.
    scalars = {
        name: jax.tree.map(lambda a: a[None], value) for name, value in others.items()
        if jax.tree.leaves(value)
        and all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))
    }
    leaves, form = jax.tree.flatten(blocks)
    inputs, inputs_form = jax.tree.flatten({**inputs_M, **scalars})
    stages = _Stages(
        form, len(leaves), inputs_form,
        {name: value for name, value in others.items() if name not in scalars},
        schedule, num_layers, Handover(schedule, layout, stream_io), layout,
    )

    @jax.custom_vjp
    def run(leaves: list, inputs: list, x_M: jax.Array, key: Any) -> tuple:
        return stages.forward(leaves, inputs, x_M, key)[0]

    def run_fwd(leaves: list, inputs: list, x_M: jax.Array, key: Any) -> tuple:
        results, x_TS = stages.forward(leaves, inputs, x_M, key)
        return results, (leaves, inputs, key, x_TS)

    run.defvjp(run_fwd, stages.backward)
    return run(leaves, inputs, x_M, key)


@dataclasses.dataclass(frozen=True)
class _Stages:
    """The stages' work. Its `arrays` are the blocks' [R, S, P, ...], then the inputs' [M, S, ...].

    Attributes:
      form, num_leaves: of the blocks.
      others: the inputs that are no arrays.
    """

    form: Any
    num_leaves: int
    inputs_form: Any
    others: dict[str, Any]
    schedule: Schedule
    num_layers: int
    handover: Handover
    layout: StageLayout

    @property
    def stages(self) -> jax.Array:
        """0 to S - 1."""
        return jnp.arange(self.schedule.num_stages)

    def arrays(self, leaves: Sequence[jax.Array], inputs: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the arrays, [X, S, ...]; of the inputs a copy per stage."""
        num_stages = self.schedule.num_stages
        return [*leaves, *of_each_stage(list(inputs), num_stages, self.layout, dim=1)]

    def picked(self, arrays: Sequence[jax.Array], microbatch: Any, repeat: Any) -> list[jax.Array]:
        """Returns the arrays of a microbatch and a repeat."""
        return [pick(a, self.index(i, microbatch, repeat)) for i, a in enumerate(arrays)]

    def index(self, number: int, microbatch: Any, repeat: Any) -> Any:
        """Returns the index of an array's part."""
        return repeat if number < self.num_leaves else microbatch

    def work(
        self, arrays: Sequence[jax.Array], key: Any, stage: jax.Array, microbatch: jax.Array,
        repeat: jax.Array, x: jax.Array,
    ) -> tuple[jax.Array, Values]:
        """Returns a stage's (x, assigned values [P, ...]) in a tick, of its picked arrays.

        Its layers follow one another without a loop, which could not be cut in two.
        """
        leaves_P = arrays[: self.num_leaves]
        inputs = jax.tree.unflatten(self.inputs_form, arrays[self.num_leaves :])
        num_places, values_P = leaves_P[0].shape[0], []
        for place in range(num_places):
            block = jax.tree.unflatten(self.form, [leaf[place] for leaf in leaves_P])
            x, _, values = apply_layer_at(
                block, x, stage * num_places + place, repeat, microbatch,
                num_layers=self.num_layers,
                has_free_places=num_places * self.schedule.num_stages > self.num_layers,
                key=key, cache=None, **inputs, **self.others,
            )
            values_P.append(values)
        return x, jax.tree.map(lambda *values: jnp.stack(values), *values_P)

    def forward(self, leaves: list, inputs: list, x_M: jax.Array, key: Any) -> tuple:
        """Returns ((x_M, assigned values), the stages' inputs in each tick)."""
        old_values = assigned_values(jax.tree.unflatten(self.form, leaves))
        arrays = self.arrays(leaves, inputs)

        def work(arrays: list, stage: Any, microbatch: Any, repeat: Any, x: Any) -> tuple:
            picked = self.picked(arrays, microbatch, repeat)
            return self.work(picked, key, stage, microbatch, repeat, x)

        def tick(carry: tuple, t: jax.Array) -> tuple[tuple, jax.Array]:
            x_S, stored, values = carry
            microbatch, repeat, is_valid = self.schedule.work(t, self.stages)
            x_S, stored = self.handover.enter(x_S, stored, t)
            y_S, new_values = jax.vmap(work, in_axes=(1, 0, 0, 0, 0))(
                arrays, self.stages, microbatch, repeat, x_S
            )
            y_S = self.layout.constrain(y_S, row_dim=1)
            values = gathered(
                values, old_values, new_values, repeat, is_valid, self.schedule, self.layout
            )
            arrived_S, stored = self.handover.leave(y_S, stored, t)
            return (arrived_S, stored, values), x_S

        carry = varying_alike((*self.handover.start(x_M), old_values), leaves)
        (_, stored, values), x_TS = jax.lax.scan(tick, carry, jnp.arange(self.schedule.num_ticks))
        return (self.handover.outputs(stored), values), x_TS

    def backward(self, saved: tuple, gradients: tuple) -> tuple:
        """Returns the gradients of `forward`'s arguments, None of what has none.

        The ticks are those of `forward` from the last to the first.
        """
        leaves, inputs, key, x_TS = saved
        arrays, floats = self.arrays(leaves, inputs), [*leaves, *inputs]
        floats = [i for i, a in enumerate(floats) if jnp.issubdtype(a.dtype, jnp.inexact)]
        of_outputs, of_values = gradients
        of_values = {
            path: of_value / self.schedule.num_microbatches
            for path, of_value in of_values.items() if of_value.dtype != jax.dtypes.float0
        }
        split = self.split(arrays, floats, key, x_TS, of_values)
        handed = HandoverGradient(self.handover, of_outputs)
        num_stages, num_ticks = self.schedule.num_stages, self.schedule.num_ticks

        def first(
            arrays: list, stage: Any, microbatch: Any, repeat: Any, x: Any, of_y: Any, of_values: Any
        ) -> tuple:
            of_values = {path: pick(of_value, repeat) for path, of_value in of_values.items()}
            picked = self.picked(arrays, microbatch, repeat)
            return split.first(picked, key, stage, microbatch, repeat, x, of_y, of_values)

        first_S = jax.vmap(first, in_axes=(1, 0, 0, 0, 0, 0, 1))

        def by_inputs(carry: tuple, tick: tuple) -> tuple[tuple, None]:
            of_arrived_S, of_stored, residuals = carry
            t, x_S = tick
            microbatch, repeat, is_valid = self.schedule.work(t, self.stages)
            of_y_S, of_stored = handed.leave(of_arrived_S, of_stored, t)
            of_x_S, new_residuals = first_S(
                arrays, self.stages, microbatch, repeat, x_S, of_y_S, of_values
            )
            # What an idle stage computes may be NaN.
            is_valid = is_valid.reshape(-1, *[1] * (of_x_S.ndim - 1))
            of_x_S = self.layout.constrain(jnp.where(is_valid, of_x_S, 0), row_dim=1)
            residuals = [
                self.layout.constrain(
                    jax.lax.dynamic_update_index_in_dim(kept, new, t % num_stages, axis=1)
                )
                for kept, new in zip(residuals, new_residuals, strict=True)
            ]
            return (*handed.enter(of_x_S, of_stored, t), residuals), None

        def second(arrays: list, stage: Any, residuals: list, t: Any, m: Any, r: Any) -> list:
            # In tick t + s stage s had the microbatch that stage 0 has in tick t.
            residuals = [pick(kept, (t + stage) % num_stages) for kept in residuals]
            return split.second(residuals, self.picked(arrays, m, r), key, stage, m, r)

        def with_weights(carry: tuple, tick: tuple) -> tuple[tuple, None]:
            carry, of_floats = carry
            carry, _ = by_inputs(carry, tick)
            t, _ = tick
            microbatch, repeat, is_valid = self.schedule.work(t, 0)
            new = jax.vmap(second, in_axes=(1, 0, 0, None, None, None))(
                arrays, self.stages, carry[-1], t, microbatch, repeat
            )
            of_floats = [
                _added(of_array, jnp.where(is_valid, part, 0), self.index(i, microbatch, repeat))
                for i, of_array, part in zip(floats, of_floats, new, strict=True)
            ]
            return (carry, of_floats), None

        _, residuals = jax.eval_shape(
            first_S, arrays, self.stages, self.stages, self.stages, x_TS[0], x_TS[0], of_values
        )
        room = [jnp.zeros((num_stages, num_stages, *a.shape[1:]), a.dtype) for a in residuals]
        carry, of_floats = varying_alike(
            ((*handed.start(), room), [jnp.zeros_like(arrays[i]) for i in floats]),
            (leaves, of_outputs),
        )
        ticks = jnp.arange(num_ticks)[::-1], x_TS[::-1]
        before, after = (
            jax.tree.map(lambda a: a[part], ticks)
            for part in (slice(num_stages - 1), slice(num_stages - 1, None))
        )
        if num_stages > 1:
            carry, _ = jax.lax.scan(by_inputs, carry, before)
        (carry, of_floats), _ = jax.lax.scan(with_weights, (carry, of_floats), after)
        of_arrays = dict(zip(floats, of_floats, strict=True))
        of_leaves = [of_arrays.get(i) for i in range(self.num_leaves)]
        of_inputs = [of_arrays.get(i) for i in range(self.num_leaves, len(arrays))]
        of_inputs = [None if a is None else jnp.sum(a, axis=1) for a in of_inputs]
        return of_leaves, of_inputs, handed.inputs(*carry[:2]), None

    def split(
        self, arrays: list, floats: Sequence[int], key: Any, x_TS: jax.Array, of_values: Values
    ) -> SplitProgram:
        """Returns a stage's backward pass: its input's gradient first, the floats' second."""
        num_again = 5

        def program(*args: Any) -> tuple[jax.Array, list[jax.Array]]:
            arrays, *places = args[:num_again]
            x, of_y, of_values = args[num_again:]

            def work(values: list, x: jax.Array) -> tuple[jax.Array, Values]:
                given = dict(enumerate(arrays)) | dict(zip(floats, values, strict=True))
                y, assigned = self.work(list(given.values()), *places, x)
                return y, {path: assigned[path] for path in of_values}

            _, pull = jax.vjp(work, [arrays[i] for i in floats], x)
            of_floats, of_x = pull((of_y, of_values))
            return of_x, of_floats

        index = jax.ShapeDtypeStruct((), self.stages.dtype)
        arrays, x, of_values = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape[2:], a.dtype), (arrays, x_TS, of_values)
        )
        args = arrays, key, index, index, index, x, x, of_values
        return split_program(program, args, num_again)


class HandoverGradient:
    """The gradient of a Handover, which is linear: its methods take and return gradients.

    Args:
      of_outputs: the gradient of all ticks' result, [M, rows, ...].
    """

    def __init__(self, handover: Handover, of_outputs: jax.Array):
        self._handover, self._of_outputs = handover, of_outputs

    def _pulled(self, function: Any, of_results: Any) -> Any:
        # The values at which the gradient is taken play no part.
        started = jax.eval_shape(self._handover.start, self._of_outputs)
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), started)
        return jax.vjp(function, *zeros)[1](of_results)

    def start(self) -> tuple[jax.Array, Any]:
        """Returns the gradients of (x_S, stored) after the last tick."""
        return self._pulled(
            lambda x_S, stored: self._handover.outputs(stored), self._of_outputs
        )

    def leave(self, of_arrived_S: jax.Array, of_stored: Any, t: jax.Array) -> tuple:
        """Returns the gradients of the stages' results, [S, rows, ...], and of what is stored."""
        return self._pulled(
            lambda x_S, stored: self._handover.leave(x_S, stored, t), (of_arrived_S, of_stored)
        )

    def enter(self, of_x_S: jax.Array, of_stored: Any, t: jax.Array) -> tuple:
        """Returns the gradients of what arrived at the stages, and of what is stored."""
        return self._pulled(
            lambda x_S, stored: self._handover.enter(x_S, stored, t), (of_x_S, of_stored)
        )

    def inputs(self, of_x_S: jax.Array, of_stored: Any) -> jax.Array:
        """Returns the gradient of x_M before the first tick."""
        _, pull = jax.vjp(self._handover.start, jnp.zeros_like(self._of_outputs))
        return pull((of_x_S, of_stored))[0]


def _added(total: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
    """Returns `total` with `part` added to total[index], or to the only part there is."""
    index = 0 if total.shape[0] == 1 else index
    part += jax.lax.dynamic_index_in_dim(total, index, axis=0, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(total, part, index, axis=0)
