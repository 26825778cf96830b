"""Pure train, eval and decode steps, written as if for a single device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.learner.update import BoundLearner
from praxis_lite.core.learner.weight_groups import merged
from praxis_lite.core.models import tallies
from praxis_lite.core.partitioner import accumulation
from praxis_lite.core.partitioner.accumulation import Batch
from praxis_lite.core.partitioner.histograms import histograms
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.core.sharding.devices.axis_types import typed_as
from praxis_lite.core.sharding.memory_spaces import to_device
from praxis_lite.core.task import Task, WeightedScalars

__all__ = ("eval_step", "train_step")


def init_state(task: Task, key: jax.Array, bound_learner: BoundLearner | None = None) -> TrainState:
    """Returns the state at step 0: initialized variables with logical shapes, and initial slots.

    Args:
      task: The task.
      key: Key for initializing the variables.
      bound_learner: The task's learner, bound to the weights. If None, it is bound without a mesh.
    """
    mdl_vars = task.model.init(key)
    opt_states = (bound_learner or _bind_learner(task)).init(mdl_vars["params"])
    return TrainState(jnp.zeros((), jnp.int32), mdl_vars, opt_states)


def _bind_learner(task: Task) -> BoundLearner:
    return task.learner.bind(task.model.weight_specs()["params"])


def train_step(
    task: Task,
    state: TrainState,
    inputs: Batch,
    key: jax.Array,
    *,
    bound_learner: BoundLearner | None = None,
    value_and_grad: accumulation.ValueAndGrad = accumulation.value_and_grad,
    wrap_host_weights: Callable[[Any], Any] = lambda mdl_vars: mdl_vars,
) -> tuple[TrainState, dict[str, Any]]:
    """Returns the state after an update, and metrics.

    Args:
      task: The task.
      state: The state before the update.
      inputs: Rows of a batch, without padding.
      key: Key of the run, into which the step number is folded.
      bound_learner: See `init_state`.
      value_and_grad: Computes gradients and metrics for a batch.
      wrap_host_weights: Wraps weights in host memory as `HostWeight`s, as the model expects.

    Returns:
      The state, and `{"metrics": name -> (value, weight), "learner": name -> scalar}`.
    """
    bound_learner = bound_learner or _bind_learner(task)
    params, non_trainable = state.mdl_vars["params"], state.mdl_vars["non_trainable"]
    metrics, new_non_trainable, grads = _gradients(
        task, state, inputs, key, bound_learner, value_and_grad, wrap_host_weights
    )
    metrics, sums = tallies.pop_tallies(metrics)
    # The update applies to the weights without noise.
    new_params, opt_states, learner_scalars, is_skipped = bound_learner.update(
        grads, state.opt_states, params, metrics["loss"][0]
    )

    # A skipped step must not change the state: a running mean would never recover from NaN.
    def unless_skipped(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(is_skipped, old, typed_as(new, old))

    # `moved` returns the same array for all weights except those that follow a Tally, such as the
    # biases of experts. Such weights have no gradient, so they take the moved value, not the
    # learner's.
    moved = task.model.moved(params, sums)
    new_params = jax.tree.map(
        lambda new, old, m: new if m is old else unless_skipped(m, old), new_params, params, moved
    )
    new_non_trainable = jax.tree.map(unless_skipped, new_non_trainable, non_trainable)
    new_state = TrainState(
        step=state.step + 1,
        mdl_vars={"params": new_params, "non_trainable": new_non_trainable},
        opt_states=opt_states,
    )
    return new_state, {"metrics": metrics, "learner": learner_scalars}


def histogram_step(
    task: Task, state: TrainState, inputs: Batch, key: jax.Array, **settings: Any
) -> dict[str, dict[str, jax.Array]]:
    """Returns the histograms of the weights, and of their gradients on a batch.

    The arguments are those of `train_step`, all of which are required. Gradients are not clipped.

    Returns:
      The results of `histograms`, by "weights/PATH" and "gradients/PATH".
    """
    _, _, grads = _gradients(task, state, inputs, key, **settings)
    return histograms({"weights": state.mdl_vars["params"], "gradients": grads})


def _gradients(
    task: Task,
    state: TrainState,
    inputs: Batch,
    key: jax.Array,
    bound_learner: BoundLearner,
    value_and_grad: accumulation.ValueAndGrad,
    wrap_host_weights: Callable[[Any], Any],
) -> tuple[WeightedScalars, Any, Any]:
    """Returns (metrics, new non_trainable, unscaled gradients) for `train_step`."""
    key = jax.random.fold_in(key, state.step)
    settings, groups = bound_learner.settings, bound_learner.groups
    params, non_trainable = state.mdl_vars["params"], state.mdl_vars["non_trainable"]
    # Gradients are computed only for the trainable weights.
    trainable, frozen = groups.split(params)
    if settings.variational_noise is not None:  # Add noise only to trainable weights.
        trainable = settings.variational_noise.apply(trainable, key, state.step)
    is_scaled = settings.loss_scale is not None
    scale = state.opt_states["loss_scale"]["scale"] if is_scaled else jnp.ones(())

    def loss_fn(
        fixed: dict[str, Any], trainable: Any, non_trainable: Any, inputs: Batch, key: jax.Array
    ) -> tuple[jax.Array, tuple[dict[str, Any], Any]]:
        params = merged(trainable, fixed["frozen"])
        mdl_vars = wrap_host_weights({"params": params, "non_trainable": non_trainable})
        module = task.module(mdl_vars, key)
        metrics, _ = task.outputs(task.compute_loss, module, task.cast_inputs(inputs), key)
        loss = metrics["loss"][0]
        scaled_loss = loss.astype(jnp.float32) * fixed["loss_scale"] if is_scaled else loss
        metrics = {**metrics, **tallies.as_metrics(task.model.tallies(module))}
        return scaled_loss, (metrics, task.model.non_trainable(module))

    # The strategy may divide the batch into microbatches, or use explicit collectives.
    metrics, new_non_trainable, grads = value_and_grad(
        loss_fn,
        {"frozen": frozen, "loss_scale": scale},
        trainable,
        non_trainable,
        inputs,
        key,
        accumulation_steps=settings.gradient_accumulation_steps,
        inputs_split_mapping=task.inputs_split_mapping,
        lay_out=groups.lay_out,
    )
    if is_scaled:
        grads = jax.tree.map(lambda g: g / scale, to_device(grads))
    return metrics, new_non_trainable, grads


def eval_step(
    task: Task, mdl_vars: Any, inputs: Batch, key: jax.Array | None = None
) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """Returns metrics, name -> (value, weight), and per-example outputs, computed without dropout.

    Args:
      task: The task.
      mdl_vars: Weights to evaluate.
      inputs: Rows of a batch, without padding.
      key: Key derived from the batch index and the step of the weights. If None, a constant key is
        used.
    """
    key = jax.random.key(0) if key is None else key
    module = task.module(mdl_vars, eval_key=key)
    return task.outputs(task.compute_eval_loss, module, task.cast_inputs(inputs), key)


def decode_step(task: Task, mdl_vars: Any, inputs: Batch, key: jax.Array) -> dict[str, jax.Array]:
    """Returns the task's decoded outputs, one row per example; for `key`, see `eval_step`."""
    return task.decode(task.module(mdl_vars, eval_key=key), task.cast_inputs(inputs), key)
