"""The update: clipped by parts, decayed twice, averaged wrong, with the slots of another leaf."""

import functools

import jax
import jax.numpy as jnp

from tests.tools.check import tiny
from tests.tools.check.defects.defect import Defect, after, num_devices, replaced

LEARNER = "praxis_lite.core.learner.update"
UPDATES = f"{LEARNER}:BoundLearner._updates"
BY_HAND = ("reference update",)


def _updates(change):
    """Returns a planter of `change(updates, slots, weights)` behind the optimizers."""

    def made(actual, self, grads, norms, slots, weights, loss):
        return change(*actual, weights)

    return after(UPDATES, made)


def _map(change):
    return lambda updates, slots, weights: (jax.tree.map(change, updates, weights), slots)


def _slots(change):
    return lambda updates, slots, weights: (updates, jax.tree.map(change, slots))


def _is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


ALWAYS = {
    "decays weights twice": _updates(_map(lambda u, w: u - 0.001 * w)),
    "takes twice the rate": _updates(_map(lambda u, w: 2 * u)),
    "goes uphill": _updates(_map(lambda u, w: -u)),
    "leaves vectors out": _updates(_map(lambda u, w: u if u.ndim > 1 else u * 0)),
    "updates the first layer of a stack alone": _updates(
        _map(lambda u, w: u.at[1:].set(0) if u.ndim == 3 else u)
    ),
    "updates each layer with the first one's": _updates(
        _map(lambda u, w: jnp.broadcast_to(u[:1], u.shape) if u.ndim == 3 else u)
    ),
    "loses its slots": _updates(_slots(lambda x: x * 0 if _is_float(x) else x)),
    "counts updates twice": _updates(_slots(lambda x: x if _is_float(x) else x + 1)),
    "rounds slots to bfloat16": _updates(
        _slots(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32) * 1.001 if _is_float(x) else x)
    ),
    "clips each weight by its own norm": after(
        f"{LEARNER}:global_norm",
        lambda norm, grads: jnp.sqrt(jnp.sum(jnp.square(jax.tree.leaves(grads)[0]))),
    ),
    "clips by a norm without the largest gradient": after(
        f"{LEARNER}:global_norm",
        lambda norm, grads: jnp.sqrt(
            jnp.maximum(
                norm**2
                - max((jnp.sum(g * g) for g in jax.tree.leaves(grads)), key=lambda x: id(x)),
                1e-6,
            )
        ),
    ),
    "averages the weights after the update": after(
        f"{LEARNER}:moving_average",
        lambda average, old, params, decay, n: jax.tree.map(
            lambda a, p: a + 0.01 * (p - a), average, params
        ),
    ),
    "averages with a decay of its own": replaced(
        f"{LEARNER}:moving_average",
        lambda old: lambda average, params, decay, n: old(average, params, 0.5 * decay, n),
    ),
    "keeps its first average": after(
        f"{LEARNER}:moving_average", lambda average, old, params, decay, n: old
    ),
}
DEFECTS = [
    # A decay is not at its limit before the eighth step.
    Defect(f"the learner {what}", tiny.Lm, planted, (1, 1, 2), BY_HAND, steps=12)
    for what, planted in ALWAYS.items()
]


def _on_mesh(change):
    def made(updates, slots, weights):
        return change(updates, slots, weights) if num_devices() > 1 else (updates, slots)

    return _updates(made)


def _swapped(updates, slots, weights):
    leaves, treedef = jax.tree.flatten(slots)
    by_shape = {}
    for place, x in enumerate(leaves):
        by_shape.setdefault((x.shape, x.dtype), []).append(place)
    for places in by_shape.values():
        rolled = [leaves[place] for place in places[1:] + places[:1]]
        for place, x in zip(places, rolled, strict=True):
            leaves[place] = x
    return updates, jax.tree.unflatten(treedef, leaves)


def _scaled_norm(norm, grads):
    return norm / jnp.sqrt(1.0 * num_devices())


def _norm_of_whole_weights(norm, grads):
    if num_devices() == 1:
        return norm
    squares = [jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads) if g.ndim > 1]
    return jnp.sqrt(sum(squares))


def _counted_per_device(norm, grads):
    # Gradients of weights that all devices have are counted once for each.
    squares = [
        jnp.sum(jnp.square(g)) * (num_devices() if g.ndim == 1 else 1)
        for g in jax.tree.leaves(grads)
    ]
    return jnp.sqrt(sum(squares))


def _average_of_padded(average, old, params, decay, n):
    if num_devices() == 1:
        return average
    return jax.tree.map(lambda a: a.at[..., -1].set(0), average)


def _skips(old):
    @functools.wraps(old)
    def update(self, grads, opt_states, params, loss):
        loss = loss * jnp.inf if num_devices() > 1 else loss
        return old(self, grads, opt_states, params, loss)

    return update


ON_A_MESH = {
    "decays weights twice": _on_mesh(_map(lambda u, w: u - 0.001 * w)),
    "decays weights per device": _on_mesh(_map(lambda u, w: u - 0.001 * num_devices() * w)),
    "takes the rate of each device": _on_mesh(_map(lambda u, w: u * num_devices())),
    "gives slots to other leaves": _on_mesh(_swapped),
    "loses second moments": _on_mesh(_slots(lambda x: x * 0 if x.ndim > 1 else x)),
    "leaves the last row of a weight out": _on_mesh(
        _map(lambda u, w: u.at[-1].set(0) if u.ndim > 1 else u)
    ),
    "clips by a device's norm": after(f"{LEARNER}:global_norm", _scaled_norm),
    "clips by a norm of matrices alone": after(f"{LEARNER}:global_norm", _norm_of_whole_weights),
    "counts whole weights once per device": after(f"{LEARNER}:global_norm", _counted_per_device),
    "averages padded values": after(f"{LEARNER}:moving_average", _average_of_padded),
    "skips the step": replaced(f"{LEARNER}:BoundLearner.update", _skips),
}
DEFECTS += [
    Defect(f"the learner on a mesh {what}", tiny.Points, planted, (2, 2))
    for what, planted in ON_A_MESH.items()
]
