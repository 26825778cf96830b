"""Sums of float32 made in bfloat16, and what is exact of a compiled step."""

import functools

import jax
import jax.numpy as jnp

from tests.tools.check import tiny
from tests.tools.check.defects.defect import Defect, after, replaced

OWN, PROGRAM = ("as trained",), ("resumed",)


def _rounded(x):
    return x.astype(jnp.bfloat16).astype(x.dtype)


@jax.custom_vjp
def _with_rounded_gradient(x):
    return x


_with_rounded_gradient.defvjp(lambda x: (x, None), lambda _, g: (_rounded(g),))

PLACES = {
    "embeddings": "praxis_lite.layers.embedding.softmaxes:lookup",
    "norms": "praxis_lite.layers.normalizations:_over_rms",
    "attention": "praxis_lite.layers.attention.kernels.choice:einsum_attention",
    "attention's softmax": "praxis_lite.layers.attention.kernels.einsum:_softmax",
    "feed-forward": "praxis_lite.layers.linears:FeedForward.__call__",
    "projections": "praxis_lite.layers.attention.projections:AttentionProjection.__call__",
    "logits": "praxis_lite.layers.embedding.softmaxes:FullSoftmax._projected",
}
DEFECTS = [
    Defect(
        f"{where} in bfloat16", tiny.Lm, after(target, lambda x, *_: _rounded(x)), (1, 1, 2), OWN
    )
    for where, target in PLACES.items()
] + [
    Defect(
        f"gradients of {where} in bfloat16",
        tiny.Lm,
        after(target, lambda x, *_: _with_rounded_gradient(x)),
        (1, 1, 2),
        OWN,
    )
    for where, target in PLACES.items()
]


def _with_callback(metrics, self, model, inputs, key):
    jax.debug.callback(lambda x: None, inputs["weights"])
    return metrics


def _not_donated(old):
    @functools.wraps(old)
    def jit(*args, **named):
        named.pop("donate_argnums", None)
        return old(*args, **named)

    return jit


LOSS = "tests.tools.check.tiny:PointsTask.compute_loss"
DEFECTS += [
    Defect("the step calls the host", tiny.Points, after(LOSS, _with_callback), (2, 2), PROGRAM),
    Defect(
        "the state is not donated", tiny.Points, replaced("jax:jit", _not_donated), (2, 2), PROGRAM
    ),
]
