"""Experts: their balance per device, tokens that are lost on the way, gradients summed twice."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.inputs import InMemory
from tests.tools.check import tiny
from tests.tools.check.defects.defect import (
    Defect,
    after,
    first_part,
    num_devices,
    with_gradient_times,
)

ROUTING, DISPATCH = "praxis_lite.layers.moe.routing", "praxis_lite.layers.moe.dispatch"


def _n():
    return num_devices("data", "expert")


def _if_split(change):
    return lambda x, *args: change(x, *args) if _n() > 1 else x


def _chosen(change):
    """Returns a function that changes (experts, gates, is_routed)."""
    return lambda actual, *_: change(*actual) if _n() > 1 else actual


CHANGES = {
    "balance of a device": (
        f"{ROUTING}:load_balance_loss",
        _if_split(lambda x, p, f, t, r: jnp.sum(jnp.mean(p[: p.shape[0] // 2 + 1], (0, 1)) ** 2)),
    ),
    "balance counted per device": (f"{ROUTING}:load_balance_loss", lambda x, *_: x * _n()),
    "balance without a gradient": (
        f"{ROUTING}:load_balance_loss",
        _if_split(lambda x, *_: jax.lax.stop_gradient(x)),
    ),
    "balance including padding rows": (
        f"{ROUTING}:load_balance_loss",
        _if_split(lambda x, p, f, t, r: x * 0.9),
    ),
    "z-loss of a device": (
        f"{ROUTING}:router_z_loss",
        _if_split(lambda x, z, t: jnp.mean(jax.nn.logsumexp(z[: z.shape[0] // 2 + 1], -1) ** 2)),
    ),
    "z-loss counted per device": (f"{ROUTING}:router_z_loss", lambda x, *_: x * _n()),
    "gates that do not add up": (
        f"{ROUTING}:choose_experts",
        _chosen(lambda e, g, r: (e, g * 0.5, r)),
    ),
    "gates exchanged": (
        f"{ROUTING}:choose_experts",
        _chosen(lambda e, g, r: (e, jnp.flip(g, -1), r)),
    ),
    "the second expert is lost": (
        f"{ROUTING}:choose_experts",
        _chosen(lambda e, g, r: (e, g, r.at[..., 1:].set(False))),
    ),
    "experts numbered from another device": (
        f"{ROUTING}:choose_experts",
        _chosen(lambda e, g, r: ((e + 1) % 3, g, r)),
    ),
    "tokens of the last expert are lost": (
        f"{ROUTING}:choose_experts",
        _chosen(lambda e, g, r: (e, g, r & (e < 2))),
    ),
    "slots counted per device": (
        f"{DISPATCH}:slots_of",
        _if_split(lambda x, e, r, n, c: jnp.where(x % c < max(c // 2, 1), x, n * c)),
    ),
    "tokens of the other devices are not sent": (
        f"{DISPATCH}:dispatch",
        lambda x, *_: first_part(x, _n(), 0) if _n() > 1 else x,
    ),
    "outputs are not sent back": (
        f"{DISPATCH}:combine",
        lambda x, *_: first_part(x, _n(), 0) if _n() > 1 else x,
    ),
    "outputs go to other tokens": (
        f"{DISPATCH}:combine",
        _if_split(lambda x, *_: jnp.roll(x, 1, 1)),
    ),
    "gradients of tokens summed twice": (
        f"{DISPATCH}:dispatch",
        lambda x, *_: with_gradient_times(x, float(_n())),
    ),
    "gradients of outputs summed twice": (
        f"{DISPATCH}:combine",
        lambda x, *_: with_gradient_times(x, float(_n())),
    ),
}
DEFECTS = [
    Defect(f"experts: {what}", tiny.Experts, after(target, change), (2, 2, 1))
    for what, (target, change) in CHANGES.items()
]

# Of the balance without a loss.
BALANCED = {
    "the bias is moved once per device": (
        f"{ROUTING}:BiasUpdate.__call__",
        lambda x, _, old, n: old + _n() * (x - old),
    ),
    "loads of a device": (
        f"{ROUTING}:expert_choices",
        _if_split(
            lambda x, e, r, n: jnp.sum(
                (jax.nn.one_hot(e, n) * r[..., None])[: e.shape[0] // _n()], (0, 1, 2)
            )
        ),
    ),
}
DEFECTS += [
    Defect(f"experts: {what}", tiny.BalancedExperts, after(target, change), (2, 2, 1))
    for what, (target, change) in BALANCED.items()
]


class Padded(tiny.BalancedExperts):
    """The same, the last three tokens of each row are padding."""

    def datasets(self):
        return {"train": fdl.Config(InMemory, padded, batch_size=tiny.ROWS, shuffle=True)}


def padded():
    rows = tiny.texts()
    is_token = np.arange(tiny.LENGTH) < tiny.LENGTH - 3
    segment_ids = np.broadcast_to(is_token, rows["ids"].shape).astype(np.int32)
    positions = np.arange(tiny.LENGTH, dtype=np.int32) * segment_ids
    return rows | {"segment_ids": segment_ids, "segment_pos": positions}


DEFECTS.append(
    Defect(
        "experts: loads of padding too",
        Padded,
        after(
            f"{ROUTING}:expert_choices",
            _if_split(lambda x, e, r, n: jnp.sum(jax.nn.one_hot(e, n), (0, 1, 2))),
        ),
        (2, 2, 1),
    )
)
