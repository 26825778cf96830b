"""The 1F1B tick loop: each tick runs one microbatch forward and another microbatch backward.

The loss of a microbatch is computed in the tick in which it leaves the last stage, and its backward
pass begins in the same tick. A stage therefore stores the inputs of at most 2 R S - 1 microbatches.

Skip this file on a first read: `ticks.py` contains a simpler loop, which runs only forward passes
and leaves the backward pass to JAX.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.layers.stacking.pipelining.buffers import shift
from praxis_lite.layers.stacking.pipelining.pipeline_schedules import InterleavedSchedule, Place
from praxis_lite.layers.stacking.pipelining.split_model import SplitModel
from praxis_lite.layers.stacking.pipelining.stage_work import StageWork, add_at, floats_of
from praxis_lite.layers.stacking.pipelining.ticks import Values, pick

# R repeats, S stages, P layers per stage and repeat, M microbatches, K saved inputs. Name suffixes
# give the leading dims of arrays.

PyTree = Any


class Carry(NamedTuple):
    """The carry of the scan over ticks."""

    x_S: jax.Array
    grad_x_S: jax.Array
    saved_SK: jax.Array  # Stage inputs whose backward pass has not run yet.
    residuals: list[jax.Array]  # [S, ticks, ...], from the last S ticks or from this tick only.
    grad_floats: list[jax.Array]  # [X, S, ...], float32.
    grad_ends: PyTree
    values: Values  # Assigned by the blocks, [M, R, S, P, ...]; read when the loss is computed.
    grad_values: Values
    reported_M: PyTree
    weight_M: jax.Array


class InterleavedTicks:
    """Runs 1F1B over all microbatches.

    Args:
      schedule: The tick schedule.
      work: The computation of a stage.
      ends: The parts of the model before and after the pipeline.
      arrays: Arrays of `work`, [X, S, ...], where X is R for weights and M for inputs.
      keys_M: One random key per microbatch, or None.

    Attributes:
      floats: Indices of the arrays with gradients: the float arrays of the blocks.
      split: A stage's backward pass, split into input gradients and weight gradients.
    """

    def __init__(
        self,
        schedule: InterleavedSchedule,
        work: StageWork,
        ends: SplitModel,
        arrays: list[jax.Array],
        keys_M: jax.Array | None,
    ):
        self.schedule, self.work, self.ends = schedule, work, ends
        self.arrays, self.keys_M = arrays, keys_M
        self.floats = [i for i in floats_of(arrays) if i < work.num_leaves]
        # Split the backward pass here, outside the loop over ticks, which uses the result.
        x = jax.eval_shape(ends.enter, jnp.array(0))
        x_S = jax.ShapeDtypeStruct((schedule.num_stages, *x.shape), x.dtype)
        key = None if keys_M is None else keys_M[0]
        self.split = work.split(arrays, self.floats, key, x_S, work.assigned(arrays))

    def run(self) -> tuple[list[jax.Array], PyTree, PyTree, jax.Array]:
        """Runs all ticks, and returns the gradients, the metrics and the loss weights.

        Returns:
          (gradients of the arrays at `floats`, gradients of the ends' weights, metrics [M, ...],
          loss weights [M]). The gradients are sums over microbatches, each multiplied by its loss
          weight.
        """
        carry = self.start()
        # One scan per phase: the first ticks have no backward passes, and the last ticks no forward
        # passes.
        for ticks, has_forward, has_input_grads, has_weight_grads in self.schedule.phases:
            carry, _ = jax.lax.scan(
                functools.partial(self.tick, has_forward, has_input_grads, has_weight_grads),
                carry,
                jnp.arange(ticks.start, ticks.stop),
            )
        grad_floats = [
            self.work.stack_layers(i, grad)
            for i, grad in zip(self.floats, carry.grad_floats, strict=True)
        ]
        return grad_floats, carry.grad_ends, carry.reported_M, carry.weight_M

    def start(self) -> Carry:
        """Returns the initial carry."""
        num_stages, num_microbatches = self.schedule.num_stages, self.schedule.num_microbatches
        # Until its first microbatch arrives, a stage processes rows of the batch as dummy inputs.
        x = self.ends.enter(jnp.array(0))
        x_S = self.constrain_activations(jnp.broadcast_to(x, (num_stages, *x.shape)))
        assigned = self.work.assigned(self.arrays)
        reported, _, _, grad_ends, grad_values = jax.eval_shape(
            self.ends.leave, jnp.array(0), x, assigned
        )
        values, grad_values, reported_M = jax.tree.map(
            lambda a: jnp.zeros((num_microbatches, *a.shape), a.dtype),
            (assigned, grad_values, reported),
        )
        stages = self.work.stages
        places = Place(stages, stages, stages)
        _, residuals = jax.eval_shape(self.input_grads, places, x_S, x_S, grad_values)
        saved_SK = jnp.broadcast_to(
            x_S[:, None], (num_stages, self.schedule.num_saved_inputs, *x.shape)
        )
        return Carry(
            x_S,
            jnp.zeros_like(x_S),
            self.work.layout.constrain(saved_SK, row_dim=2),
            [
                jnp.zeros((num_stages, self.schedule.num_residuals, *a.shape[1:]), a.dtype)
                for a in residuals
            ],
            [
                self.work.unstack_layers(i, jnp.zeros(self.arrays[i].shape, jnp.float32), dim=2)
                for i in self.floats
            ],
            jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), grad_ends),
            values,
            grad_values,
            reported_M,
            jnp.zeros(num_microbatches, jnp.float32),
        )

    def tick(
        self,
        has_forward: bool,
        has_input_grads: bool,
        has_weight_grads: bool,
        carry: Carry,
        t: jax.Array,
    ) -> tuple[Carry, None]:
        """Returns the carry after tick t."""
        if has_forward:
            carry, y_S = self.forward(carry, t)
            # The loss comes first, so that the backward pass of a microbatch starts in the same
            # tick.
            if has_input_grads:
                carry = self.leave(carry, y_S, t)
            carry = carry._replace(x_S=self.constrain_activations(shift(y_S, 1)))
        if has_input_grads:
            carry = self.backward(carry, t)
        if has_weight_grads:
            carry = self.weights(carry, t)
        return carry, None

    def forward(self, carry: Carry, t: jax.Array) -> tuple[Carry, jax.Array]:
        """Runs the stages' forward passes; returns the carry and their outputs [S, rows, ...]."""
        microbatch, repeat, is_valid = self.schedule.forward(t, self.work.stages)
        # In a microbatch's first repeat, stage 0 reads it from the batch instead of from the last
        # stage.
        is_entering = is_valid[0] & (repeat[0] == 0)
        x = self.if_any(is_entering, self.ends.enter, microbatch[0])
        x_S = jnp.where(self.at_stage(0, is_entering, carry.x_S), x, carry.x_S)
        x_S = self.constrain_activations(x_S)
        # Slot t % K stores the inputs of tick t until their backward pass.
        saved_SK = jax.lax.dynamic_update_index_in_dim(
            carry.saved_SK, x_S, t % self.schedule.num_saved_inputs, axis=1
        )
        saved_SK = self.work.layout.constrain(saved_SK, row_dim=2)

        def work(
            arrays: list, values: Values, place: Place, is_valid: Any, x: Any
        ) -> tuple[jax.Array, Values]:
            y, new = self.work.work(*self.picked(arrays, place), x)
            at = place.microbatch, place.repeat
            values = {
                path: a.at[at].set(jnp.where(is_valid, new[path], a[at]))
                for path, a in values.items()
            }
            return y, values

        place = Place(self.work.stages, microbatch, repeat)
        y_S, values = self.work.vmap(work, in_axes=(1, 2, 0, 0, 0), out_axes=(0, 2))(
            self.arrays, carry.values, place, is_valid, x_S
        )
        return carry._replace(saved_SK=saved_SK, values=values), self.constrain_activations(y_S)

    def leave(self, carry: Carry, y_S: jax.Array, t: jax.Array) -> Carry:
        """Computes the loss and its gradient if a microbatch leaves the last stage."""
        last = self.schedule.num_stages - 1
        microbatch, repeat, is_valid = self.schedule.forward(t, last)
        is_leaving = is_valid & (repeat == self.schedule.circular_repeat - 1)
        values = jax.tree.map(lambda a: a[microbatch], carry.values)
        # Only a microbatch that leaves the last stage has a loss. Its gradient enters the backward
        # pass in the same tick.
        reported, weight, grad_y, grad_ends, grad_values = self.if_any(
            is_leaving, self.ends.leave, microbatch, _at(y_S, last), values
        )
        weight = jnp.where(is_leaving, weight, 0.0)

        def record(all_M: jax.Array, new: jax.Array) -> jax.Array:
            new = jnp.where(is_leaving, new, all_M[microbatch])
            return jax.lax.dynamic_update_index_in_dim(all_M, new, microbatch, axis=0)

        return carry._replace(
            grad_x_S=jnp.where(self.at_stage(last, is_leaving, y_S), grad_y, carry.grad_x_S),
            grad_ends=_add_if(carry.grad_ends, grad_ends, weight != 0),
            grad_values=jax.tree.map(record, carry.grad_values, grad_values),
            reported_M=jax.tree.map(record, carry.reported_M, reported),
            weight_M=record(carry.weight_M, weight),
        )

    def backward(self, carry: Carry, t: jax.Array) -> Carry:
        """Computes the gradients with respect to the stages' inputs."""
        stages, layout = self.work.stages, self.work.layout
        microbatch, repeat, is_valid = self.schedule.backward(t, stages)
        has_weight = is_valid & (carry.weight_M[microbatch] != 0)
        # The input that each stage saved in its forward tick, from which the stage is recomputed.
        index = self.schedule.tick_forward(t, stages) % self.schedule.num_saved_inputs
        x_S = self.constrain_activations(self.work.vmap(pick)(carry.saved_SK, index))
        grad_y_S = self.constrain_activations(carry.grad_x_S)
        grad_x_S, residuals = self.input_grads(
            Place(stages, microbatch, repeat), x_S, grad_y_S, carry.grad_values
        )
        # Idle stages and microbatches with weight 0 may produce NaN.
        has_weight = has_weight.reshape(-1, *[1] * (x_S.ndim - 1))
        grad_x_S = self.constrain_activations(jnp.where(has_weight, grad_x_S, 0))
        # At stage 0 in the first repeat, the gradient leaves the pipeline, and is backpropagated to
        # the weights before the pipeline.
        microbatch, repeat, is_valid = self.schedule.backward(t, 0)
        is_first = is_valid & (repeat == 0)
        grad_ends = self.if_any(is_first, self.ends.enter_gradient, microbatch, _at(grad_x_S, 0))
        grad_ends = _add_if(
            carry.grad_ends, grad_ends, is_first & (carry.weight_M[microbatch] != 0)
        )
        residuals = [
            layout.constrain(
                jax.lax.dynamic_update_index_in_dim(old, new, t % self.schedule.num_residuals, 1)
            )
            for old, new in zip(carry.residuals, residuals, strict=True)
        ]
        return carry._replace(
            grad_x_S=self.constrain_activations(shift(grad_x_S, -1)),
            residuals=residuals,
            grad_ends=grad_ends,
        )

    def input_grads(
        self, place: Place, x_S: jax.Array, grad_y_S: jax.Array, grad_values: Values
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Returns the gradients of the stages' inputs, and residuals for the weight gradients."""

        def stage_input_grads(
            arrays: list, place: Place, x: Any, grad_y: Any, grad_values: Values
        ) -> tuple:
            at = place.microbatch, place.repeat
            grad_values = {path: a[at] for path, a in grad_values.items()}
            return self.split.first(*self.picked(arrays, place), x, grad_y, grad_values)

        return self.work.vmap(stage_input_grads, self.split, in_axes=(1, 0, 0, 0, 2))(
            self.arrays, place, x_S, grad_y_S, grad_values
        )

    def weights(self, carry: Carry, t: jax.Array) -> Carry:
        """Adds this tick's weight gradients to the carry."""
        stages = self.work.stages
        # Number of ticks since the stage computed these residuals, together with the input
        # gradients.
        delay = stages if self.schedule.split_backward else 0 * stages
        microbatch, repeat, is_valid = self.schedule.weights(t, stages)
        has_weight = is_valid & (carry.weight_M[microbatch] != 0)

        def stage_weight_grads(
            arrays: list,
            totals: list,
            residuals: list,
            place: Place,
            delay: Any,
            has_weight: Any,
        ) -> list:
            index = (t - delay) % self.schedule.num_residuals
            residuals = [pick(residual, index) for residual in residuals]
            parts = self.split.second(residuals, *self.picked(arrays, place))
            return jax.tree.map(
                lambda total, part: add_at(total, _zero_unless(has_weight, part), place.repeat),
                totals,
                parts,
            )

        slot_axis = 0 if microbatch.ndim else None  # None if all stages share one microbatch.
        grad_floats = self.work.vmap(
            stage_weight_grads,
            self.split,
            in_axes=(1, 1, 0, Place(0, slot_axis, slot_axis), 0, slot_axis),
            out_axes=1,
        )(
            self.arrays,
            carry.grad_floats,
            carry.residuals,
            Place(stages, microbatch, repeat),
            delay,
            has_weight,
        )
        return carry._replace(
            grad_floats=jax.tree.map(
                lambda total: self.work.layout.constrain(total, dim=1), grad_floats
            )
        )

    def picked(self, arrays: list, place: Place) -> tuple[list[jax.Array], Any, Place]:
        """Returns the arguments of `StageWork.work` except x."""
        key = None if self.keys_M is None else pick(self.keys_M, place.microbatch)
        # The key is already specific to the microbatch, so `work` folds in index 0.
        return self.work.picked(arrays, place), key, place._replace(microbatch=0 * place.microbatch)

    def if_any(self, is_any: jax.Array, function: Any, *args: Any) -> Any:
        """Returns `function(*args)`, or zeros if the condition is False."""
        if self.schedule.circular_repeat == 1:  # The condition is True in nearly all ticks.
            return function(*args)
        zeros = lambda *args: jax.tree.map(  # noqa: E731
            lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(function, *args)
        )
        return jax.lax.cond(is_any, function, zeros, *args)

    def at_stage(self, number: int, condition: jax.Array, x_S: jax.Array) -> jax.Array:
        """Returns a mask [S, 1, ...]: the condition at one stage, False at all other stages."""
        is_at_stage = (self.work.stages == number) & condition
        return is_at_stage.reshape(-1, *[1] * (x_S.ndim - 1))

    def constrain_activations(self, x_S: jax.Array) -> jax.Array:
        """Constrains the sharding of activations."""
        return self.work.layout.constrain(x_S, row_dim=1)


def _at(x_S: jax.Array, stage: int) -> jax.Array:
    """Returns `x_S[stage]`. Without the barrier, XLA would first reshard x_S like the ends."""
    return jax.lax.optimization_barrier(x_S)[stage]


# On TPU, XLA moves the cross-device reduction of gradients out of the tick loop only if at most a
# select separates it from the sum over ticks. A multiplication by a weight would prevent this.


def _zero_unless(has_weight: jax.Array, gradient: jax.Array) -> jax.Array:
    return jnp.where(has_weight, gradient.astype(jnp.float32), 0.0)


def _add_if(total: PyTree, gradients: PyTree, has_weight: jax.Array) -> PyTree:
    return jax.tree.map(lambda a, g: a + _zero_unless(has_weight, g), total, gradients)
