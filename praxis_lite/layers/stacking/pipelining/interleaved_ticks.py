"""The ticks of 1F1B: each processes one microbatch forward and another one backward.

The loss of a microbatch is computed in the tick in which it leaves the last stage, and its backward
pass begins in the same tick. So a stage stores the inputs of at most 2 R S - 1 microbatches.

Skip this file on a first read: `ticks.py` is the same loop without a backward pass of its own.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.layers.stacking.pipelining.buffers import shift
from praxis_lite.layers.stacking.pipelining.pipeline_schedules import InterleavedSchedule
from praxis_lite.layers.stacking.pipelining.split_model import SplitModel
from praxis_lite.layers.stacking.pipelining.stage_work import StageWork, added, floats_of
from praxis_lite.layers.stacking.pipelining.ticks import Values, pick

# R repeats, S stages, P layers of one stage in one repeat, M microbatches, K saved inputs. Suffixes
# of names are the leading dims of arrays.

PyTree = Any


class Carry(NamedTuple):
    """The carry of the scan over ticks; `grad_x` is the gradient of `x`."""

    x_S: jax.Array
    grad_x_S: jax.Array
    kept_SK: jax.Array  # Inputs of the stages whose backward pass is still to come.
    residuals: list[jax.Array]  # [S, ticks, ...], of the last S ticks, or of this tick.
    grad_floats: list[jax.Array]  # [X, S, ...], float32.
    grad_ends: PyTree
    values: Values  # Values assigned by the blocks, [S, M, R, P, ...].
    grad_values: Values
    reported_M: PyTree
    weight_M: jax.Array


@dataclasses.dataclass(frozen=True)
class InterleavedTicks:
    """1F1B over all microbatches.

    Attributes:
      schedule: The schedule of the ticks.
      work: The work of a stage.
      ends: The model before and after its pipeline.
      arrays: Arrays of `work`, [X, S, ...].
      keys_M: Keys of the microbatches, or None.
    """

    schedule: InterleavedSchedule
    work: StageWork
    ends: SplitModel
    arrays: list[jax.Array]
    keys_M: jax.Array | None

    @property
    def floats(self) -> list[int]:
        """Indices of the arrays with gradients: the float arrays of the blocks."""
        return [i for i in floats_of(self.arrays) if i < self.work.num_leaves]

    def run(self) -> tuple[list[jax.Array], PyTree, PyTree, jax.Array]:
        """Returns (gradients by `floats`, gradients of the ends, reports [M, ...], weights [M]).

        The gradients are sums over microbatches, each multiplied by the microbatch's weight.
        """
        carry = self.start()
        for ticks, does_forward, does_inputs, does_weights in self.schedule.phases:
            carry, _ = jax.lax.scan(
                functools.partial(self.tick, does_forward, does_inputs, does_weights), carry,
                jnp.arange(ticks.start, ticks.stop),
            )
        grad_floats = [
            self.work.together(i, of) for i, of in zip(self.floats, carry.grad_floats, strict=True)
        ]
        return grad_floats, carry.grad_ends, carry.reported_M, carry.weight_M

    def start(self) -> Carry:
        """Returns the carry of the first tick."""
        num_stages, num_microbatches = self.schedule.num_stages, self.schedule.num_microbatches
        # Stages that wait for their first microbatch process rows of the batch, too.
        x = self.ends.enter(jnp.array(0))
        x_S = self.constrain_activations(jnp.broadcast_to(x, (num_stages, *x.shape)))
        assigned = self.work.assigned(self.arrays)
        reported, _, _, grad_ends, grad_values = jax.eval_shape(
            self.ends.leave, jnp.array(0), x, assigned
        )
        values, grad_values = (
            room_for_values(a, num_microbatches) for a in (assigned, grad_values)
        )
        stages, _ = self.work.stages, self.split  # Trace `split` here, outside loops.
        _, residuals = jax.eval_shape(self.by_inputs, stages, stages, x_S, x_S, grad_values)
        kept_SK = jnp.broadcast_to(x_S[:, None], (num_stages, self.schedule.num_kept, *x.shape))
        return Carry(
            x_S, jnp.zeros_like(x_S), self.work.layout.constrain(kept_SK, row_dim=2),
            [
                jnp.zeros((num_stages, self.schedule.num_residuals, *a.shape[1:]), a.dtype)
                for a in residuals
            ],
            [
                self.work.apart(i, jnp.zeros(self.arrays[i].shape, jnp.float32), dim=2)
                for i in self.floats
            ],
            jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), grad_ends),
            values, grad_values,
            jax.tree.map(lambda a: jnp.zeros((num_microbatches, *a.shape), a.dtype), reported),
            jnp.zeros(num_microbatches, jnp.float32),
        )

    def tick(
        self, does_forward: bool, does_inputs: bool, does_weights: bool, carry: Carry, t: jax.Array
    ) -> tuple[Carry, None]:
        """Returns the carry of the next tick."""
        if does_forward:
            carry, y_S = self.forward(carry, t)
            if does_inputs:
                carry = self.leave(carry, y_S, t)
            carry = carry._replace(x_S=self.constrain_activations(shift(y_S, 1)))
        if does_inputs:
            carry = self.backward(carry, t)
        if does_weights:
            carry = self.weights(carry, t)
        return carry, None

    def forward(self, carry: Carry, t: jax.Array) -> tuple[Carry, jax.Array]:
        """Returns the carry with the stages' inputs, and the stages' results [S, rows, ...]."""
        microbatch, repeat, is_valid = self.schedule.forward(t, self.work.stages)
        is_entering = is_valid[0] & (repeat[0] == 0)
        x = self.if_any(is_entering, self.ends.enter, microbatch[0])
        x_S = jnp.where(self.at_stage(0, is_entering, carry.x_S), x, carry.x_S)
        x_S = self.constrain_activations(x_S)
        kept_SK = jax.lax.dynamic_update_index_in_dim(
            carry.kept_SK, x_S, t % self.schedule.num_kept, axis=1
        )
        kept_SK = self.work.layout.constrain(kept_SK, row_dim=2)

        def work(
            arrays: list, values: Values, stage: Any, microbatch: Any, repeat: Any, is_valid: Any,
            x: Any,
        ) -> tuple[jax.Array, Values]:
            y, new = self.work.work(*self.picked(arrays, stage, microbatch, repeat), x)
            return y, with_stage_values(values, new, microbatch, repeat, is_valid)

        y_S, values = self.work.vmap(work, in_axes=(1, 0, 0, 0, 0, 0, 0))(
            self.arrays, carry.values, self.work.stages, microbatch, repeat, is_valid, x_S
        )
        return carry._replace(kept_SK=kept_SK, values=values), self.constrain_activations(y_S)

    def leave(self, carry: Carry, y_S: jax.Array, t: jax.Array) -> Carry:
        """Returns the carry with the report and gradient of the microbatch that leaves."""
        last = self.schedule.num_stages - 1
        microbatch, repeat, is_valid = self.schedule.forward(t, last)
        is_leaving = is_valid & (repeat == self.schedule.circular_repeat - 1)
        values = values_of_microbatch(carry.values, microbatch)
        reported, weight, grad_y, grad_ends, grad_values = self.if_any(
            is_leaving, self.ends.leave, microbatch, _at(y_S, last), values
        )
        weight = jnp.where(is_leaving, weight, 0.0)

        def record(all_M: jax.Array, new: jax.Array) -> jax.Array:
            new = jnp.where(is_leaving, new, all_M[microbatch])
            return jax.lax.dynamic_update_index_in_dim(all_M, new, microbatch, axis=0)

        return carry._replace(
            grad_x_S=jnp.where(self.at_stage(last, is_leaving, y_S), grad_y, carry.grad_x_S),
            grad_ends=_sum(carry.grad_ends, grad_ends, weight != 0),
            grad_values=with_values_of_microbatch(
                carry.grad_values, grad_values, microbatch, is_leaving
            ),
            reported_M=jax.tree.map(record, carry.reported_M, reported),
            weight_M=record(carry.weight_M, weight),
        )

    def backward(self, carry: Carry, t: jax.Array) -> Carry:
        """Returns the carry with the gradients of the stages' inputs."""
        stages, layout = self.work.stages, self.work.layout
        microbatch, repeat, is_valid = self.schedule.backward(t, stages)
        counts = is_valid & (carry.weight_M[microbatch] != 0)
        place = self.schedule.tick_forward(t, stages) % self.schedule.num_kept
        x_S = self.constrain_activations(self.work.vmap(pick)(carry.kept_SK, place))
        grad_x_S, residuals = self.by_inputs(
            microbatch, repeat, x_S, self.constrain_activations(carry.grad_x_S), carry.grad_values
        )
        # Results of idle stages, and of microbatches of weight 0, may be NaN.
        counts = counts.reshape(-1, *[1] * (x_S.ndim - 1))
        grad_x_S = self.constrain_activations(jnp.where(counts, grad_x_S, 0))
        microbatch, repeat, is_valid = self.schedule.backward(t, 0)
        is_first = is_valid & (repeat == 0)
        grad_ends = self.if_any(is_first, self.ends.enter_gradient, microbatch, _at(grad_x_S, 0))
        grad_ends = _sum(carry.grad_ends, grad_ends, is_first & (carry.weight_M[microbatch] != 0))
        residuals = [
            layout.constrain(
                jax.lax.dynamic_update_index_in_dim(kept, new, t % self.schedule.num_residuals, 1)
            )
            for kept, new in zip(carry.residuals, residuals, strict=True)
        ]
        return carry._replace(
            grad_x_S=self.constrain_activations(shift(grad_x_S, -1)), residuals=residuals,
            grad_ends=grad_ends,
        )

    def by_inputs(
        self, microbatch: jax.Array, repeat: jax.Array, x_S: jax.Array, grad_y_S: jax.Array,
        grad_values: Values,
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Returns the gradients of all stages' inputs, and residuals."""

        def first(
            arrays: list, stage: Any, m: Any, r: Any, x: Any, grad_y: Any, grad_values: Values
        ) -> tuple:
            grad_values = {path: a[m, r] for path, a in grad_values.items()}
            return self.split.first(*self.picked(arrays, stage, m, r), x, grad_y, grad_values)

        return self.work.vmap(first, self.split, in_axes=(1, 0, 0, 0, 0, 0, 0))(
            self.arrays, self.work.stages, microbatch, repeat, x_S, grad_y_S, grad_values
        )

    def weights(self, carry: Carry, t: jax.Array) -> Carry:
        """Returns the carry with gradients of weights added."""
        stages = self.work.stages
        since = stages if self.schedule.split_backward else 0 * stages
        microbatch, repeat, is_valid = self.schedule.weights(t, stages)
        counts = is_valid & (carry.weight_M[microbatch] != 0)

        def second(
            arrays: list, totals: list, residuals: list, stage: Any, since: Any, m: Any, r: Any,
            counts: Any,
        ) -> list:
            place = (t - since) % self.schedule.num_residuals
            residuals = [pick(kept, place) for kept in residuals]
            parts = self.split.second(residuals, *self.picked(arrays, stage, m, r))
            return jax.tree.map(
                lambda total, part: added(total, _if(counts, part), r), totals, parts
            )

        slot_axis = 0 if microbatch.ndim else None  # Of each stage, or the same of all.
        grad_floats = self.work.vmap(
            second, self.split, in_axes=(1, 1, 0, 0, 0, *[slot_axis] * 3), out_axes=1
        )(
            self.arrays, carry.grad_floats, carry.residuals, stages, since, microbatch, repeat,
            counts,
        )
        return carry._replace(grad_floats=jax.tree.map(
            lambda total: self.work.layout.constrain(total, dim=1), grad_floats
        ))

    @functools.cached_property
    def split(self) -> Any:
        """A stage's backward pass, split in two parts."""
        x = jax.eval_shape(self.ends.enter, jnp.array(0))
        x_S = jax.ShapeDtypeStruct((self.schedule.num_stages, *x.shape), x.dtype)
        key = None if self.keys_M is None else self.keys_M[0]
        assigned = self.work.assigned(self.arrays)
        return self.work.split(self.arrays, self.floats, key, x_S, assigned)

    def picked(
        self, arrays: list, stage: Any, microbatch: Any, repeat: Any
    ) -> tuple[list[jax.Array], Any, Any, Any, Any]:
        """Returns the arguments of a stage's work except x."""
        key = None if self.keys_M is None else pick(self.keys_M, microbatch)
        # The key is already the microbatch's, so the index that `work` folds in is 0.
        return self.work.picked(arrays, microbatch, repeat), key, stage, 0 * microbatch, repeat

    def if_any(self, is_any: jax.Array, function: Any, *args: Any) -> Any:
        """Returns `function(*args)`, or zeros if the condition is False."""
        if self.schedule.circular_repeat == 1:  # The condition is True in nearly all ticks.
            return function(*args)
        zeros = lambda *args: jax.tree.map(  # noqa: E731
            lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(function, *args)
        )
        return jax.lax.cond(is_any, function, zeros, *args)

    def at_stage(self, number: int, condition: jax.Array, x_S: jax.Array) -> jax.Array:
        """Returns bools [S, 1, ...]: the condition at one stage, False at the others."""
        is_there = (self.work.stages == number) & condition
        return is_there.reshape(-1, *[1] * (x_S.ndim - 1))

    def constrain_activations(self, x_S: jax.Array) -> jax.Array:
        """Constrains the sharding of activations."""
        return self.work.layout.constrain(x_S, row_dim=1)


def _at(x_S: jax.Array, stage: int) -> jax.Array:
    """Indexes a stage's array; without the barrier, XLA first reshards it like the ends."""
    return jax.lax.optimization_barrier(x_S)[stage]


# On TPU, XLA moves the reduction of gradients over devices out of the loop over ticks only if there
# is nothing but a select between it and the sum over ticks, such as a product with a weight.


def _if(counts: jax.Array, gradient: jax.Array) -> jax.Array:
    return jnp.where(counts, gradient.astype(jnp.float32), 0.0)


def _sum(total: PyTree, gradients: PyTree, counts: jax.Array) -> PyTree:
    return jax.tree.map(lambda a, g: a + _if(counts, g), total, gradients)


# Values that stages assign are stored per microbatch until its loss. `values` are [R, S, P, ...],
# as in the model; `kept` are [S, M, R, P, ...].


def room_for_values(values: Values, num_microbatches: int) -> Values:
    """Returns zeros for the values of all microbatches, [S, M, R, P, ...]."""
    return {
        path: jnp.zeros((a.shape[1], num_microbatches, a.shape[0], *a.shape[2:]), a.dtype)
        for path, a in values.items()
    }


def with_stage_values(
    kept: Values, new: Values, microbatch: jax.Array, repeat: jax.Array, is_valid: jax.Array
) -> Values:
    """Updates a stage's stored values [M, R, P, ...] with those of its tick, [P, ...], if valid."""
    return {
        path: a.at[microbatch, repeat].set(jnp.where(is_valid, new[path], a[microbatch, repeat]))
        for path, a in kept.items()
    }


def values_of_microbatch(kept: Values, microbatch: jax.Array) -> Values:
    """Returns the values of one microbatch."""
    return {path: jnp.moveaxis(a[:, microbatch], 0, 1) for path, a in kept.items()}


def with_values_of_microbatch(
    kept: Values, values: Values, microbatch: jax.Array, is_valid: jax.Array
) -> Values:
    """Updates the stored values of one microbatch, if valid."""
    return {
        path: a.at[:, microbatch].set(
            jnp.where(is_valid, jnp.moveaxis(values[path], 1, 0), a[:, microbatch])
        )
        for path, a in kept.items()
    }
