"""Defects that were reported of other frameworks, as they would be here.

Sources: NVIDIA/Megatron-LM issue 7452 and its findings; MaxText pull request 4525 (a loss that is
read as 0); torchtitan issues 3280 and 3329 (a loss that is not summed where two axes split it);
pytorch issue 88621 (a norm of a device's part); Megatron-LM issues 673 and 906 (a loss scaled by
the wrong group); trl pull request 6843 (documents of a row see each other where it is split).
"""

import dataclasses

import jax
import jax.numpy as jnp

from tests.tools.check import tiny
from tests.tools.check.defects.defect import (
    Defect,
    after,
    first_part,
    num_devices,
    replaced,
    with_gradient_times,
)

STATS = "praxis_lite.layers.embedding.softmaxes:stats_of_logits"
LOSS = "praxis_lite.tasks.language_model:_outputs_of"


def _stats(change):
    return after(STATS, lambda stats, *_: stats._replace(**change(stats)))


def _mdl():
    return num_devices("mdl")


def _loss(change):
    return after(LOSS, lambda outputs, *_: {**outputs, **change(outputs)})


def _scaled(*axes):
    def change(outputs):
        return {"total_loss": outputs["total_loss"] / num_devices(*axes)}

    return _loss(change)


CASES = {
    # Megatron-LM 7452, finding 1: smoothing sums the logits of a device's classes.
    "label logits of a device's classes alone": _stats(
        lambda s: {"label_logit": s.label_logit / _mdl()}
    ),
    # Finding 2: classes that are gathered are counted once per device.
    "log Z of logits that are gathered": _stats(
        lambda s: {"log_z": s.log_z + jnp.log(1.0 * _mdl())}
    ),
    "log Z of a device's classes": _stats(lambda s: {"log_z": s.log_z - jnp.log(1.0 * _mdl())}),
    "accuracy by a device's classes": _stats(lambda s: {"argmax": s.argmax // _mdl()}),
    # torchtitan 3280, 3329.
    "a loss shown that is not summed over two axes": _scaled("data", "mdl"),
    # Megatron-LM 673, 906.
    "a loss scaled by the group of one axis": _scaled("data"),
    "tokens counted per device": _loss(
        lambda o: {"total_weight": o["total_weight"] / num_devices("data")}
    ),
    "tokens counted on every device": _loss(
        lambda o: {"total_weight": o["total_weight"] * num_devices("mdl")}
    ),
    # Megatron-LM 7452, finding 3: a loss weighed by a device's share of tokens.
    "cross-entropy biased by a device's tokens": _loss(
        lambda o: {"avg_xent": o["avg_xent"] * (1 + 0.01 * (num_devices() - 1))}
    ),
}
DEFECTS = [
    Defect(f"tracker: {what}", tiny.Lm, planted, (1, 2, 2)) for what, planted in CASES.items()
]


def _aux_lost(old):
    # MaxText 4525: what a layer left for the loss is gone when it is read.
    return lambda model: jnp.zeros(()) if num_devices() > 1 else old(model)


def _without_segments(old):
    def visible_at(self, q_index_BT, kv_index_BS):
        if num_devices("mdl") > 1:
            self = dataclasses.replace(self, q_segments_BT=None, kv_segments_BS=None)
        return old(self, q_index_BT, kv_index_BS)

    return visible_at


def _of_first_rows(old):
    def call(self, x, key):
        dropped = old(self, x, key)
        if num_devices("data") == 1:
            return dropped
        row = jnp.arange(x.shape[0]).reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(row < x.shape[0] // 2, dropped, x)

    return call


def _recomputed(old):
    # Megatron-LM 7452, finding 4: what is computed again mixes another device's data in.
    def remat(step, policy, **settings):
        if policy == "save_everything":
            return old(step, policy, **settings)

        def mixed(x, layer):
            x, rest = step(x, layer)
            return x + 1e-3 * jnp.roll(x, 1, axis=0), rest

        return old(mixed, policy, **settings)

    return remat


DEFECTS += [
    Defect(
        "tracker: an auxiliary loss that is read as 0",
        tiny.Experts,
        replaced("praxis_lite.layers.transformer.model_parts:aux_loss", _aux_lost),
        (2, 2, 1),
    ),
    Defect(
        "tracker: layers computed again see other rows",
        tiny.Lm,
        replaced("praxis_lite.layers.stacking.repeats:remat", _recomputed),
        (1, 2, 2),
        ("remat switched",),
    ),
    Defect(
        "tracker: a mask lost where the sequence is split",
        tiny.Lm,
        after(
            "praxis_lite.layers.attention.kernels.choice:einsum_attention",
            lambda x, q, k, v, *_: (
                jnp.broadcast_to(jnp.mean(v, 1, keepdims=True), x.shape)
                if _mdl() > 1 and v.shape == x.shape
                else x
            ),
        ),
        (1, 1, 2),
        axis="mdl",
    ),
    Defect(
        "tracker: documents see each other where the sequence is split",
        tiny.Lm,
        replaced("praxis_lite.layers.attention.masks:AttentionMask.visible_at", _without_segments),
        (1, 1, 2),
        ("packed segments",),
    ),
    Defect(
        "tracker: an all-gather whose gradient every device keeps",
        tiny.Lm,
        after(
            "praxis_lite.layers.embedding.softmaxes:lookup",
            lambda x, *_: with_gradient_times(x, float(num_devices())),
        ),
        (1, 2, 2),
    ),
    Defect(
        "tracker: a partial result read as the whole",
        tiny.Lm,
        after(
            "praxis_lite.layers.embedding.softmaxes:FullSoftmax._projected",
            lambda x, *_: first_part(x, _mdl()) if _mdl() > 1 else x,
        ),
        (1, 1, 2),
        axis="mdl",
    ),
    Defect(
        "tracker: dropout that every device draws anew",
        tiny.Lm,
        replaced(
            "praxis_lite.layers.stochastics:Dropout.__call__",
            lambda old: (
                lambda self, x, key: old(
                    self, x, key if key is None else jax.random.fold_in(key, num_devices() - 1)
                )
            ),
        ),
        (1, 2, 2),
    ),
    Defect(
        "tracker: dropout of the first device's rows alone",
        tiny.Lm,
        replaced("praxis_lite.layers.stochastics:Dropout.__call__", _of_first_rows),
        (1, 2, 1),
        axis="data",
    ),
    Defect(
        "tracker: one dropout mask for all layers of a scan",
        tiny.Lm,
        replaced(
            "praxis_lite.layers.stochastics:Dropout.__call__",
            lambda old: (
                lambda self, x, key: old(
                    self, x, key if key is None or num_devices() == 1 else jax.random.key(0)
                )
            ),
        ),
        (1, 2, 2),
    ),
]
