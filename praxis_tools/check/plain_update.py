"""An update in plain optax: clipping, skipped steps, averages and counts written out.

Shares no code with `BoundLearner.update` but the optimizers, so that a fault there is found.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.learner.gradients import GradientLimits
from praxis_lite.core.learner.update import BoundLearner
from praxis_lite.core.learner.weight_groups import Group
from praxis_lite.core.learner.whole_tree_optimizers import updates_of
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.core.sharding.leaf_paths import leaves_with_path, path_of

PerLayer = Callable[[Group, Callable[..., Any]], Callable[..., Any]]


def grad_norms(
    bound: BoundLearner, squares: Mapping[str, jax.Array]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the norm of all gradients, and by name of an optimizer the norm that it clips by.

    Args:
      squares: by path of each trained weight, the sum of the squares of its gradient.
    """
    norm = jnp.sqrt(sum(squares.values(), start=jnp.zeros((), jnp.float32)))
    by_optimizer: dict[str, list[jax.Array]] = {}
    for group in bound.groups.by_name.values():
        local = by_optimizer.setdefault(group.optimizer_name, [])
        local += [squares["/".join(path)] for path in group.paths]
    if not bound.learner.apply_separate_scaling:
        return norm, dict.fromkeys(by_optimizer, norm)
    return norm, {name: jnp.sqrt(sum(local)) for name, local in by_optimizer.items()}


def is_step_kept(
    bound: BoundLearner, opt_states: Mapping[str, Any], norms: Mapping[str, jax.Array],
    is_finite: jax.Array, margin: jax.Array | float = 0.0, was_kept: jax.Array | bool = False,
) -> jax.Array:
    """Returns whether a step is made, and not skipped.

    Args:
      opt_states: before the step.
      is_finite: whether the loss and the norm of all gradients are.
      margin: a norm that is as near to the limit as this share of it counts as on the limit.
      was_kept: the answer for a norm on the limit.
    """
    learner, number = bound.learner, opt_states["num_updates"]
    rates = [learner.learning_rate, *(aux.learning_rate for aux in learner.auxiliary_optimizers)]
    rates = [rate(number) if callable(rate) else rate for rate in rates]
    is_finite &= jnp.isfinite(jnp.stack([jnp.asarray(x, jnp.float32) for x in rates])).all()
    limit = learner.limits.skip_step_gradient_norm_value
    if not limit:
        return is_finite
    norm = functools.reduce(jnp.maximum, norms.values())
    is_near = jnp.abs(norm / limit - 1.0) <= margin
    return is_finite & jnp.where(is_near, was_kept, norm < limit)


def updated_weights(
    bound: BoundLearner, old: TrainState, grads: Mapping[str, jax.Array],
    norms: Mapping[str, jax.Array], loss: jax.Array, per_layer: PerLayer = Group.per_layer,
) -> dict[str, jax.Array]:
    """Returns the trained weights, their slots and averages after an update, by path.

    Args:
      old: the state before the step, on the device and without padding.
      grads: by path of a weight; zeros for weights that have none here.
      norms: as `grad_norms` returns them.
      per_layer: maps a function over the layers of a group's stacked weights.
    """
    learner, params = bound.learner, old.mdl_vars["params"]
    result: dict[str, jax.Array] = {}
    for name, group in bound.groups.by_name.items():
        weights, slots = group.select(params), old.opt_states["slots"][name]
        limits = learner.limits_by_optimizer[group.optimizer_name]
        norm = norms[group.optimizer_name]
        local = jax.tree.map_with_path(
            lambda keys, w: grads.get(path_of(keys), jnp.zeros(w.shape, jnp.float32)), weights
        )

        def clip(tree: Any, limits: GradientLimits = limits, norm: jax.Array = norm) -> Any:
            return jax.tree.map(lambda g: _clipped(limits, norm, g), tree)

        local = (
            per_layer(group, clip)(local) if group.stack_ranks is None
            else group.per_weight(clip, local)
        )
        update = functools.partial(updates_of, group.optimizer, loss=loss)
        updates, slots = per_layer(group, update)(local, slots, weights)
        changed = jax.tree.map(lambda w, u: (w + u).astype(w.dtype), weights, updates)
        result |= {f"mdl_vars/params/{path}": x for path, x in leaves_with_path(changed)}
        result |= {f"opt_states/slots/{name}/{path}": x for path, x in leaves_with_path(slots)}
    if decay := learner.ema_decay:
        number = old.opt_states["num_updates"]
        decay = jnp.minimum(decay, (1.0 + number) / (10.0 + number))
        before = dict(leaves_with_path(params))
        for path, x in leaves_with_path(old.opt_states["ema"]):
            result[f"opt_states/ema/{path}"] = decay * x + (1.0 - decay) * before[path]
    # As they are stored: some optimizers return slots of another dtype than their init made.
    stored = dict(leaves_with_path(old))
    return {path: x.astype(stored[path].dtype) for path, x in result.items()}


def _clipped(limits: GradientLimits, norm: jax.Array, g: jax.Array) -> jax.Array:
    """Returns a layer's gradient within the limits; `norm` is that of all gradients."""
    if most := limits.clip_gradient_norm_to_value:
        return g * jnp.minimum(1.0, most / norm)
    if most := limits.clip_gradient_single_norm_to_value:
        return g * jnp.minimum(1.0, most / jnp.sqrt(jnp.sum(g * g)))
    if most := limits.clip_gradient_to_value:
        return jnp.clip(g, -most, most)
    return g


def updated_counts(
    bound: BoundLearner, old: TrainState, is_kept: jax.Array, is_finite: jax.Array
) -> dict[str, jax.Array]:
    """Returns the numbers of steps, updates and skipped steps, and the loss scale, by path."""
    opt_states, kept = old.opt_states, jnp.where(is_kept, 1, 0)
    result = {
        "step": old.step + 1,
        "opt_states/num_updates": opt_states["num_updates"] + kept,
        "opt_states/num_skipped_steps": opt_states["num_skipped_steps"] + 1 - kept,
        "opt_states/num_skipped_in_a_row":
            jnp.where(is_kept, 0, opt_states["num_skipped_in_a_row"] + 1),
    }
    if bound.learner.loss_scale is not None:
        scale = bound.learner.loss_scale.update(opt_states["loss_scale"], is_finite)
        result |= {f"opt_states/loss_scale/{path}": x for path, x in leaves_with_path(scale)}
    return result
