"""A batch in parts: microbatches, and the rows of devices with explicit collectives."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp

from praxis_lite.core import GradientFunctions
from praxis_lite.core.partitioner import accumulation
from tests.tools.check import tiny
from tests.tools.check.defects.defect import Defect, after, replaced

MICRO = ("microbatches",)


def _broken(loss_fn, fixed, params, non_trainable, inputs, key, *, accumulation_steps, how):
    """Returns the result of `value_and_grad`, made part after part, and broken in one place."""
    grad_fn = jax.value_and_grad(loss_fn, argnums=1, has_aux=True)
    grads, weights, metrics = [], [], []
    num_rows = inputs["weights"].shape[0]
    for i in range(accumulation_steps):
        rows = slice(i, None, accumulation_steps)
        if how == "rows come twice":
            rows = slice(0, num_rows // accumulation_steps)
        if how == "the last row is lost":
            rows = slice(i, num_rows - accumulation_steps, accumulation_steps)
        part = jax.tree.map(lambda x, rows=rows: x[rows], dict(inputs))
        if how == "labels of another part":
            part["labels"] = inputs["labels"][(i + 1) % accumulation_steps :: accumulation_steps]
        given = key if how == "one key for all" else jax.random.fold_in(key, i)
        (_, (item, non_trainable)), g = grad_fn(fixed, params, non_trainable, part, given)
        grads.append(g)
        weights.append(item["loss"][1])
        metrics.append(item)
    if how == "a mean of means":
        weights = [jnp.ones(()) for _ in weights]
    if how == "the first part counts twice":
        weights[0] = 2 * weights[0]
    if how == "the last part alone":
        weights = [w * (i == len(weights) - 1) for i, w in enumerate(weights)]
    total = sum(weights)
    if how == "divided by the first part's weight":
        total = weights[0]
    if how == "divided by the number of parts":
        total = jnp.float32(len(weights))
    if how == "not divided":
        total = jnp.ones(())
    if how == "summed in bfloat16":
        grads = [jax.tree.map(lambda g: jnp.round(g * 256) / 256, g) for g in grads]

    def mean(name):
        values = [metric[name][0] for metric in metrics]
        local = [element[name][1] for element in metrics]
        if how == "metrics of the last part":
            return values[-1], sum(local)
        if how == "metrics without weights":
            return sum(values) / len(values), sum(local)
        if how == "the weight of a part":
            local = local[:1]
            return sum(v * w for v, w in zip(values, weights, strict=True)) / total, local[0]
        return sum(v * w for v, w in zip(values, local, strict=True)) / sum(local), sum(local)

    summed = jax.tree.map(
        lambda *g: sum(x * w for x, w in zip(g, weights, strict=True)) / total, *grads
    )
    return {name: mean(name) for name in metrics[0]}, non_trainable, summed


def _planted(how):
    def new(old):
        @functools.wraps(old)
        def value_and_grad(*args, accumulation_steps=1, **named):
            if accumulation_steps == 1:
                return old(*args, accumulation_steps=1, **named)
            return _broken(*args, accumulation_steps=accumulation_steps, how=how)

        return value_and_grad

    def planted():
        _, *others = GradientFunctions.__init__.__defaults__
        defaults = (new(accumulation.value_and_grad), *others)
        return mock.patch.object(GradientFunctions.__init__, "__defaults__", defaults)

    return planted


HOW = (
    "rows come twice",
    "the last row is lost",
    "labels of another part",
    "a mean of means",
    "the first part counts twice",
    "the last part alone",
    "divided by the first part's weight",
    "divided by the number of parts",
    "not divided",
    "summed in bfloat16",
    "metrics of the last part",
    "metrics without weights",
    "the weight of a part",
)
DEFECTS = [Defect(f"microbatches: {how}", tiny.Points, _planted(how), (2, 1), MICRO) for how in HOW]

BY_HAND = "praxis_lite.core.collectives.explicit_collectives"


def _first_device(x, axes):
    return jax.lax.psum(jnp.where(jax.lax.axis_index(axes) == 0, x, 0), axes)


def _sums(change):
    """Returns a planter of `change(sum, axes)` behind the sum of each whole weight's gradient."""
    return after(f"{BY_HAND}:summed", lambda total, g, weight, axes: change(total, g, axes))


def _means(change):
    def new(old):
        def weighted_means(metrics, axes):
            return {name: change(old, name, *pair, axes) for name, pair in metrics.items()}

        return weighted_means

    return replaced(f"{BY_HAND}:weighted_means", new)


def _right(old, value, weight, axes):
    return old({"x": (value, weight)}, axes)["x"]


SUMS = {
    "gradients are means": lambda total, g, axes: jax.lax.pmean(g, axes),
    "gradients are summed twice": lambda total, g, axes: total * jax.lax.axis_size(axes),
    "gradients of the first device": lambda total, g, axes: _first_device(g, axes),
    "gradients are maxima": lambda total, g, axes: jax.lax.pmax(g, axes),
    "gradients lack a device": lambda total, g, axes: total - _first_device(g, axes),
    "gradients of vectors are not summed": lambda total, g, axes: (
        _first_device(g, axes) if g.ndim == 1 else total
    ),
}
DEFECTS += [
    Defect(f"by hand: {what}", tiny.PointsByHand, _sums(change), (2, 1))
    for what, change in SUMS.items()
]
MEANS = {
    "a mean of devices' means": lambda old, name, v, w, axes: (
        jax.lax.pmean(v, axes),
        jax.lax.psum(w, axes),
    ),
    "the weight of a device": lambda old, name, v, w, axes: (
        _right(old, v, w, axes)[0],
        jax.lax.pmean(w, axes),
    ),
    "the first device's value": lambda old, name, v, w, axes: (
        _first_device(v, axes),
        jax.lax.psum(w, axes),
    ),
    "a sum of values": lambda old, name, v, w, axes: (jax.lax.psum(v, axes), jax.lax.psum(w, axes)),
    "a weight counted twice": lambda old, name, v, w, axes: (
        _right(old, v, w, axes)[0],
        2 * jax.lax.psum(w, axes),
    ),
    "the largest weight": lambda old, name, v, w, axes: (
        _right(old, v, w, axes)[0],
        jax.lax.pmax(w, axes),
    ),
    "accuracy of the first device": lambda old, name, v, w, axes: (
        (_first_device(v, axes), jax.lax.psum(w, axes))
        if "accuracy" in name
        else _right(old, v, w, axes)
    ),
}
DEFECTS += [
    Defect(f"by hand: metrics are {what}", tiny.PointsByHand, _means(change), (2, 1))
    for what, change in MEANS.items()
]


def _filler_counts(inputs, self, given, accumulation_steps):
    if inputs is given:
        return inputs
    return {**inputs, "weights": jnp.maximum(inputs["weights"], 0.5)}


def _folded(change):
    """Returns a planter of another key on each device."""

    def new(old):
        def on_each_device(function, inputs, *others, data_axes, **named):
            def changed(*args):
                *first, key = args
                return function(*first, change(key, data_axes))

            return old(changed, inputs, *others, data_axes=data_axes, **named)

        return on_each_device

    return replaced(f"{BY_HAND}:on_each_device", new)


def _gathered(change):
    def new(old):
        def gather_of(*args):
            gather = old(*args)
            return lambda block: change(gather(block), args[3])

        return gather_of

    return replaced("praxis_lite.core.collectives.mapped_weights:gather_of", new)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _times(x, factor):
    return x


_times.defvjp(lambda x, factor: (x, None), lambda factor, _, g: (g * factor,))

DEFECTS += [
    Defect(
        "by hand: filler rows have weight",
        tiny.PointsByHand,
        after(f"{BY_HAND}:_OnMesh._padded", _filler_counts),
        (5, 1),
    ),
    Defect(
        "by hand: keys depend on the device twice",
        tiny.PointsByHand,
        _folded(lambda key, axes: jax.random.fold_in(key, 1 + jax.lax.axis_index(axes))),
        (2, 1),
    ),
    Defect(
        "by hand: gathered weights have a gradient too large",
        tiny.PointsByHand,
        _gathered(lambda x, axes: _times(x, float(jax.lax.axis_size(tuple(axes))))),
        (2, 1),
        layer="first",
    ),
    Defect(
        "by hand: gathered weights have a mean's gradient",
        tiny.PointsByHand,
        _gathered(lambda x, axes: _times(x, 1.0 / jax.lax.axis_size(tuple(axes)))),
        (2, 1),
        layer="first",
    ),
    Defect(
        "by hand: gathered weights are in another order",
        tiny.PointsByHand,
        _gathered(lambda x, axes: jnp.flip(x, 0) if jax.lax.axis_size(tuple(axes)) > 1 else x),
        (2, 1),
    ),
    Defect(
        "by hand: gathered weights have no gradient",
        tiny.PointsByHand,
        _gathered(lambda x, axes: _times(x, 0.0)),
        (2, 1),
    ),
]
