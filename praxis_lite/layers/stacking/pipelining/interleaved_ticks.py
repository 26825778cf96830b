"""The ticks of 1F1B: each takes a microbatch forward, and another backward.

The loss of a microbatch is computed in the tick in which it leaves the last stage, and its backward
pass begins in the same tick. So a stage stores the inputs of at most 2 R S - 1 microbatches.
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

# R repeats, S stages, P places of layers of one stage in one repeat, M microbatches, K inputs kept.
# Names end with the leading dims of their arrays.

PyTree = Any


class Carry(NamedTuple):
    """The carry of the scan over ticks; `of_x` is the gradient of `x`."""

    x_S: jax.Array
    of_x_S: jax.Array
    kept_SK: jax.Array  # Inputs of the stages that are still to go backward.
    residuals: list[jax.Array]  # [S, ticks, ...], of the last S ticks, or of this one.
    of_floats: list[jax.Array]  # [X, S, ...], float32.
    of_ends: PyTree
    values: Values  # That the blocks assigned, [S, M, R, P, ...].
    of_values: Values
    reported_M: PyTree
    weight_M: jax.Array


@dataclasses.dataclass(frozen=True)
class InterleavedTicks:
    """1F1B over all microbatches.

    Attributes:
      arrays: of `work`, [X, S, ...].
      keys_M: the microbatches' keys, or None.
    """

    schedule: InterleavedSchedule
    work: StageWork
    ends: SplitModel
    arrays: list[jax.Array]
    keys_M: jax.Array | None

    @property
    def floats(self) -> list[int]:
        """The numbers of the arrays of which gradients are made: the blocks'."""
        return [i for i in floats_of(self.arrays) if i < self.work.num_leaves]

    def run(self) -> tuple[list[jax.Array], PyTree, PyTree, jax.Array]:
        """Returns (gradients by `floats`, those of the ends' weights, reports [M, ...], weights).

        The gradients are sums of each microbatch's, which are times its weight.
        """
        carry = self.start()
        for ticks, *parts in self.schedule.phases:
            carry, _ = jax.lax.scan(
                functools.partial(self.tick, *parts), carry,
                jnp.arange(ticks.start, ticks.stop),
            )
        of_floats = [
            self.work.together(i, of) for i, of in zip(self.floats, carry.of_floats, strict=True)
        ]
        return of_floats, carry.of_ends, carry.reported_M, carry.weight_M

    def start(self) -> Carry:
        """Returns the carry of the first tick."""
        num_stages, num_microbatches = self.schedule.num_stages, self.schedule.num_microbatches
        # Rows of the batch, too, for the stages that wait for their first.
        x = self.ends.enter(jnp.array(0))
        x_S = self.stated(jnp.broadcast_to(x, (num_stages, *x.shape)))
        assigned = self.work.assigned(self.arrays)
        reported, _, _, of_ends, of_values = jax.eval_shape(
            self.ends.leave, jnp.array(0), x, assigned
        )
        values, of_values = (
            room_for_values(a, num_microbatches) for a in (assigned, of_values)
        )
        stages, _ = self.work.stages, self.split  # Traced here, not within a loop.
        _, residuals = jax.eval_shape(self.by_inputs, stages, stages, x_S, x_S, of_values)
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
            jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), of_ends),
            values, of_values,
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
            carry = carry._replace(x_S=self.stated(shift(y_S, 1)))
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
        x_S = self.stated(jnp.where(self.at_stage(0, is_entering, carry.x_S), x, carry.x_S))
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
        return carry._replace(kept_SK=kept_SK, values=values), self.stated(y_S)

    def leave(self, carry: Carry, y_S: jax.Array, t: jax.Array) -> Carry:
        """Returns the carry with a report, and the gradient of what leaves the last stage."""
        last = self.schedule.num_stages - 1
        microbatch, repeat, is_valid = self.schedule.forward(t, last)
        is_leaving = is_valid & (repeat == self.schedule.circular_repeat - 1)
        values = values_of_microbatch(carry.values, microbatch)
        reported, weight, of_y, of_ends, of_values = self.if_any(
            is_leaving, self.ends.leave, microbatch, _at(y_S, last), values
        )
        weight = jnp.where(is_leaving, weight, 0.0)

        def noted(all_M: jax.Array, new: jax.Array) -> jax.Array:
            new = jnp.where(is_leaving, new, all_M[microbatch])
            return jax.lax.dynamic_update_index_in_dim(all_M, new, microbatch, axis=0)

        return carry._replace(
            of_x_S=jnp.where(self.at_stage(last, is_leaving, y_S), of_y, carry.of_x_S),
            of_ends=_sum(carry.of_ends, of_ends, weight != 0),
            of_values=with_values_of_microbatch(
                carry.of_values, of_values, microbatch, is_leaving
            ),
            reported_M=jax.tree.map(noted, carry.reported_M, reported),
            weight_M=noted(carry.weight_M, weight),
        )

    def backward(self, carry: Carry, t: jax.Array) -> Carry:
        """Returns the carry with the gradients of the stages' inputs."""
        stages, layout = self.work.stages, self.work.layout
        microbatch, repeat, is_valid = self.schedule.backward(t, stages)
        counts = is_valid & (carry.weight_M[microbatch] != 0)
        place = self.schedule.tick_forward(t, stages) % self.schedule.num_kept
        x_S = self.stated(self.work.vmap(pick)(carry.kept_SK, place))
        of_x_S, residuals = self.by_inputs(
            microbatch, repeat, x_S, self.stated(carry.of_x_S), carry.of_values
        )
        # What an idle stage computes may be NaN, as what a microbatch of weight 0 does.
        counts = counts.reshape(-1, *[1] * (x_S.ndim - 1))
        of_x_S = self.stated(jnp.where(counts, of_x_S, 0))
        microbatch, repeat, is_valid = self.schedule.backward(t, 0)
        is_first = is_valid & (repeat == 0)
        of_ends = self.if_any(is_first, self.ends.enter_gradient, microbatch, _at(of_x_S, 0))
        of_ends = _sum(carry.of_ends, of_ends, is_first & (carry.weight_M[microbatch] != 0))
        residuals = [
            layout.constrain(
                jax.lax.dynamic_update_index_in_dim(kept, new, t % self.schedule.num_residuals, 1)
            )
            for kept, new in zip(carry.residuals, residuals, strict=True)
        ]
        return carry._replace(
            of_x_S=self.stated(shift(of_x_S, -1)), residuals=residuals, of_ends=of_ends
        )

    def by_inputs(
        self, microbatch: jax.Array, repeat: jax.Array, x_S: jax.Array, of_y_S: jax.Array,
        of_values: Values,
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Returns the gradients of all stages' inputs, and residuals."""

        def first(
            arrays: list, stage: Any, m: Any, r: Any, x: Any, of_y: Any, of_values: Values
        ) -> tuple:
            of_values = {path: a[m, r] for path, a in of_values.items()}
            return self.split.first(*self.picked(arrays, stage, m, r), x, of_y, of_values)

        return self.work.vmap(first, self.split, in_axes=(1, 0, 0, 0, 0, 0, 0))(
            self.arrays, self.work.stages, microbatch, repeat, x_S, of_y_S, of_values
        )

    def weights(self, carry: Carry, t: jax.Array) -> Carry:
        """Returns the carry with gradients of weights."""
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

        of_place = 0 if microbatch.ndim else None  # Of each stage, or the same of all.
        of_floats = self.work.vmap(
            second, self.split, in_axes=(1, 1, 0, 0, 0, *[of_place] * 3), out_axes=1
        )(
            self.arrays, carry.of_floats, carry.residuals, stages, since, microbatch, repeat, counts
        )
        return carry._replace(of_floats=jax.tree.map(
            lambda total: self.work.layout.constrain(total, dim=1), of_floats
        ))

    @functools.cached_property
    def split(self) -> Any:
        """A stage's backward pass, in two parts."""
        x = jax.eval_shape(self.ends.enter, jnp.array(0))
        x_S = jax.ShapeDtypeStruct((self.schedule.num_stages, *x.shape), x.dtype)
        key = None if self.keys_M is None else self.keys_M[0]
        assigned = self.work.assigned(self.arrays)
        return self.work.split(self.arrays, self.floats, key, x_S, assigned)

    def picked(self, arrays: list, stage: Any, microbatch: Any, repeat: Any) -> tuple:
        """Returns the arguments of a stage's work but x."""
        key = None if self.keys_M is None else pick(self.keys_M, microbatch)
        # The key is the microbatch's already.
        return self.work.picked(arrays, microbatch, repeat), key, stage, 0 * microbatch, repeat

    def if_any(self, is_any: jax.Array, function: Any, *args: Any) -> Any:
        """Returns function(*args), or zeros if it is not needed."""
        if self.schedule.circular_repeat == 1:  # It is needed in nearly all ticks.
            return function(*args)
        zeros = lambda *args: jax.tree.map(  # noqa: E731
            lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(function, *args)
        )
        return jax.lax.cond(is_any, function, zeros, *args)

    def at_stage(self, number: int, condition: jax.Array, x_S: jax.Array) -> jax.Array:
        """Returns bools [S, 1, ...]: the condition at one stage, False at the others."""
        is_there = (self.work.stages == number) & condition
        return is_there.reshape(-1, *[1] * (x_S.ndim - 1))

    def stated(self, x_S: jax.Array) -> jax.Array:
        """Constrains the layout of activations."""
        return self.work.layout.constrain(x_S, row_dim=1)


def _at(x_S: jax.Array, stage: int) -> jax.Array:
    """Returns the array of a stage; without the barrier XLA moves it to the ends' layout first."""
    return jax.lax.optimization_barrier(x_S)[stage]


# On TPU XLA moves the sum of gradients over devices out of the loop over ticks if only a select is
# between it and the sum over ticks: no product with a weight.


def _if(counts: jax.Array, gradient: jax.Array) -> jax.Array:
    return jnp.where(counts, gradient.astype(jnp.float32), 0.0)


def _sum(total: PyTree, gradients: PyTree, counts: jax.Array) -> PyTree:
    return jax.tree.map(lambda a, g: a + _if(counts, g), total, gradients)


# Values that stages assign, kept per microbatch until its loss. `values` are [R, S, P, ...], as in
# the model; `kept` are [S, M, R, P, ...].


def room_for_values(values: Values, num_microbatches: int) -> Values:
    """Returns zeros for the values of all microbatches, [S, M, R, P, ...]."""
    return {
        path: jnp.zeros((a.shape[1], num_microbatches, a.shape[0], *a.shape[2:]), a.dtype)
        for path, a in values.items()
    }


def with_stage_values(
    kept: Values, new: Values, microbatch: jax.Array, repeat: jax.Array, is_valid: jax.Array
) -> Values:
    """Returns a stage's kept values [M, R, P, ...] with those of its tick, [P, ...], if valid."""
    return {
        path: a.at[microbatch, repeat].set(jnp.where(is_valid, new[path], a[microbatch, repeat]))
        for path, a in kept.items()
    }


def values_of_microbatch(kept: Values, microbatch: jax.Array) -> Values:
    """Returns the values of a microbatch."""
    return {path: jnp.moveaxis(a[:, microbatch], 0, 1) for path, a in kept.items()}


def with_values_of_microbatch(
    kept: Values, values: Values, microbatch: jax.Array, is_valid: jax.Array
) -> Values:
    """Returns kept values with those of a microbatch, if valid."""
    return {
        path: a.at[:, microbatch].set(
            jnp.where(is_valid, jnp.moveaxis(values[path], 1, 0), a[:, microbatch])
        )
        for path, a in kept.items()
    }
