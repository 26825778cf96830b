"""Recomputes the state after a step, with a tolerance for each element.

Recomputed gradients differ from the actual gradients by rounding errors, which an optimizer may
amplify to an entire step (Adam: g / |g|). Therefore, `plain_update` computes the update both from
the gradients and from gradients with perturbations as large as rounding errors. The difference
between these updates is the tolerance.
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
# Tolerances for the optimizer's arithmetic: as a fraction of an element's change, in units in the
# last place, and the minimum relative rounding error of a gradient.
_OF_CHANGE, _ULPS, _LEAST_SHARE = 1e-4, 4.0, 1e-6
_PATTERNS = ((0, 0.0), (0, 1.0), (0, -1.0), (1, 1.0), (1, -1.0))  # (half of the elements, sign)


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Rounding errors of gradients.

    The errors are estimated either from a few rows (`shares`) or by running the entire batch with
    perturbed weights (`num_nudges`).

    Attributes:
      shares: Maps the path of each trained weight to the relative rounding error of its gradient.
      num_nudges: Number of runs on the entire batch with perturbed weights; 0 to use `shares`.
      nudge: Relative amount by which each weight is perturbed in these runs.
      salt: Seed for the signs of the perturbations, uint32.
    """

    shares: Mapping[str, jax.Array]
    num_nudges: jax.Array
    nudge: jax.Array
    salt: jax.Array


def recompute_state(
    partitioner: Partitioner,
    old: TrainState,
    inputs: PyTree,
    key: jax.Array,
    rounding: Rounding,
    *,
    actual_num_skipped: jax.Array,
    chosen: Collection[str],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Recomputes arrays in the state after a step.

    Args:
      partitioner: The task's partitioner on the mesh.
      old: State before the step, without padding, in device memory.
      inputs: The complete batch.
      key: The run's random key.
      rounding: Rounding errors of the gradients.
      actual_num_skipped: Number of skipped steps in the actual state after the step. This number
        determines whether the step is skipped if a gradient norm is within rounding errors of the
        limit.
      chosen: Paths of the arrays to return. If they include a trained weight, they must also
        include its slots and its moving average.

    Returns:
      (state, tolerances): Dicts that map paths to the arrays after the step, and to a tolerance for
      each element.
    """
    bound_learner, before = partitioner.bound_learner, dict(leaves_with_path(old))
    gradients = functools.partial(_gradients, partitioner, old, inputs, key, chosen)
    exact, errors = _gradients_and_errors(gradients, rounding)
    norm, norms = plain_update.grad_norms(bound_learner, exact["squares"])
    is_finite = jnp.isfinite(norm) & jnp.isfinite(exact["loss"])
    # The median is robust against weights whose gradients consist only of rounding errors.
    median_share = jnp.median(jnp.stack([*rounding.shares.values(), jnp.float32(_LEAST_SHARE)]))
    is_kept = plain_update.is_step_kept(
        bound_learner,
        old.opt_states,
        norms,
        is_finite,
        TIMES_ROUNDING * median_share + _OF_CHANGE,
        actual_num_skipped == old.opt_states["num_skipped_steps"],
    )

    def delta(path: str, g: jax.Array) -> jax.Array:
        """Returns the rounding error of each element; 0 for elements that are always 0."""
        error, share = errors["grads"][path], jnp.maximum(rounding.shares[path], _LEAST_SHARE)
        from_shares = share * (jnp.abs(g) + _rms(g))
        from_nudges = error + _rms(error) + _LEAST_SHARE * jnp.abs(g)
        max_error = TIMES_ROUNDING * jnp.where(rounding.num_nudges > 0, from_nudges, from_shares)
        return jnp.where((g == 0) & (error == 0), 0.0, max_error)

    def update(grads: dict[str, jax.Array]) -> dict[str, jax.Array]:
        after = plain_update.updated_weights(bound_learner, old, grads, norms, exact["loss"])
        return {path: x for path, x in after.items() if path in chosen}

    grads = exact["grads"]
    deltas = {path: delta(path, g) for path, g in grads.items()}
    new, tolerances = _update_and_tolerances(update, grads, deltas, before, rounding.salt)
    new = {path: jnp.where(is_kept, x, before[path]) for path, x in new.items()}
    # Variables that the model itself changes in a step, such as running means.
    for path, x in exact["of_model"].items():
        new[path] = x if _is_key(x) else jnp.where(is_kept, x, before[path])
        if jnp.issubdtype(x.dtype, jnp.floating):
            change, error = jnp.abs(x - before[path]), errors["of_model"][path]
            tolerances[path] = _arithmetic_error(before[path], x) + TIMES_ROUNDING * jnp.where(
                rounding.num_nudges > 0,
                error + _rms(error),
                median_share * (change.astype(jnp.float32) + _rms(change)),
            )
    new |= plain_update.updated_counts(bound_learner, old, is_kept, is_finite)
    # All other arrays, such as frozen weights, do not change.
    state = {path: new.get(path, x) for path, x in before.items() if path in chosen}
    return state, {
        path: tolerances.get(path, jnp.zeros(jnp.shape(x), jnp.float32))
        for path, x in state.items()
    }


@dataclasses.dataclass
class _RecordingLearner(BoundLearner):
    """A learner that returns the gradients as outputs instead of updating weights."""

    def update(self, grads: PyTree, opt_states: Any, params: PyTree, loss: jax.Array) -> tuple:
        recorded = {"grads": self.groups.lay_out(grads), "loss": jnp.asarray(loss, jnp.float32)}
        return params, opt_states, recorded, jnp.zeros((), bool)


def _gradients(
    partitioner: Partitioner,
    old: TrainState,
    inputs: PyTree,
    key: jax.Array,
    chosen: Collection[str],
    salt: jax.Array,
    nudge: jax.Array,
) -> dict[str, Any]:
    """Computes the loss and the gradients of a step, optionally with perturbed weights.

    Args:
      partitioner: The task's partitioner on the mesh.
      old: State before the step.
      inputs: The complete batch.
      key: The run's random key.
      chosen: Paths of arrays in the state. Only the gradients of these weights are returned.
      salt: Seed for the perturbation; see `nudge_weights`.
      nudge: Relative size of the perturbation.

    Returns:
      A dict with "loss", "grads" (gradients of the chosen weights, keyed by path), "squares" (the
      sum of squares of every weight's gradient), and "of_model" (variables changed by the model
      itself).
    """
    bound_learner = partitioner.bound_learner
    params = nudge_weights(old.mdl_vars["params"], nudge, salt)
    new, outputs = steps.train_step(
        partitioner.task,
        TrainState(old.step, {**old.mdl_vars, "params": params}, old.opt_states),
        inputs,
        key,
        bound_learner=_RecordingLearner(bound_learner.settings, bound_learner.groups),
        value_and_grad=partitioner.gradient_functions.value_and_grad,
    )
    old_params = dict(leaves_with_path(params))
    of_model = {
        f"mdl_vars/params/{path}": x
        for path, x in leaves_with_path(new.mdl_vars["params"])
        if x is not old_params[path]
    }
    of_model |= {
        f"mdl_vars/non_trainable/{path}": x
        for path, x in leaves_with_path(new.mdl_vars["non_trainable"])
    }
    grads = dict(leaves_with_path(outputs["learner"]["grads"]))
    return {
        "grads": {path: g for path, g in grads.items() if f"mdl_vars/params/{path}" in chosen},
        "squares": {path: jnp.sum(jnp.square(g)) for path, g in grads.items()},
        "loss": outputs["learner"]["loss"],
        "of_model": of_model,
    }


def _gradients_and_errors(
    gradients: Callable[..., dict[str, Any]], rounding: Rounding
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the gradients, and how much they change at most when weights are perturbed.

    Both are computed in a single loop, so that the gradients are compiled only once.
    """

    def abs_difference(a: Any, b: Any) -> jax.Array:
        if _is_key(a):
            return jnp.zeros(a.shape, jnp.float32)
        return jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32))

    # Iteration 0 computes the exact gradients, and each later iteration perturbs the weights.
    def body(number: jax.Array, carry: tuple) -> tuple:
        exact, errors = carry
        nudge = jnp.where(number == 0, 0.0, rounding.nudge)
        actual = gradients(rounding.salt + number.astype(jnp.uint32), nudge)
        exact = jax.tree.map(lambda a, b: jnp.where(number == 0, b, a), exact, actual)
        errors = jax.tree.map(
            lambda m, a, b: jnp.maximum(m, abs_difference(a, b)), errors, exact, actual
        )
        return exact, errors

    # The carry starts at zero, and iteration 0 replaces `exact`.
    shapes = jax.eval_shape(gradients, rounding.salt, rounding.nudge)
    zeros = jax.tree.map(
        lambda x: (
            jnp.broadcast_to(jax.random.key(0, impl=jax.random.key_impl(x)), x.shape)
            if _is_key(x)
            else jnp.zeros(x.shape, x.dtype)
        ),
        shapes,
    )
    zero_errors = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
    return jax.lax.fori_loop(0, rounding.num_nudges + 1, body, (zeros, zero_errors))


def _update_and_tolerances(
    update: Callable[..., dict[str, Any]],
    grads: dict[str, jax.Array],
    deltas: dict[str, jax.Array],
    before: Mapping[str, jax.Array],
    salt: jax.Array,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the update and a tolerance for each element.

    First, one half of the gradient's elements is perturbed (up and down), and then the other half.
    This separates the effect of an element's own gradient from the effect of all other elements,
    for instance in an optimizer that divides by the norm of a layer. The effect of other elements
    is random, so the mean of this effect over the array is used.
    """

    # The sign of the first pattern is 0, so `exact` is the update with unperturbed gradients.
    def body(carry: tuple, pattern: tuple) -> tuple:
        exact, own_effect, other_effect = carry
        half, sign = pattern
        perturbed, masks = {}, {}
        for number, (path, g) in enumerate(grads.items()):
            index = element_hash.indices(g.shape, g.shape)
            signs, halves = element_hash.signs(index, element_hash.leaf_salt(salt, number), 2)
            masks[path] = (halves > 0) == (half > 0)
            perturbed[path] = g + jnp.where(masks[path], sign * signs * deltas[path], 0.0)
        actual = update(perturbed)
        exact = jax.tree.map(lambda a, b: jnp.where(sign == 0, b, a), exact, actual)
        for path, x in actual.items():
            effect = jnp.abs(x.astype(jnp.float32) - exact[path].astype(jnp.float32))
            mask = _mask_of(path, effect.shape, masks)
            own_effect[path] = jnp.maximum(own_effect[path], jnp.where(mask, effect, 0.0))
            other_effect[path] += jnp.mean(jnp.square(jnp.where(mask, 0.0, effect)))
        return (exact, own_effect, other_effect), None

    shapes = jax.eval_shape(update, grads)
    zeros = {path: jnp.zeros(x.shape, x.dtype) for path, x in shapes.items()}
    own_zeros = {path: jnp.zeros(x.shape, jnp.float32) for path, x in shapes.items()}
    other_zeros = {path: jnp.zeros((), jnp.float32) for path in shapes}
    patterns = tuple(jnp.asarray(x, jnp.float32) for x in zip(*_PATTERNS, strict=True))
    (exact, own_effect, other_effect), _ = jax.lax.scan(
        body, (zeros, own_zeros, other_zeros), patterns
    )
    tolerances = {}
    for path, x in exact.items():
        if jnp.issubdtype(x.dtype, jnp.floating):
            of_others = 4.0 * jnp.sqrt(other_effect[path])
            tolerances[path] = (
                2.0 * own_effect[path] + of_others + _arithmetic_error(before[path], x)
            )
        else:  # Counts must be equal; other integers are rounded floats and may be off by one.
            tolerances[path] = 2.0 * own_effect[path] + (1.0 if x.ndim > 1 else 0.0)
    return exact, tolerances


def _mask_of(path: str, shape: tuple[int, ...], masks: Mapping[str, jax.Array]) -> Any:
    """Returns a mask of the elements in a state array that belong to perturbed gradients."""
    weight = next((suffix for suffix in path_suffixes(path) if suffix in masks), None)
    if weight is None or masks[weight].shape != shape:
        # For instance, in a sum over a dim, each element depends on perturbed elements.
        return True
    return masks[weight]


def path_suffixes(path: str) -> list[str]:
    """Returns a path and its suffixes. A slot's path ends with the path of its weight."""
    parts = path.split("/")
    return ["/".join(parts[start:]) for start in range(len(parts))]


def _arithmetic_error(before: jax.Array, after: jax.Array) -> jax.Array:
    """Returns the error of each element due to rounding in the optimizer's arithmetic."""
    size = jnp.maximum(jnp.abs(before).astype(jnp.float32), jnp.abs(after).astype(jnp.float32))
    change = jnp.abs(after.astype(jnp.float32) - before.astype(jnp.float32))
    epsilon = float(jnp.finfo(after.dtype).eps)
    return _ULPS * epsilon * size + _OF_CHANGE * change


def nudge_weights(params: PyTree, nudge: jax.Array, salt: jax.Array) -> PyTree:
    """Perturbs each element of the weights by a relative amount, randomly up or down."""
    leaves, treedef = jax.tree.flatten(params)
    nudged = []
    for number, x in enumerate(leaves):
        if jnp.issubdtype(x.dtype, jnp.floating):
            index = element_hash.indices(x.shape, x.shape)
            (signs,) = element_hash.signs(index, element_hash.leaf_salt(salt, number), 1)
            x = (x.astype(jnp.float32) * (1.0 + nudge * signs)).astype(x.dtype)
        nudged.append(x)
    return jax.tree.unflatten(treedef, nudged)


def _rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
