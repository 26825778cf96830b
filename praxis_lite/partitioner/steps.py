"""Pure train, eval and decode steps, as if there were one device."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.learner.optimizer_groups import merged
from praxis_lite.learner.slots import split_as_slots
from praxis_lite.partitioner import accumulation
from praxis_lite.partitioner.train_state import TrainState
from praxis_lite.task import Task, WeightedScalars

Batch = Mapping[str, jax.Array]


# As `value_and_grad` below.
ValueAndGrad = Callable[..., tuple[WeightedScalars, Any, Any]]


def init_state(task: Task, key: jax.Array, weight_specs: Any = None) -> TrainState:
    """Returns a fresh state: variables drawn at their true shapes, empty slots, step 0.

    Args:
      key: of the draws.
      weight_specs: of the "params", their splits decided; None: as the model declares them.
    """
    mdl_vars = task.model.init(key)
    weight_specs = weight_specs or task.model.weight_specs()["params"]
    opt_states = task.learner.init(mdl_vars["params"], weight_specs)
    return TrainState(jnp.zeros((), jnp.int32), mdl_vars, opt_states)


def value_and_grad(
    loss_fn: Callable[..., Any], fixed: Any, trainable: Any, non_trainable: Any, inputs: Batch,
    key: jax.Array, **settings: Any,
) -> tuple[WeightedScalars, Any, Any]:
    """Returns what `accumulation.value_and_grad` does: the compiler sums over devices.

    Args:
      loss_fn: of what follows, in this order.
      fixed: what a gradient is not taken of: `{"frozen": weights, "loss_scale": scalar}`.
    """
    return accumulation.value_and_grad(
        functools.partial(loss_fn, fixed), trainable, non_trainable, inputs, key, **settings
    )


def train_step(
    task: Task,
    state: TrainState,
    inputs: Batch,
    key: jax.Array,
    *,
    weight_specs: Any = None,
    value_and_grad: ValueAndGrad = value_and_grad,
) -> tuple[TrainState, dict[str, Any]]:
    """Returns the state after one update, and metrics.

    Args:
      key: of the whole run; the step is folded into it.
      weight_specs: of the "params", their splits decided; None: as the model declares them.
      value_and_grad: how gradients are made and summed.

    Returns:
      The state, and `{"metrics": name -> (value, weight), "learner": name -> scalar}`.
    """
    key = jax.random.fold_in(key, state.step)
    learner = task.learner
    weight_specs = weight_specs or task.model.weight_specs()["params"]
    params, non_trainable = state.mdl_vars["params"], state.mdl_vars["non_trainable"]
    trainable, frozen = learner.split_trainable(params, weight_specs)
    if learner.variational_noise is not None:  # Of the weights that are differentiated only.
        trainable = learner.variational_noise.apply(trainable, key, state.step)
    is_scaled = learner.loss_scale is not None
    scale = state.opt_states["loss_scale"]["scale"] if is_scaled else jnp.ones(())

    def loss_fn(
        fixed: dict[str, Any], trainable: Any, non_trainable: Any, inputs: Batch, key: jax.Array
    ) -> tuple[jax.Array, tuple[dict, Any]]:
        params = merged(trainable, fixed["frozen"])
        module = task.module({"params": params, "non_trainable": non_trainable}, key)
        metrics, _ = task.loss_outputs(module, task.cast_inputs(inputs), key)
        loss = metrics["loss"][0]
        scaled_loss = loss.astype(jnp.float32) * fixed["loss_scale"] if is_scaled else loss
        return scaled_loss, (metrics, task.model.non_trainable(module))

    metrics, new_non_trainable, grads = value_and_grad(
        loss_fn, {"frozen": frozen, "loss_scale": scale}, trainable, non_trainable, inputs, key,
        num_micro_batches=learner.gradient_accumulation_steps,
        inputs_split_mapping=task.inputs_split_mapping,
        lay_out=lambda grads: split_as_slots(grads, weight_specs, learner.slot_mesh_axes),
    )
    if is_scaled:
        grads = jax.tree.map(lambda g: g / scale, grads)
    new_params, opt_states, learner_scalars = learner.update(
        grads, state.opt_states, params, weight_specs, metrics["loss"][0]
    )
    # A step that is skipped leaves no trace: NaN in a running mean would stay for ever.
    is_skipped = opt_states["num_skipped_steps"] != state.opt_states["num_skipped_steps"]
    new_non_trainable = jax.tree.map(
        lambda new, old: jnp.where(is_skipped, old, new), new_non_trainable, non_trainable
    )
    new_state = TrainState(
        step=state.step + 1,
        mdl_vars={"params": new_params, "non_trainable": new_non_trainable},
        opt_states=opt_states,
    )
    return new_state, {"metrics": metrics, "learner": learner_scalars}


def eval_step(
    task: Task, mdl_vars: Any, inputs: Batch, key: jax.Array | None = None
) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """Returns metrics, name -> (value, weight), without dropout; and the per-example outputs.

    Args:
      key: of the batch and the step of the weights; None: one that is always the same.
    """
    key = jax.random.key(0) if key is None else key
    module = task.module(mdl_vars, eval_key=key)
    return task.eval_outputs(module, task.cast_inputs(inputs), key)


def decode_step(task: Task, mdl_vars: Any, inputs: Batch, key: jax.Array) -> dict[str, jax.Array]:
    """Returns what the task decodes, a row per example; `key` as in `eval_step`."""
    return task.decode(task.module(mdl_vars, eval_key=key), task.cast_inputs(inputs), key)
