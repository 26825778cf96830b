"""Losses and metrics that a user may write, wrong as soon as a batch has weights or parts."""

import jax.numpy as jnp
import optax

from tests.tools.check import tiny
from tests.tools.check.defects.defect import Defect, num_devices, replaced

PARTS = ("evaluation", "padding rows", "microbatches")


def _stats(self, model, inputs, key):
    logits = self.logits(model, inputs, key)
    xent = optax.softmax_cross_entropy_with_integer_labels(logits, inputs["labels"])
    is_right = (jnp.argmax(logits, -1) == inputs["labels"]).astype(jnp.float32)
    return logits, xent, is_right, inputs["weights"]


def _mean(x, w):
    total = jnp.sum(w)
    return jnp.sum(x * w) / jnp.maximum(total, 1e-9), total


def _plain_mean(x, w):
    return jnp.mean(x), jnp.float32(x.shape[0])


def _with(make):
    def new(_):
        def compute_loss(self, model, inputs, key):
            return make(*_stats(self, model, inputs, key), inputs, model)

        return compute_loss

    return replaced("tests.tools.check.tiny:PointsTask.compute_loss", new)


def _both(loss, accuracy):
    return {"loss": loss, "accuracy": accuracy}


def _of_halves(x, w):
    n = x.shape[0] // 2
    (a, s), (b, t) = _mean(x[:n], w[:n]), _mean(x[n:], w[n:])
    return (a + b) / 2, s + t


def _of_true_rows(x, w):
    is_true = (w != 0).astype(x.dtype)
    return jnp.sum(x * is_true) / jnp.maximum(jnp.sum(is_true), 1.0), jnp.sum(w)


def _centered(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(
        logits - jnp.mean(logits, axis=0)[None], labels
    )


# (logits, xent, is_right, weights, inputs, model) -> metrics.
LOSSES = {
    "a mean over rows, filler among them": lambda z, x, r, w, i, m: _both(
        _plain_mean(x, w), _mean(r, w)
    ),
    "a mean over rows, weighed by the weights": lambda z, x, r, w, i, m: _both(
        (jnp.mean(x), jnp.sum(w)), _mean(r, w)
    ),
    "a mean of true rows, weighed by the weights": lambda z, x, r, w, i, m: _both(
        _of_true_rows(x, w), _mean(r, w)
    ),
    "a weight of one": lambda z, x, r, w, i, m: _both(
        (_mean(x, w)[0], jnp.float32(1)), _mean(r, w)
    ),
    "a weight of rows": lambda z, x, r, w, i, m: _both(
        (_mean(x, w)[0], jnp.float32(x.shape[0])), _mean(r, w)
    ),
    "a weight per device": lambda z, x, r, w, i, m: _both(
        (_mean(x, w)[0], jnp.sum(w) / num_devices()), _mean(r, w)
    ),
    "a mean of means": lambda z, x, r, w, i, m: _both(_of_halves(x, w), _mean(r, w)),
    "a sum with a mean's weight": lambda z, x, r, w, i, m: _both(
        (jnp.sum(x * w), jnp.sum(w)), _mean(r, w)
    ),
    "divided by the devices": lambda z, x, r, w, i, m: _both(
        (_mean(x, w)[0] / num_devices(), jnp.sum(w)), _mean(r, w)
    ),
    "divided by the rows": lambda z, x, r, w, i, m: _both(
        (jnp.sum(x * w) / x.shape[0], jnp.sum(w)), _mean(r, w)
    ),
    "the largest of the rows": lambda z, x, r, w, i, m: _both(
        (jnp.max(x * (w != 0)), jnp.sum(w)), _mean(r, w)
    ),
    "a root of a mean": lambda z, x, r, w, i, m: _both(
        (jnp.sqrt(_mean(x * x, w)[0]), jnp.sum(w)), _mean(r, w)
    ),
    "weights squared": lambda z, x, r, w, i, m: _both(
        (_mean(x, w * w)[0], jnp.sum(w)), _mean(r, w)
    ),
    "logits centered over the batch": lambda z, x, r, w, i, m: _both(
        _mean(_centered(z, i["labels"]), w), _mean(r, w)
    ),
    "logits normed over the batch": lambda z, x, r, w, i, m: _both(
        _mean(
            optax.softmax_cross_entropy_with_integer_labels(
                z / jnp.sqrt(jnp.mean(z * z, axis=0) + 1e-3)[None], i["labels"]
            ),
            w,
        ),
        _mean(r, w),
    ),
    "the weight of the row before": lambda z, x, r, w, i, m: _both(
        _mean(x, jnp.roll(w, 1)), _mean(r, w)
    ),
    "accuracy without weights": lambda z, x, r, w, i, m: _both(
        _mean(x, w), (jnp.mean(r), jnp.sum(w))
    ),
    "accuracy of the first rows": lambda z, x, r, w, i, m: _both(
        _mean(x, w), (_mean(r[:4], w[:4])[0], jnp.sum(w))
    ),
    "accuracy that counts filler as right": lambda z, x, r, w, i, m: _both(
        _mean(x, w), (jnp.mean(jnp.where(w == 0, 1.0, r)), jnp.sum(w))
    ),
    "perplexity as a mean": lambda z, x, r, w, i, m: {
        **_both(_mean(x, w), _mean(r, w)),
        "perplexity": (jnp.exp(_mean(x, w)[0]), jnp.sum(w)),
    },
    "a penalty on the logits of all rows": lambda z, x, r, w, i, m: _both(
        (_mean(x, w)[0] + 1e-2 * jnp.mean(z * z), jnp.sum(w)), _mean(r, w)
    ),
    "a penalty per device": lambda z, x, r, w, i, m: _both(
        (_mean(x, w)[0] + 1e-2 * num_devices("data") * jnp.sum(m["last"]["w"] ** 2), jnp.sum(w)),
        _mean(r, w),
    ),
}
DEFECTS = [
    Defect(f"loss: {what}", tiny.Points, _with(make), (2, 2), PARTS)
    for what, make in LOSSES.items()
]
