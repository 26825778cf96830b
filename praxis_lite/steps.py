"""Pure train, eval and decode steps, as if there were one device."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.models.nnx_model import mdl_vars_of
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
    non_trainable = state.mdl_vars["non_trainable"]

    def loss_fn(params: Any) -> tuple[jax.Array, tuple[dict, Any]]:
        module = task.model.module({"params": params, "non_trainable": non_trainable})
        metrics = dict(task.compute_loss(module, inputs, key))
        return metrics["loss"][0], (metrics, mdl_vars_of(module)["non_trainable"])

    params = state.mdl_vars["params"]
    (loss, (metrics, new_non_trainable)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    new_params, opt_states, learner_scalars = task.learner.update(
        grads, state.opt_states, params, task.model.weight_specs()["params"], loss, state.step
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
