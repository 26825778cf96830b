"""The update by hand: plain optax on each layer, limits and averages written out."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util

from praxis_lite.core.learner.learner import Learner
from praxis_lite.core.learner.whole_trees import updates_of
from praxis_lite.tools.testing import tolerances
from praxis_lite.tools.testing.certificate import Comparison
from praxis_lite.tools.testing.check import Check
from praxis_lite.tools.testing.runs.float64 import in_float64
from praxis_lite.tools.testing.runs.on_mesh import Leaves, OnMesh
from praxis_lite.tools.testing.runs.wide_types import wide_dtype

Flat = dict[str, Any]


def update_by_hand(check: Check, _: OnMesh) -> Iterator[list[Comparison]]:
    """Weights and averages after the steps of a single device, made anew from its gradients."""
    learner, groups = check.job.task.learner, check.plain_one.partitioner.learner.groups
    skips = learner.limits.skip_step_gradient_norm_value
    if skips or learner.apply_separate_scaling or learner.loss_scale is not None:
        check.remark("The update by hand: not made, for steps are skipped or scaled apart.")
        return
    units, shapes = _units(groups), check.plain_one.layout.shapes.mdl_vars["params"]
    reports, state = check.trained_on_one(check.plain_one, check.num_steps)
    if any(report["learner/num_skipped_steps"] for report in reports):
        check.remark("The update by hand: not made, for a step was skipped.")
        return
    params = _flat(check.state.mdl_vars["params"])
    trained = {name for unit in units for name in unit[1]}
    average = {name: x for name, x in params.items() if name in trained}
    # An optimizer may run a shard_map of its own: the mesh is set as in a step.
    in_context = jax.sharding.use_abstract_mesh(check.plain_one.mesh.abstract_mesh)
    with in_context, jax.enable_x64(True):
        step = _step(learner, units, _flat(shapes))
        slots = None
        for number, report in enumerate(reports):
            grads = {name: report[f"gradients/{name}"] for name in average}
            loss = report["metrics/loss/value"]
            params, slots, average = step(params, slots, average, grads, np.int32(number), loss)
        params, average = jax.device_get((params, average))
    actual = {f"mdl_vars/params/{name}": x for name, x in params.items()}
    if learner.ema_decay:
        actual |= {f"opt_states/ema/{name}": x for name, x in average.items()}
    _, moved = check.trained_on_one(check.plain_one, check.num_steps, nudged=True)
    expected, moved = ({name: x[name] for name in actual} for x in (state, moved))
    yield tolerances.in_float64(
        "one device", "update by hand", expected, actual, moved, check.num_steps - 1
    )


def _units(groups: Any) -> list[tuple[Any, list[str], tuple[int, ...] | None]]:
    """Returns (optimizer, paths of weights, layer) of joint updates; None: no stack."""
    units = []
    for group in groups.by_name.values():
        paths = ["/".join(path) for path in group.paths]
        layers = np.ndindex(*group.stack_shape) if group.stack_shape else [None]
        units += [(group.optimizer, paths, layer) for layer in layers]
    return units


def _step(learner: Learner, units: list, shapes: Mapping[str, Any]) -> Any:
    """Returns a compiled (params, slots, average, grads, number) -> (params, slots, average)."""
    limits = learner.limits

    def of(unit: tuple, tree: Flat) -> Flat:
        _, paths, layer = unit
        return {path: tree[path] if layer is None else tree[path][layer] for path in paths}

    def clipped(grads: Flat, norm: jax.Array) -> Flat:
        if most := limits.clip_gradient_norm_to_value:
            return {k: g * jnp.minimum(1.0, most / norm) for k, g in grads.items()}
        if most := limits.clip_gradient_single_norm_to_value:
            return {
                k: g * jnp.minimum(1.0, most / jnp.sqrt(jnp.sum(g * g))) for k, g in grads.items()
            }
        if most := limits.clip_gradient_to_value:
            return {k: jnp.clip(g, -most, most) for k, g in grads.items()}
        return grads

    def init(params: Flat) -> list[Any]:
        return [unit[0].init(_nested(of(unit, params))) for unit in units]

    def update(
        params: Flat, slots: Any, average: Flat, grads: Flat, number: jax.Array, loss: jax.Array
    ) -> tuple:
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads.values()))
        new, new_slots = dict(params), []
        for unit, slot in zip(units, slots, strict=True):
            weights = of(unit, params)
            local = _nested(clipped(of(unit, grads), norm))
            updates, slot = updates_of(unit[0], local, slot, _nested(weights), loss)
            new_slots.append(slot)
            for path, x in optax.apply_updates(weights, _flat(updates)).items():
                new[path] = x if unit[2] is None else new[path].at[unit[2]].set(x)
        decay = jnp.minimum(learner.ema_decay, (1.0 + number) / (10.0 + number))
        average = {k: decay * x + (1.0 - decay) * params[k] for k, x in average.items()}
        return new, new_slots, average

    params = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in shapes.items()}
    paths = {path for unit in units for path in unit[1]}
    average = {k: x for k, x in params.items() if k in paths}
    grads = {k: jax.ShapeDtypeStruct(x.shape, jnp.float32) for k, x in average.items()}
    slots = jax.eval_shape(init, params)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    first = jax.jit(in_float64(init, params))
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    later = jax.jit(in_float64(update, params, slots, average, grads, number, loss))

    def step(params: Flat, slots: Any, *others: Any) -> tuple:
        params = {k: np.asarray(x, wide_dtype(x.dtype)) for k, x in params.items()}
        return later(params, first(params) if slots is None else slots, *others)

    return step


def _flat(tree: Any) -> Leaves:
    return traverse_util.flatten_dict(tree, sep="/")


def _nested(leaves: Flat) -> dict[str, Any]:
    return traverse_util.unflatten_dict(leaves, sep="/")
