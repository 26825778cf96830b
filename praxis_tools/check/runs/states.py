"""Creates and converts the train states of a check."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.core.partitioner.train_state import TrainState
from praxis_tools.check.runs.float64 import wide_dtype
from praxis_tools.check.runs.on_mesh import Leaves, TaskRunner, leaves_of, names_of

# Relative perturbation of weights that simulates rounding errors: four times float64's epsilon.
NUDGE = 2.0**-50


def first_state(initial: TrainState, runner: TaskRunner) -> TrainState:
    """Returns the float64 state to train from, in which no weight is zero everywhere.

    All-zero weights are replaced by random values, because they would hide the gradients of other
    weights.

    Args:
      initial: Initial state, as unpadded NumPy arrays.
      runner: Runner on one device.
    """
    rng = np.random.default_rng(3)

    def replace_zeros(x: np.ndarray) -> np.ndarray:
        if not jnp.issubdtype(x.dtype, jnp.floating) or np.any(x):
            return x
        return rng.normal(scale=0.1, size=x.shape).astype(x.dtype)

    mdl_vars = dict(initial.mdl_vars)
    mdl_vars["params"] = jax.tree.map(replace_zeros, mdl_vars["params"])
    return _with_fresh_slots(initial, mdl_vars, runner)


def _with_fresh_slots(
    initial: TrainState, mdl_vars: dict[str, Any], runner: TaskRunner
) -> TrainState:
    """Returns a float64 state with newly initialized optimizer states for `mdl_vars`."""
    bound_learner, layout = runner.partitioner.bound_learner, runner.layout
    params = jax.tree.map(
        lambda x, shape: np.asarray(x, shape.dtype),
        mdl_vars["params"],
        layout.shapes.mdl_vars["params"],
    )
    # Set the mesh as in a train step, because optimizers may use shard_map.
    with jax.sharding.use_abstract_mesh(runner.mesh.abstract_mesh):
        opt_states = jax.device_get(jax.jit(bound_learner.init)(params))
    return jax.tree.map(_to_float64, TrainState(initial.step, mdl_vars, opt_states))


def nudge_state(state: TrainState, nudge: float = NUDGE, pattern: int = 5) -> TrainState:
    """Returns a state whose weights are perturbed by about one rounding error.

    Args:
      state: NumPy state in float64.
      nudge: Relative size of the perturbation.
      pattern: Seed that determines which elements are increased and which are decreased.
    """
    rng = np.random.default_rng(pattern)

    def perturb(x: Any) -> Any:
        if not np.issubdtype(x.dtype, np.floating):
            return x
        return x * (1.0 + nudge * rng.choice([-1.0, 1.0], x.shape))

    mdl_vars = dict(state.mdl_vars)
    mdl_vars["params"] = jax.tree.map(perturb, mdl_vars["params"])
    return dataclasses.replace(state, mdl_vars=mdl_vars)


def restack(state: TrainState, runner: TaskRunner) -> TrainState | None:
    """Converts a state between stacked weights (scanned layers) and separate weights per layer.

    Args:
      state: The state to convert.
      runner: Runner for the task whose weight names the converted state uses.

    Returns:
      The converted state, or None if the task's weights differ in other ways.
    """
    layout, params = runner.layout, state.mdl_vars["params"]
    shapes = layout.shapes.mdl_vars["params"]
    treedef, names = jax.tree.structure(shapes), names_of(shapes)
    if _has_same_structure(params, shapes):
        return state
    non_trainable = state.mdl_vars["non_trainable"]
    converted = restack_like(dict.fromkeys(names), leaves_of(params))
    has_same_variables = _has_same_structure(non_trainable, layout.shapes.mdl_vars["non_trainable"])
    if len(converted) < len(names) or not has_same_variables:
        return None
    params = jax.tree.unflatten(treedef, [converted[name] for name in names])
    return _with_fresh_slots(state, {**state.mdl_vars, "params": params}, runner)


def _has_same_structure(a: Any, b: Any) -> bool:
    # The stubs of PyTreeDef lack __eq__.
    structures = jax.tree.structure(a), jax.tree.structure(b)
    return bool(structures[0] == structures[1])  # type: ignore[operator]


def restack_like(names: Mapping[str, Any], leaves: Leaves) -> Leaves:
    """Stacks or unstacks leaves so that they have the given names.

    "blocks/3/w" is layer 3 of the stack "blocks/w" [layers, ...]. Names without a matching leaf are
    omitted.

    Args:
      names: Mapping whose keys are the names of the resulting leaves.
      leaves: The leaves to convert.
    """
    unstacked: dict[str, dict[int, np.ndarray]] = {}
    for name, x in leaves.items():
        stack, layer = _stack_and_layer(name)
        if layer is not None:
            unstacked.setdefault(stack, {})[layer] = x
    converted = {}
    for name in names:
        stack, layer = _stack_and_layer(name)
        if name in leaves:
            converted[name] = leaves[name]
        elif name in unstacked:
            layers = unstacked[name]
            converted[name] = np.stack([layers[i] for i in sorted(layers)])
        elif layer is not None and stack in leaves:
            converted[name] = leaves[stack][layer]
    return converted


def _stack_and_layer(name: str) -> tuple[str, int | None]:
    """Splits "blocks/3/w" into ("blocks/w", 3). The layer is None for other names."""
    parts = name.split("/")
    for index in range(1, len(parts)):
        if parts[index].isdecimal() and parts[index - 1] == "blocks":
            return "/".join(parts[:index] + parts[index + 1 :]), int(parts[index])
    return name, None


def _to_float64(x: Any) -> Any:
    if not hasattr(x, "dtype") or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return np.asarray(x, wide_dtype(x.dtype))
