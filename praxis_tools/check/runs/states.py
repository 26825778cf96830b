"""The states that a check trains from: without zero weights, moved by rounding, restacked."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.core.partitioner.train_state import TrainState
from praxis_tools.check.runs.float64 import wide_dtype
from praxis_tools.check.runs.on_mesh import Leaves, TaskRunner, leaves_of, names_of

# Weights are moved by this, relatively, to see what rounding does: four units of float64.
NUDGE = 2.0**-50


def first_state(initial: TrainState, runner: TaskRunner) -> TrainState:
    """Returns the state to train from, in float64; no weight of it is all zeros.

    A weight of zeros would hide the gradients of other weights.

    Args:
      initial: NumPy arrays of true shapes.
      runner: the task on one device.
    """
    rng = np.random.default_rng(3)

    def drawn(x: np.ndarray) -> np.ndarray:
        if not jnp.issubdtype(x.dtype, jnp.floating) or np.any(x):
            return x
        return rng.normal(scale=0.1, size=x.shape).astype(x.dtype)

    mdl_vars = dict(initial.mdl_vars)
    mdl_vars["params"] = jax.tree.map(drawn, mdl_vars["params"])
    return _with_fresh_slots(initial, mdl_vars, runner)


def _with_fresh_slots(
    initial: TrainState, mdl_vars: dict[str, Any], runner: TaskRunner
) -> TrainState:
    learner, layout = runner.partitioner.learner, runner.layout
    narrow = jax.tree.map(
        lambda x, like: np.asarray(x, like.dtype), mdl_vars["params"],
        layout.shapes.mdl_vars["params"],
    )
    # The mesh is set as in a step: an optimizer may run a shard_map of its own.
    with jax.sharding.use_abstract_mesh(runner.mesh.abstract_mesh):
        opt_states = jax.device_get(jax.jit(learner.init)(narrow))
    return jax.tree.map(_wide, TrainState(initial.step, mdl_vars, opt_states))


def nudged(state: TrainState, nudge: float = NUDGE, pattern: int = 5) -> TrainState:
    """Returns a state with each weight moved by what rounding could move it.

    Args:
      nudge: by how much, relatively.
      pattern: which weights are moved up, and which down.
    """
    rng = np.random.default_rng(pattern)

    def moved(x: Any) -> Any:
        if not np.issubdtype(x.dtype, np.floating):
            return x
        return x * (1.0 + nudge * rng.choice([-1.0, 1.0], x.shape))

    mdl_vars = dict(state.mdl_vars)
    mdl_vars["params"] = jax.tree.map(moved, mdl_vars["params"])
    return dataclasses.replace(state, mdl_vars=mdl_vars)


def restacked(state: TrainState, runner: TaskRunner) -> TrainState | None:
    """Returns a state for a task with the other form of stacks: scanned, or a layer each.

    Returns None if its weights have other names besides.
    """
    layout, params = runner.layout, state.mdl_vars["params"]
    shapes = layout.shapes.mdl_vars["params"]
    if jax.tree.structure(params) == jax.tree.structure(shapes):
        return state
    names, treedef = names_of(shapes), jax.tree.structure(shapes)
    ours, non_trainable = leaves_of(params), state.mdl_vars["non_trainable"]
    converted = stacked_like(dict.fromkeys(names), ours)
    same_variables = jax.tree.structure(non_trainable) == jax.tree.structure(
        layout.shapes.mdl_vars["non_trainable"]
    )
    if len(converted) < len(names) or not same_variables:
        return None
    params = jax.tree.unflatten(treedef, [converted[name] for name in names])
    return _with_fresh_slots(state, {**state.mdl_vars, "params": params}, runner)


def stacked_like(wanted: Mapping[str, Any], found: Leaves) -> Leaves:
    """Returns leaves under the names of `wanted`: of a stack as an array, or a layer each.

    Layer 3 of "blocks/w" [layers, ...] is "blocks/3/w". Leaves that have no such form are left out.
    """
    numbered: dict[str, dict[int, np.ndarray]] = {}
    for name, x in found.items():
        stack, layer = _stack_and_layer(name)
        if layer is not None:
            numbered.setdefault(stack, {})[layer] = x
    converted = {}
    for name in wanted:
        stack, layer = _stack_and_layer(name)
        if name in found:
            converted[name] = found[name]
        elif name in numbered:
            layers = numbered[name]
            converted[name] = np.stack([layers[i] for i in sorted(layers)])
        elif layer is not None and stack in found:
            converted[name] = found[stack][layer]
    return converted


def _stack_and_layer(name: str) -> tuple[str, int | None]:
    parts = name.split("/")
    for place in range(1, len(parts)):
        if parts[place].isdecimal() and parts[place - 1] == "blocks":
            return "/".join(parts[:place] + parts[place + 1 :]), int(parts[place])
    return name, None


def _wide(x: Any) -> Any:
    if not hasattr(x, "dtype") or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return np.asarray(x, wide_dtype(x.dtype))
