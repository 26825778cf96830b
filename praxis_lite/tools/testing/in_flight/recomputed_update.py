"""The update of a step by hand: plain optax, with limits, skipped steps and averages written out.

Shares no code with `BoundLearner.update` but the optimizers, so that a fault there is found.

A recomputed gradient is off by rounding, and an optimizer may turn rounding into a full step
(Adam: g / |g|). So the update is made of the gradients, and of gradients moved by what rounding may
move: the difference is each element's tolerance.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.learner.bound_learner import BoundLearner
from praxis_lite.core.learner.whole_trees import updates_of
from praxis_lite.core.partitioner import steps
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.core.sharding.leaf_paths import leaves_with_path, path_of
from praxis_lite.tools.testing.in_flight import bits

PyTree = Any
TIMES_ROUNDING = 16.0
# Of the change that an update makes, what an optimizer's own arithmetic may be off by.
_OF_CHANGE, _ULPS, _LEAST_SHARE = 1e-4, 4.0, 1e-6
_PATTERNS = ((0, 0.0), (0, 1.0), (0, -1.0), (1, 1.0), (1, -1.0))  # (half of the elements, sign)


@dataclasses.dataclass
class _Recording(BoundLearner):
    """A learner that returns the gradients that it is given, and updates nothing."""

    def update(self, grads: PyTree, opt_states: Any, params: PyTree, loss: jax.Array) -> tuple:
        recorded = {"grads": self.groups.lay_out(grads), "loss": jnp.asarray(loss, jnp.float32)}
        return params, opt_states, recorded, jnp.zeros((), bool)


def recomputed(
    partitioner: Partitioner, old: TrainState, inputs: PyTree, key: jax.Array, *,
    actual_num_skipped: jax.Array, chosen: Collection[str], weights: Collection[str],
    shares: Mapping[str, jax.Array], salt: jax.Array, nudge: jax.Array, num_nudges: jax.Array,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arrays of the state after a step, and each element's tolerance, by path.

    Args:
      partitioner: of the task on the mesh.
      old: the state before the step, without padding, on the device.
      inputs: the rows of the whole batch.
      key: of the run.
      actual_num_skipped: how many steps were skipped, after the step. It decides where a norm is so
        near to the limit that rounding does.
      chosen: paths of the arrays to return.
      weights: paths, among the parameters, of the trained weights that these belong to.
      shares: by path of each trained weight, the share of its gradient that rounding moves.
      salt: uint32, by which what moves up is drawn.
      nudge: the share of itself by which each weight is moved, to measure rounding by.
      num_nudges: how often it is; with 0 the shares are what is known of rounding.
    """
    bound, before = partitioner.learner, dict(leaves_with_path(old))
    made = functools.partial(_made, partitioner, old, inputs, key, weights)
    first, moved, norms, is_finite = _gradients(made, bound, salt, nudge, num_nudges)
    grads, loss = first["grads"], first["loss"]
    # The gradient of a single weight may be nothing but rounding.
    usual = jnp.median(jnp.stack([*shares.values(), jnp.float32(_LEAST_SHARE)]))
    deltas = {
        path: _rounding_of(g, moved["grads"][path], shares[path], num_nudges)
        for path, g in grads.items()
    }
    is_kept = _is_kept(bound, old, norms, is_finite, usual, actual_num_skipped)

    def update(grads: dict[str, jax.Array]) -> dict[str, Any]:
        after = _updated(bound, old, grads, norms, loss)
        # As they are stored: some optimizers return slots of another dtype than their init made.
        return {path: x.astype(before[path].dtype) for path, x in after.items() if path in chosen}

    new, tolerances = _with_tolerances(update, grads, deltas, before, salt)
    new = {path: jnp.where(is_kept, x, before[path]) for path, x in new.items()}
    # What the model itself moves in a step, such as running means.
    for path, x in first["of_model"].items():
        new[path] = x if _is_key(x) else jnp.where(is_kept, x, before[path])
        if jnp.issubdtype(x.dtype, jnp.floating):
            change, by_nudges = jnp.abs(x - before[path]), moved["of_model"][path]
            by_share = usual * (change.astype(jnp.float32) + _rms(change))
            tolerances[path] = _arithmetic(before[path], x) + TIMES_ROUNDING * jnp.where(
                num_nudges > 0, by_nudges + _rms(by_nudges), by_share
            )
    one = jnp.where(is_kept, 1, 0)
    opt_states = old.opt_states
    new |= {
        "step": old.step + 1,
        "opt_states/num_updates": opt_states["num_updates"] + one,
        "opt_states/num_skipped_steps": opt_states["num_skipped_steps"] + 1 - one,
        "opt_states/num_skipped_in_a_row":
            jnp.where(is_kept, 0, opt_states["num_skipped_in_a_row"] + 1),
    }
    if bound.learner.loss_scale is not None:
        scale = bound.learner.loss_scale.update(opt_states["loss_scale"], is_finite)
        new |= {f"opt_states/loss_scale/{path}": x for path, x in leaves_with_path(scale)}
    # All else stays as it is: frozen weights.
    result = {path: new.get(path, x) for path, x in leaves_with_path(old) if path in chosen}
    return result, {
        path: tolerances.get(path, jnp.zeros(jnp.shape(x), jnp.float32))
        for path, x in result.items()
    }


def _made(
    partitioner: Partitioner, old: TrainState, inputs: PyTree, key: jax.Array,
    weights: Collection[str], salt: jax.Array, nudge: jax.Array,
) -> dict[str, Any]:
    """Returns a step's loss, gradients, their sums of squares, and what the model itself moves."""
    task, bound = partitioner.task, partitioner.learner
    params = nudged(old.mdl_vars["params"], nudge, salt)
    state = TrainState(old.step, {**old.mdl_vars, "params": params}, old.opt_states)
    new, outputs = steps.train_step(
        task, state, inputs, key, learner=_Recording(bound.learner, bound.groups),
        value_and_grad=partitioner.gradients.value_and_grad,
    )
    of_model = {
        f"mdl_vars/params/{path}": x for (path, x), given in zip(
            leaves_with_path(new.mdl_vars["params"]), jax.tree.leaves(params), strict=True
        ) if x is not given
    }
    of_model |= {
        f"mdl_vars/non_trainable/{path}": x
        for path, x in leaves_with_path(new.mdl_vars["non_trainable"])
    }
    grads = dict(leaves_with_path(outputs["learner"]["grads"]))
    return {
        "grads": {path: g for path, g in grads.items() if path in weights},
        "squares": {path: jnp.sum(jnp.square(g)) for path, g in grads.items()},
        "loss": outputs["learner"]["loss"], "of_model": of_model,
    }


def _gradients(
    made: Callable[..., dict[str, Any]], bound: BoundLearner, salt: jax.Array, nudge: jax.Array,
    num_nudges: jax.Array,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, jax.Array], jax.Array]:
    """Returns the result of `made`, how far nudges move it, the norms, and if it is finite."""
    shapes = jax.eval_shape(made, salt, nudge)

    def apart(a: Any, b: Any) -> jax.Array:
        if _is_key(a):
            return jnp.zeros(a.shape, jnp.float32)
        return jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32))

    def body(number: jax.Array, carry: tuple) -> tuple:
        first, moved = carry
        now = made(salt + number.astype(jnp.uint32), jnp.where(number == 0, 0.0, nudge))
        first = jax.tree.map(lambda a, b: jnp.where(number == 0, b, a), first, now)
        moved = jax.tree.map(lambda m, a, b: jnp.maximum(m, apart(a, b)), moved, first, now)
        return first, moved

    zeros = jax.tree.map(
        lambda x: jnp.broadcast_to(jax.random.key(0, impl=jax.random.key_impl(x)), x.shape)
        if _is_key(x) else jnp.zeros(x.shape, x.dtype), shapes
    )
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
    first, moved = jax.lax.fori_loop(0, num_nudges + 1, body, (zeros, nothing))
    squares, groups = first["squares"], bound.groups
    norm = jnp.sqrt(sum(squares.values(), start=jnp.zeros((), jnp.float32)))
    norms = {group.optimizer_name: norm for group in groups.by_name.values()}
    if bound.learner.apply_separate_scaling:
        norms = {
            name: jnp.sqrt(sum(
                squares["/".join(path)] for group in groups.by_name.values()
                if group.optimizer_name == name for path in group.paths
            )) for name in norms
        }
    return first, moved, norms, jnp.isfinite(norm) & jnp.isfinite(first["loss"])


def _rounding_of(
    g: jax.Array, moved: jax.Array, share: jax.Array, num_nudges: jax.Array
) -> jax.Array:
    """Returns how far rounding may move each element of a gradient; zeros that stay are exact."""
    share = jnp.maximum(share, _LEAST_SHARE)
    by_share = share * (jnp.abs(g) + _rms(g))
    by_nudges = moved + _rms(moved) + _LEAST_SHARE * jnp.abs(g)
    delta = TIMES_ROUNDING * jnp.where(num_nudges > 0, by_nudges, by_share)
    return jnp.where((g == 0) & (moved == 0), 0.0, delta)


def _is_kept(
    bound: BoundLearner, old: TrainState, norms: Mapping[str, jax.Array], is_finite: jax.Array,
    share: jax.Array, actual_num_skipped: jax.Array,
) -> jax.Array:
    """Returns True if the step is not skipped."""
    learner = bound.learner
    number = old.opt_states["num_updates"]
    rates = [learner.learning_rate, *(aux.learning_rate for aux in learner.auxiliary_optimizers)]
    rates = [rate(number) if callable(rate) else rate for rate in rates]
    is_finite &= jnp.isfinite(jnp.stack([jnp.asarray(x, jnp.float32) for x in rates])).all()
    limit = learner.limits.skip_step_gradient_norm_value
    if not limit:
        return is_finite
    norm = functools.reduce(jnp.maximum, norms.values())
    is_near = jnp.abs(norm / limit - 1.0) <= TIMES_ROUNDING * share + _OF_CHANGE
    was_kept = actual_num_skipped == old.opt_states["num_skipped_steps"]
    return is_finite & jnp.where(is_near, was_kept, norm < limit)


def _updated(
    bound: BoundLearner, old: TrainState, grads: Mapping[str, jax.Array],
    norms: Mapping[str, jax.Array], loss: jax.Array,
) -> dict[str, Any]:
    """Returns the trained weights, their slots and averages after an update, by path."""
    learner, params = bound.learner, old.mdl_vars["params"]
    result = {}
    for name, group in bound.groups.by_name.items():
        weights, slots = group.of(params), old.opt_states["slots"][name]
        clipped = functools.partial(
            _clipped, learner.limits_by_optimizer[group.optimizer_name],
            norms[group.optimizer_name],
        )
        # Gradients that nothing chosen depends on are not computed.
        local = jax.tree.map_with_path(
            lambda path, w: grads.get(path_of(path), jnp.zeros(w.shape, jnp.float32)), weights
        )
        local = group.per_weight(lambda tree, clip=clipped: jax.tree.map(clip, tree), local)
        update = functools.partial(updates_of, group.optimizer, loss=loss)
        updates, slots = group.per_layer(update)(local, slots, weights)
        changed = jax.tree.map(lambda w, u: (w + u).astype(w.dtype), weights, updates)
        result |= {f"mdl_vars/params/{path}": x for path, x in leaves_with_path(changed)}
        result |= {f"opt_states/slots/{name}/{path}": x for path, x in leaves_with_path(slots)}
    if decay := learner.ema_decay:
        number = old.opt_states["num_updates"]
        decay = jnp.minimum(decay, (1.0 + number) / (10.0 + number))
        trained, _ = bound.groups.split(params)
        before = dict(leaves_with_path(trained))
        for path, x in leaves_with_path(old.opt_states["ema"]):
            result[f"opt_states/ema/{path}"] = decay * x + (1.0 - decay) * before[path]
    return result


def _clipped(limits: Any, norm: jax.Array, g: jax.Array) -> jax.Array:
    """Returns a layer's gradient within the limits; `norm` is that of all gradients."""
    if most := limits.clip_gradient_norm_to_value:
        return g * jnp.minimum(1.0, most / norm)
    if most := limits.clip_gradient_single_norm_to_value:
        return g * jnp.minimum(1.0, most / jnp.sqrt(jnp.sum(g * g)))
    if most := limits.clip_gradient_to_value:
        return jnp.clip(g, -most, most)
    return g


def _with_tolerances(
    update: Callable[..., dict[str, Any]], grads: dict[str, jax.Array],
    deltas: dict[str, jax.Array], before: Mapping[str, jax.Array], salt: jax.Array,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the update and each element's tolerance.

    Half of the gradient's elements are moved up or down, then the other half: so it is known what
    an element's own gradient moves, and what those of others do, as in an optimizer that takes the
    norm of a layer. What others move is a matter of chance, so their mean over the array counts.
    """
    names = {path: number for number, path in enumerate(grads)}

    def body(carry: tuple, pattern: tuple) -> tuple:
        first, own, others = carry
        half, sign = pattern
        moved, masks = {}, {}
        for path, g in grads.items():
            index = bits.indices(g.shape, g.shape)
            signs, halves = bits.signs(index, bits.salted(salt, names[path]), 2)
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
        if not jnp.issubdtype(x.dtype, jnp.floating):
            # Integers must be equal; a rounded float may be off by one unit.
            tolerances[path] = 2.0 * own[path] + (1.0 if x.ndim > 1 else 0.0)
            continue
        tolerances[path] = (
            2.0 * own[path] + 4.0 * jnp.sqrt(others[path]) + _arithmetic(before[path], x)
        )
    return first, tolerances


def _mask_of(path: str, shape: tuple[int, ...], masks: Mapping[str, jax.Array]) -> Any:
    """Returns which elements of an array belong to nudged elements of the gradient."""
    for start in range(len(path)):
        if (start == 0 or path[start - 1] == "/") and path[start:] in masks:
            mask = masks[path[start:]]
            # Of another shape, such as a sum over a dim: each depends on moved elements.
            return mask if mask.shape == shape else True
    return True


def _arithmetic(before: jax.Array, now: jax.Array) -> jax.Array:
    """Returns how far an element may be off by the rounding of the update itself."""
    one, other = jnp.abs(before).astype(jnp.float32), jnp.abs(now).astype(jnp.float32)
    change = jnp.abs(now.astype(jnp.float32) - before.astype(jnp.float32))
    unit = float(jnp.finfo(now.dtype).eps)
    return _ULPS * unit * jnp.maximum(one, other) + _OF_CHANGE * change


def nudged(params: PyTree, nudge: jax.Array, salt: jax.Array) -> PyTree:
    """Returns weights of which each element is moved by a share of itself, up or down."""
    leaves, treedef = jax.tree.flatten(params)
    moved = []
    for number, x in enumerate(leaves):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            moved.append(x)
            continue
        signs = bits.signs(bits.indices(x.shape, x.shape), bits.salted(salt, number), 1)[0]
        moved.append((x.astype(jnp.float32) * (1.0 + nudge * signs)).astype(x.dtype))
    return jax.tree.unflatten(treedef, moved)


def _rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
