"""The state after a step, recomputed by `plain_update`, with a tolerance for each element.

A recomputed gradient is off by rounding, and an optimizer may turn rounding into a full step
(Adam: g / |g|). So the update is computed from the gradients, and from gradients moved by as much
as rounding may move them: the difference is the tolerance.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.learner.update import BoundLearner
from praxis_lite.core.partitioner import steps
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_tools.certificates import element_hash
from praxis_tools.check import plain_update

PyTree = Any
TIMES_ROUNDING = 16.0
# Of the change that an update makes, what an optimizer's own arithmetic may be off by.
_OF_CHANGE, _ULPS, _LEAST_SHARE = 1e-4, 4.0, 1e-6
_PATTERNS = ((0, 0.0), (0, 1.0), (0, -1.0), (1, 1.0), (1, -1.0))  # (half of the elements, sign)


@dataclasses.dataclass(frozen=True)
class Rounding:
    """How far rounding moves gradients: measured on a few rows, and by runs on the whole batch.

    Attributes:
      shares: by path of each trained weight, the share of its gradient that rounding moves.
      num_nudges: number of runs of the whole batch with moved weights; 0: use the shares.
      nudge: the relative amount by which each weight is moved in these.
      salt: uint32, a seed of the signs of what is moved.
    """

    shares: Mapping[str, jax.Array]
    num_nudges: jax.Array
    nudge: jax.Array
    salt: jax.Array


def recomputed(
    partitioner: Partitioner, old: TrainState, inputs: PyTree, key: jax.Array, rounding: Rounding,
    *, actual_num_skipped: jax.Array, chosen: Collection[str],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arrays of the state after a step, and each element's tolerance, by path.

    Args:
      partitioner: of the task on the mesh.
      old: the state before the step, without padding, on the device.
      inputs: the rows of the whole batch.
      key: of the run.
      actual_num_skipped: how many steps were skipped, after the step. It decides where a norm is so
        near to the limit that rounding does.
      chosen: paths of the arrays to return; with a trained weight its slots and average.
    """
    bound, before = partitioner.learner, dict(leaves_with_path(old))
    gradients = functools.partial(_gradients, partitioner, old, inputs, key, chosen)
    first, moved = _moved_by_nudges(gradients, rounding)
    norm, norms = plain_update.grad_norms(bound, first["squares"])
    is_finite = jnp.isfinite(norm) & jnp.isfinite(first["loss"])
    # The gradient of a single weight may be nothing but rounding.
    usual = jnp.median(jnp.stack([*rounding.shares.values(), jnp.float32(_LEAST_SHARE)]))
    is_kept = plain_update.is_step_kept(
        bound, old.opt_states, norms, is_finite, TIMES_ROUNDING * usual + _OF_CHANGE,
        actual_num_skipped == old.opt_states["num_skipped_steps"],
    )

    def delta(path: str, g: jax.Array) -> jax.Array:
        """Returns how far rounding may move each element; zeros that stay are exact."""
        by_nudges, share = moved["grads"][path], jnp.maximum(rounding.shares[path], _LEAST_SHARE)
        by_share = share * (jnp.abs(g) + _rms(g))
        measured = by_nudges + _rms(by_nudges) + _LEAST_SHARE * jnp.abs(g)
        result = TIMES_ROUNDING * jnp.where(rounding.num_nudges > 0, measured, by_share)
        return jnp.where((g == 0) & (by_nudges == 0), 0.0, result)

    def update(grads: dict[str, jax.Array]) -> dict[str, jax.Array]:
        after = plain_update.updated_weights(bound, old, grads, norms, first["loss"])
        return {path: x for path, x in after.items() if path in chosen}

    grads = first["grads"]
    deltas = {path: delta(path, g) for path, g in grads.items()}
    new, tolerances = _with_tolerances(update, grads, deltas, before, rounding.salt)
    new = {path: jnp.where(is_kept, x, before[path]) for path, x in new.items()}
    # What the model itself changes in a step, such as running means.
    for path, x in first["of_model"].items():
        new[path] = x if _is_key(x) else jnp.where(is_kept, x, before[path])
        if jnp.issubdtype(x.dtype, jnp.floating):
            change, by_nudges = jnp.abs(x - before[path]), moved["of_model"][path]
            tolerances[path] = _arithmetic(before[path], x) + TIMES_ROUNDING * jnp.where(
                rounding.num_nudges > 0, by_nudges + _rms(by_nudges),
                usual * (change.astype(jnp.float32) + _rms(change)),
            )
    new |= plain_update.updated_counts(bound, old, is_kept, is_finite)
    # All else stays as it is: frozen weights.
    result = {path: new.get(path, x) for path, x in before.items() if path in chosen}
    return result, {
        path: tolerances.get(path, jnp.zeros(jnp.shape(x), jnp.float32))
        for path, x in result.items()
    }


@dataclasses.dataclass
class _Recording(BoundLearner):
    """A learner that returns the gradients that it is given, and updates nothing."""

    def update(self, grads: PyTree, opt_states: Any, params: PyTree, loss: jax.Array) -> tuple:
        recorded = {"grads": self.groups.lay_out(grads), "loss": jnp.asarray(loss, jnp.float32)}
        return params, opt_states, recorded, jnp.zeros((), bool)


def _gradients(
    partitioner: Partitioner, old: TrainState, inputs: PyTree, key: jax.Array,
    chosen: Collection[str], salt: jax.Array, nudge: jax.Array,
) -> dict[str, Any]:
    """Returns a step's loss, gradients, their sums of squares, and what the model itself changes.

    Args:
      chosen: paths of arrays of the state; of other weights no gradients are returned.
      salt, nudge: as of `nudged`, for the weights that the gradients are taken at.
    """
    bound = partitioner.learner
    params = nudged(old.mdl_vars["params"], nudge, salt)
    new, outputs = steps.train_step(
        partitioner.task, TrainState(old.step, {**old.mdl_vars, "params": params}, old.opt_states),
        inputs, key, learner=_Recording(bound.learner, bound.groups),
        value_and_grad=partitioner.gradients.value_and_grad,
    )
    given = dict(leaves_with_path(params))
    of_model = {
        f"mdl_vars/params/{path}": x for path, x in leaves_with_path(new.mdl_vars["params"])
        if x is not given[path]
    }
    of_model |= {
        f"mdl_vars/non_trainable/{path}": x
        for path, x in leaves_with_path(new.mdl_vars["non_trainable"])
    }
    grads = dict(leaves_with_path(outputs["learner"]["grads"]))
    return {
        "grads": {path: g for path, g in grads.items() if f"mdl_vars/params/{path}" in chosen},
        "squares": {path: jnp.sum(jnp.square(g)) for path, g in grads.items()},
        "loss": outputs["learner"]["loss"], "of_model": of_model,
    }


def _moved_by_nudges(
    gradients: Callable[..., dict[str, Any]], rounding: Rounding
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns `gradients` at the weights, and how far nudges of the weights move each element.

    It is one loop, so that the gradients are compiled once.
    """

    def apart(a: Any, b: Any) -> jax.Array:
        if _is_key(a):
            return jnp.zeros(a.shape, jnp.float32)
        return jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32))

    def body(number: jax.Array, carry: tuple) -> tuple:
        first, moved = carry
        nudge = jnp.where(number == 0, 0.0, rounding.nudge)
        now = gradients(rounding.salt + number.astype(jnp.uint32), nudge)
        first = jax.tree.map(lambda a, b: jnp.where(number == 0, b, a), first, now)
        moved = jax.tree.map(lambda m, a, b: jnp.maximum(m, apart(a, b)), moved, first, now)
        return first, moved

    shapes = jax.eval_shape(gradients, rounding.salt, rounding.nudge)
    zeros = jax.tree.map(
        lambda x: jnp.broadcast_to(jax.random.key(0, impl=jax.random.key_impl(x)), x.shape)
        if _is_key(x) else jnp.zeros(x.shape, x.dtype), shapes
    )
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
    return jax.lax.fori_loop(0, rounding.num_nudges + 1, body, (zeros, nothing))


def _with_tolerances(
    update: Callable[..., dict[str, Any]], grads: dict[str, jax.Array],
    deltas: dict[str, jax.Array], before: Mapping[str, jax.Array], salt: jax.Array,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the update and each element's tolerance.

    Half of the gradient's elements are moved up or down, then the other half. This separates the
    effect of an element's own gradient from that of the others, as in an optimizer that divides by
    a layer's norm. The effect of the others is random, so its mean over the array is used.
    """

    def body(carry: tuple, pattern: tuple) -> tuple:
        first, own, others = carry
        half, sign = pattern
        moved, masks = {}, {}
        for number, (path, g) in enumerate(grads.items()):
            index = element_hash.indices(g.shape, g.shape)
            signs, halves = element_hash.signs(index, element_hash.salted(salt, number), 2)
            masks[path] = (halves > 0) == (half > 0)
            moved[path] = g + jnp.where(masks[path], sign * signs * deltas[path], 0.0)
        now = update(moved)
        first = jax.tree.map(lambda a, b: jnp.where(sign == 0, b, a), first, now)
        for path, x in now.items():
            apart = jnp.abs(x.astype(jnp.float32) - first[path].astype(jnp.float32))
            mask = _mask_of(path, apart.shape, masks)
            own[path] = jnp.maximum(own[path], jnp.where(mask, apart, 0.0))
            others[path] += jnp.mean(jnp.square(jnp.where(mask, 0.0, apart)))
        return (first, own, others), None

    shapes = jax.eval_shape(update, grads)
    zeros = {path: jnp.zeros(x.shape, x.dtype) for path, x in shapes.items()}
    nothing = {path: jnp.zeros(x.shape, jnp.float32) for path, x in shapes.items()}
    none = {path: jnp.zeros((), jnp.float32) for path in shapes}
    patterns = tuple(jnp.asarray(x, jnp.float32) for x in zip(*_PATTERNS, strict=True))
    (first, own, others), _ = jax.lax.scan(body, (zeros, nothing, none), patterns)
    tolerances = {}
    for path, x in first.items():
        if jnp.issubdtype(x.dtype, jnp.floating):
            of_others = 4.0 * jnp.sqrt(others[path])
            tolerances[path] = 2.0 * own[path] + of_others + _arithmetic(before[path], x)
        else:  # Integers must be equal; a rounded float may be off by one unit.
            tolerances[path] = 2.0 * own[path] + (1.0 if x.ndim > 1 else 0.0)
    return first, tolerances


def _mask_of(path: str, shape: tuple[int, ...], masks: Mapping[str, jax.Array]) -> Any:
    """Returns which elements of an array belong to moved elements of the gradient."""
    weight = next((end for end in path_ends(path) if end in masks), None)
    if weight is None or masks[weight].shape != shape:
        return True  # Such as a sum over a dim: each element depends on moved elements.
    return masks[weight]


def path_ends(path: str) -> list[str]:
    """Returns a path and what is left of it without its first parts: a slot ends in its weight."""
    parts = path.split("/")
    return ["/".join(parts[start:]) for start in range(len(parts))]


def _arithmetic(before: jax.Array, now: jax.Array) -> jax.Array:
    """Returns how far an element may be off by the rounding of the update itself."""
    one, other = jnp.abs(before).astype(jnp.float32), jnp.abs(now).astype(jnp.float32)
    change = jnp.abs(now.astype(jnp.float32) - before.astype(jnp.float32))
    unit = float(jnp.finfo(now.dtype).eps)
    return _ULPS * unit * jnp.maximum(one, other) + _OF_CHANGE * change


def nudged(params: PyTree, nudge: jax.Array, salt: jax.Array) -> PyTree:
    """Returns weights with each element moved up or down by a relative amount."""
    leaves, treedef = jax.tree.flatten(params)
    moved = []
    for number, x in enumerate(leaves):
        if jnp.issubdtype(x.dtype, jnp.floating):
            index = element_hash.indices(x.shape, x.shape)
            (signs,) = element_hash.signs(index, element_hash.salted(salt, number), 1)
            x = (x.astype(jnp.float32) * (1.0 + nudge * signs)).astype(x.dtype)
        moved.append(x)
    return jax.tree.unflatten(treedef, moved)


def _rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
