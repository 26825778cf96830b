"""Pure train, eval and decode steps, as if there were one device."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite import accumulation
from praxis_lite.models.nnx_model import mdl_vars_of
from praxis_lite.optimizer_groups import merged
from praxis_lite.slots import split_as_slots
from praxis_lite.task import Task
from praxis_lite.train_state import TrainState

Batch = Mapping[str, jax.Array]


def init_state(task: Task, key: jax.Array) -> TrainState:
    """Returns a fresh state: variables drawn at their true shapes, empty slots, step 0."""
    mdl_vars = task.model.init(key)
    opt_states = task.learner.init(mdl_vars["params"], task.model.weight_specs()["params"])
    return TrainState(jnp.zeros((), jnp.int32), mdl_vars, opt_states)


def train_step(
    task: Task, state: TrainState, inputs: Batch, key: jax.Array
) -> tuple[TrainState, dict[str, Any]]:
    """Returns the state after one update, and metrics.

    Args:
      key: of the whole run; the step is folded into it.

    Returns:
      The state, and `{"metrics": name -> (value, weight), "learner": name -> scalar}`.
    """
    key = jax.random.fold_in(key, state.step)
    learner, weight_specs = task.learner, task.model.weight_specs()["params"]
    params, non_trainable = state.mdl_vars["params"], state.mdl_vars["non_trainable"]
    trainable, frozen = learner.split_trainable(params, weight_specs)
    if learner.variational_noise is not None:  # Of the weights that are differentiated only.
        trainable = learner.variational_noise.apply(trainable, key, state.step)
    is_scaled = learner.loss_scale is not None
    scale = state.opt_states["loss_scale"]["scale"] if is_scaled else None

    def loss_fn(
        trainable: Any, non_trainable: Any, inputs: Batch, key: jax.Array
    ) -> tuple[jax.Array, tuple[dict, Any]]:
        params = merged(trainable, frozen)
        module = task.model.module({"params": params, "non_trainable": non_trainable})
        metrics = dict(task.compute_loss(module, inputs, key))
        loss = metrics["loss"][0]
        scaled_loss = loss.astype(jnp.float32) * scale if is_scaled else loss
        return scaled_loss, (metrics, mdl_vars_of(module)["non_trainable"])

    metrics, new_non_trainable, grads = accumulation.value_and_grad(
        loss_fn, trainable, non_trainable, inputs, key,
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


def eval_step(task: Task, mdl_vars: Any, inputs: Batch) -> dict[str, Any]:
    """Returns metrics, name -> (value, weight), without dropout."""
    return dict(task.compute_loss(task.model.module(mdl_vars), inputs, None))


def decode_step(task: Task, mdl_vars: Any, inputs: Batch, key: jax.Array) -> dict[str, jax.Array]:
    """Returns what the task decodes, a row per example."""
    return task.decode(task.model.module(mdl_vars), inputs, key)
