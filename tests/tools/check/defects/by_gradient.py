"""Sums between devices that a layer's compiled program lacks or makes twice, by layer and axis."""

import jax.numpy as jnp

from tests.tools.check import tiny
from tests.tools.check.defects.defect import (
    Defect,
    after,
    first_part,
    num_devices,
    with_gradient_times,
)

# What returns an array of features, by the layer that it is of.
OUTPUTS = {
    "embedding": "praxis_lite.layers.embedding.softmaxes:lookup",
    "norms": "praxis_lite.layers.normalizations:_over_rms",
    "attention": "praxis_lite.layers.attention.kernels.choice:einsum_attention",
    "feed-forward": "praxis_lite.layers.linears:FeedForward.__call__",
    "projection": "praxis_lite.layers.attention.projections:AttentionProjection.__call__",
    "softmax": "praxis_lite.layers.embedding.softmaxes:FullSoftmax._projected",
}
CHANGES = {
    "gradient summed twice over": lambda x, n: with_gradient_times(x, float(n)),
    "gradient not summed over": lambda x, n: with_gradient_times(x, 1.0 / n),
    "partial sums not added over": lambda x, n: first_part(x, n) if n > 1 else x,
    "outputs added twice over": lambda x, n: x * n,
}


def _planted(target, change, axis):
    return after(target, lambda x, *args: change(x, num_devices(axis)))


DEFECTS = [
    Defect(
        f"{layer}: {what} {axis}",
        tiny.Lm,
        _planted(target, change, axis),
        (1, 2, 1) if axis == "data" else (1, 1, 2),
        axis=axis,
    )
    for layer, target in OUTPUTS.items()
    for what, change in CHANGES.items()
    for axis in ("data", "mdl")
]


def _dropped_rows(x, *args):
    parts = num_devices("data")
    return first_part(x, parts, 0) if parts > 1 else x


def _other_rows(x, *args):
    return jnp.roll(x, 1, axis=0) if num_devices("data") > 1 else x


DEFECTS += [
    Defect(f"{layer}: {what}", tiny.Lm, after(target, change), (1, 2, 1), axis="data")
    for layer, target in (("embedding", OUTPUTS["embedding"]), ("attention", OUTPUTS["attention"]))
    for what, change in (
        ("rows of the other devices lost", _dropped_rows),
        ("another device's rows", _other_rows),
    )
]
