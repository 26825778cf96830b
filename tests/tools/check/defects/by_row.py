"""A row's numbers that depend on its place, its neighbors or filler; sizes that are never cut."""

import jax.numpy as jnp
import optax

from tests.tools.check import tiny
from tests.tools.check.defects.defect import Defect, num_devices, replaced, with_gradient_times

TASK = "tests.tools.check.tiny:PointsTask"


def _loss(make, *, in_evaluation=True, in_training=True):
    """Returns a planter of `make(xent [B], weights [B], is_training)` -> (loss, xent to show)."""

    def new(_):
        def compute_loss(self, model, inputs, key):
            logits, weights = self.logits(model, inputs, key), inputs["weights"]
            xent = optax.softmax_cross_entropy_with_integer_labels(logits, inputs["labels"])
            loss, shown = _mean(xent, weights), xent
            if in_training if key is not None else in_evaluation:
                loss, shown = make(xent, weights)
            is_right = (jnp.argmax(logits, -1) == inputs["labels"]).astype(jnp.float32)
            return {"loss": loss, "accuracy": _mean(is_right, weights)}, {"xent": shown}

        return compute_loss

    return replaced(f"{TASK}.compute_loss", new)


def _mean(x, w):
    total = jnp.sum(w)
    return jnp.sum(x * w) / jnp.maximum(total, 1e-9), total


def _decode(make):
    """Returns a planter of `make(logits [B, 3], inputs)` -> an output for each row."""

    def new(_):
        def decode(self, model, inputs, key):
            return {"score": make(self.logits(model, inputs, None), inputs)}

        return decode

    return replaced(f"{TASK}.decode", new)


def _at(num_rows, change):
    """Returns a loss that is changed where a batch has as many rows."""

    def make(x, w):
        loss, shown = _mean(x, w), x
        return change(x, w, loss) if x.shape[0] == num_rows else (loss, shown)

    return make


def _place(x):
    return 1.0 + 0.1 * jnp.arange(x.shape[0])


# Of batches of 13 rows alone; those that are cut to 12 are right.
OF_13 = {
    "a tenth more": lambda x, w, loss: ((loss[0] * 1.1, loss[1]), x),
    "the weight of 12": lambda x, w, loss: ((loss[0], loss[1] * 12 / 13), x),
    "without the last row": lambda x, w, loss: (_mean(x[:12], w[:12]), x),
    "the first row for the last": lambda x, w, loss: (_mean(x.at[12].set(x[0]), w), x),
    "a gradient too large": lambda x, w, loss: ((with_gradient_times(loss[0], 1.1), loss[1]), x),
    "a mean of means of 7 and 6": lambda x, w, loss: (
        ((_mean(x[:7], w[:7])[0] + _mean(x[7:], w[7:])[0]) / 2, loss[1]),
        x,
    ),
    "more on a mesh": lambda x, w, loss: (
        (loss[0] * (1.1 if num_devices() > 1 else 1.0), loss[1]),
        x,
    ),
}
DEFECTS = [
    Defect(f"13 rows: {what}", tiny.Points13, _loss(_at(13, change)), (2, 2))
    for what, change in OF_13.items()
]
DEFECTS += [
    Defect(
        "13 rows: an evaluation a tenth more",
        tiny.Points13,
        _loss(_at(13, OF_13["a tenth more"]), in_training=False),
        (2, 2),
        ("evaluation",),
    ),
    Defect(
        "13 rows: outputs of an evaluation are in another order",
        tiny.Points13,
        _loss(_at(13, lambda x, w, loss: (loss, x[::-1])), in_training=False),
        (2, 2),
        ("evaluation",),
    ),
    Defect(
        "11 rows of a test: more on a mesh",
        tiny.Points13,
        _loss(_at(11, OF_13["more on a mesh"]), in_training=False),
        (2, 2),
        ("evaluation",),
    ),
    Defect(
        "11 rows of a test: a mean of means",
        tiny.Points13,
        _loss(_at(11, OF_13["a mean of means of 7 and 6"]), in_training=False),
        (2, 2),
        ("evaluation",),
    ),
]
# Of any number of rows.
PLACES = {
    "grows with the place": lambda x, w: (_mean(x * _place(x), w), x),
    "leaves the first row out": lambda x, w: (_mean(x[1:], w[1:]), x),
    "has the row before": lambda x, w: (_mean(jnp.roll(x, 1), w), x),
    "weighs the second half less": lambda x, w: (
        _mean(x, w * jnp.where(jnp.arange(x.shape[0]) < x.shape[0] // 2, 1.0, 0.5)),
        x,
    ),
}
DEFECTS += [
    Defect(
        f"a row's place: the loss of training {what}",
        tiny.Points,
        _loss(make, in_evaluation=False),
        (2, 2),
    )
    for what, make in PLACES.items()
]
DEFECTS += [
    Defect(
        f"a row's place: the loss of an evaluation {what}",
        tiny.Points,
        _loss(make, in_training=False),
        (2, 2),
        ("evaluation",),
    )
    for what, make in PLACES.items()
]
DEFECTS += [
    Defect(
        f"a row's place: outputs of an evaluation {what}",
        tiny.Points,
        _loss(lambda x, w, show=show: (_mean(x, w), show(x, w)), in_training=False),
        (2, 2),
        ("evaluation",),
    )
    for what, show in {
        "grow with it": lambda x, w: x * _place(x),
        "are of the row before": lambda x, w: jnp.roll(x, 1),
        "are less a batch's mean": lambda x, w: x - jnp.mean(x),
        "are less the first row's": lambda x, w: x - x[0],
        "are a rank": lambda x, w: jnp.argsort(jnp.argsort(x)).astype(jnp.float32),
    }.items()
]
DECODED = {
    "grow with its place": lambda z, i: z[:, 0] * _place(z),
    "are of the row before": lambda z, i: jnp.roll(z[:, 0], 1),
    "are less a batch's mean": lambda z, i: z[:, 0] - jnp.mean(z[:, 0]),
    "are a rank": lambda z, i: jnp.argsort(jnp.argsort(z[:, 0])),
    "are less a mean of true rows": lambda z, i: z[:, 0] - _mean(z[:, 0], i["weights"] != 0)[0],
}
DEFECTS += [
    Defect(
        f"a row's place: decoded outputs {what}",
        tiny.Points13,
        _decode(make),
        (2, 2),
        ("decoding",),
    )
    for what, make in DECODED.items()
]


def _of_filler(z, i):
    is_filler = (i["weights"] == 0).astype(z.dtype)
    return jnp.sum(z[:, 0] * is_filler), jnp.sum(is_filler)


# A check moves rows to other batches with equally many padding rows. Only comparisons with other
# padding rows reveal these defects.
DEFECTS += [
    Defect(
        f"padding rows: decoded outputs {what}",
        tiny.Points13,
        _decode(make),
        (2, 2),
        ("decoding",),
    )
    for what, make in {
        "include the padding": lambda z, i: z[:, 0] + _of_filler(z, i)[0],
        "add the number of rows": lambda z, i: z[:, 0] + z.shape[0],
        "include the last row if it is padding": lambda z, i: (
            z[:, 0] + jnp.where(i["weights"][-1] == 0, z[-1, 0], 0.0)
        ),
        "are divided by the rows": lambda z, i: z[:, 0] / z.shape[0],
    }.items()
]
DEFECTS += [
    Defect(
        f"padding rows: outputs of an evaluation {what}",
        tiny.Points,
        _loss(lambda x, w, show=show: (_mean(x, w), show(x, w)), in_training=False),
        (2, 2),
        ("evaluation", "padding rows"),
    )
    for what, show in {
        "include the padding": lambda x, w: x + jnp.sum(jnp.where(w == 0, x, 0.0)),
        "are divided by the rows": lambda x, w: x / x.shape[0],
        "are normalized including the padding": lambda x, w: x / jnp.max(x),
    }.items()
]
