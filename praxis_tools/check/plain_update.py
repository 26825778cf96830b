"""A reference implementation of the weight update.

It includes clipping, skipped steps, moving averages and counts. Only the optimizers are shared with
`BoundLearner.update`, so a comparison of the results reveals bugs in `BoundLearner.update`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.learner.gradient_limits import GradientLimits
from praxis_lite.core.learner.optimizer_factories import updates_of
from praxis_lite.core.learner.update import BoundLearner
from praxis_lite.core.learner.weight_groups import Group
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.core.sharding.leaf_paths import leaves_with_path, path_of

PerLayer = Callable[[Group, Callable[..., Any]], Callable[..., Any]]


def grad_norms(
    bound_learner: BoundLearner, squares: Mapping[str, jax.Array]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the global gradient norm and the norm that each optimizer uses for clipping.

    Args:
      bound_learner: The learner, bound to the weights.
      squares: Maps the path of each trained weight to the sum of squares of its gradient.

    Returns:
      (global norm, dict that maps the name of each optimizer to its norm).
    """
    norm = jnp.sqrt(sum(squares.values(), start=jnp.zeros((), jnp.float32)))
    squares_by_optimizer: dict[str, list[jax.Array]] = {}
    for group in bound_learner.groups.by_name.values():
        group_squares = squares_by_optimizer.setdefault(group.optimizer_name, [])
        group_squares += [squares["/".join(path)] for path in group.paths]
    if not bound_learner.settings.apply_separate_scaling:
        return norm, dict.fromkeys(squares_by_optimizer, norm)
    return norm, {name: jnp.sqrt(sum(xs)) for name, xs in squares_by_optimizer.items()}


def is_step_kept(
    bound_learner: BoundLearner,
    opt_states: Mapping[str, Any],
    norms: Mapping[str, jax.Array],
    is_finite: jax.Array,
    margin: jax.Array | float = 0.0,
    was_kept: jax.Array | bool = False,
) -> jax.Array:
    """Returns whether the step updates the weights instead of being skipped.

    Args:
      bound_learner: The learner, bound to the weights.
      opt_states: Optimizer states before the step.
      norms: Maps the name of each optimizer to its gradient norm.
      is_finite: Whether the loss and the global gradient norm are finite.
      margin: Relative distance within which a norm is considered equal to the limit.
      was_kept: The result if a norm is considered equal to the limit.
    """
    learner, number = bound_learner.settings, opt_states["num_updates"]
    rates = [learner.learning_rate, *(aux.learning_rate for aux in learner.auxiliary_optimizers)]
    rates = [rate(number) if callable(rate) else rate for rate in rates]
    is_finite &= jnp.isfinite(jnp.stack([jnp.asarray(x, jnp.float32) for x in rates])).all()
    limit = learner.limits.skip_step_gradient_norm_value
    if not limit:
        return is_finite
    norm = functools.reduce(jnp.maximum, norms.values())
    # Rounding may move a norm this close to the limit to either side, so `was_kept` decides.
    is_near = jnp.abs(norm / limit - 1.0) <= margin
    return is_finite & jnp.where(is_near, was_kept, norm < limit)


def updated_weights(
    bound_learner: BoundLearner,
    old: TrainState,
    grads: Mapping[str, jax.Array],
    norms: Mapping[str, jax.Array],
    loss: jax.Array,
    per_layer: PerLayer = Group.per_layer,
) -> dict[str, jax.Array]:
    """Returns the trained weights, slots and moving averages after an update, keyed by path.

    Args:
      bound_learner: The learner, bound to the weights.
      old: State before the step, without padding and in device memory.
      grads: Maps paths of weights to gradients; missing gradients are treated as zeros.
      norms: Maps the name of each optimizer to its gradient norm, from `grad_norms`.
      loss: Loss of the step, which some optimizers use.
      per_layer: Function that maps a function over the layers in a group's stacked weights.
    """
    learner, params = bound_learner.settings, old.mdl_vars["params"]
    updated: dict[str, jax.Array] = {}
    for name, group in bound_learner.groups.by_name.items():
        weights, slots = group.select(params), old.opt_states["slots"][name]
        limits = learner.limits_by_optimizer[group.optimizer_name]
        norm = norms[group.optimizer_name]
        group_grads = jax.tree.map_with_path(
            lambda keys, w: grads.get(path_of(keys), jnp.zeros(w.shape, jnp.float32)), weights
        )

        def clip(tree: Any, limits: GradientLimits = limits, norm: jax.Array = norm) -> Any:
            return jax.tree.map(lambda g: _clip(limits, norm, g), tree)

        group_grads = (
            per_layer(group, clip)(group_grads)
            if group.stack_ranks is None
            else group.per_weight(clip, group_grads)
        )
        update = functools.partial(updates_of, group.optimizer, loss=loss)
        updates, slots = per_layer(group, update)(group_grads, slots, weights)
        new_weights = jax.tree.map(lambda w, u: (w + u).astype(w.dtype), weights, updates)
        updated |= {f"mdl_vars/params/{path}": x for path, x in leaves_with_path(new_weights)}
        updated |= {f"opt_states/slots/{name}/{path}": x for path, x in leaves_with_path(slots)}
    # The averages are taken over the weights before the update, as in Pax.
    if decay := learner.ema_decay:
        num_updates = old.opt_states["num_updates"]
        decay = jnp.minimum(decay, (1.0 + num_updates) / (10.0 + num_updates))
        before = dict(leaves_with_path(params))
        for path, x in leaves_with_path(old.opt_states["ema"]):
            updated[f"opt_states/ema/{path}"] = decay * x + (1.0 - decay) * before[path]
    # Some optimizers return slots with a different dtype than their init function.
    stored = dict(leaves_with_path(old))
    return {path: x.astype(stored[path].dtype) for path, x in updated.items()}


def _clip(limits: GradientLimits, norm: jax.Array, g: jax.Array) -> jax.Array:
    """Clips the gradient of one weight in one layer, given the norm over all gradients."""
    if limit := limits.clip_gradient_norm_to_value:
        return g * jnp.minimum(1.0, limit / norm)
    if limit := limits.clip_gradient_single_norm_to_value:
        return g * jnp.minimum(1.0, limit / jnp.sqrt(jnp.sum(g * g)))
    if limit := limits.clip_gradient_to_value:
        return jnp.clip(g, -limit, limit)
    return g


def updated_counts(
    bound_learner: BoundLearner, old: TrainState, is_kept: jax.Array, is_finite: jax.Array
) -> dict[str, jax.Array]:
    """Returns the step, update and skip counts and the loss scale, keyed by path."""
    opt_states, num_kept = old.opt_states, jnp.where(is_kept, 1, 0)
    counts = {
        "step": old.step + 1,
        "opt_states/num_updates": opt_states["num_updates"] + num_kept,
        "opt_states/num_skipped_steps": opt_states["num_skipped_steps"] + 1 - num_kept,
        "opt_states/num_skipped_in_a_row": jnp.where(
            is_kept, 0, opt_states["num_skipped_in_a_row"] + 1
        ),
    }
    if bound_learner.settings.loss_scale is not None:
        scale = bound_learner.settings.loss_scale.update(opt_states["loss_scale"], is_finite)
        counts |= {f"opt_states/loss_scale/{path}": x for path, x in leaves_with_path(scale)}
    return counts
