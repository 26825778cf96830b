"""Masks shifted, lost, or of another segment; positions and caches that are a step off."""

import dataclasses
import functools

import jax.numpy as jnp

from tests.tools.check import tiny
from tests.tools.check.defects.defect import Defect, num_devices, replaced

MASK = "praxis_lite.layers.attention.masks:AttentionMask"


def _with(change, *axes):
    """Returns a planter of a change of the mask's fields, where these axes are split."""

    def new(old):
        def visible_at(self, q_index_BT, kv_index_BS):
            if axes and num_devices(*axes) == 1:
                return old(self, q_index_BT, kv_index_BS)
            fields, q_index_BT = change(self, q_index_BT)
            return old(dataclasses.replace(self, **fields), q_index_BT, kv_index_BS)

        return visible_at

    return replaced(f"{MASK}.visible_at", new)


def _half(mask, index_BT):
    return index_BT.shape[-1] // 2 or 1


CHANGES = {
    "sees the next token": lambda mask, index: ({"right_context": 1}, index),
    "does not see itself": lambda mask, index: ({}, index - 1),
    "is lost": lambda mask, index: ({"right_context": None}, index),
    "begins anew in the middle": lambda mask, index: ({}, index % max(_half(mask, index), 2)),
    "has a window of three": lambda mask, index: ({"left_context": 3}, index),
    "is that of a place further on": lambda mask, index: ({}, index + 1),
}
DEFECTS = [
    Defect(
        f"mask on a split {axis} {what}",
        tiny.Lm,
        _with(change, axis),
        (1, 2, 1) if axis == "data" else (1, 1, 2),
        axis=axis,
        layer="transformer",
    )
    for axis in ("data", "mdl")
    for what, change in CHANGES.items()
]
# The same on one device too: whole rows and single tokens then differ.
DEFECTS += [
    Defect(f"mask everywhere {what}", tiny.Lm, _with(CHANGES[what]), (1, 2, 2), ("token by token",))
    for what in ("sees the next token", "is lost", "is that of a place further on")
]


def _of_segments(change):
    def fields(mask, index):
        if mask.q_segments_BT is None:
            return {}, index
        return change(mask), index

    return _with(fields)


DEFECTS += [
    Defect(f"segments {what}", tiny.Lm, _of_segments(change), (1, 2, 2), ("packed segments",))
    for what, change in {
        "are lost": lambda m: {"q_segments_BT": None, "kv_segments_BS": None},
        "are one off": lambda m: {"kv_segments_BS": jnp.roll(m.kv_segments_BS, 1, axis=1)},
        "are those of another row": lambda m: {
            "q_segments_BT": jnp.flip(m.q_segments_BT, 1),
        },
        "see the one before": lambda m: {
            "q_segments_BT": jnp.ones_like(m.q_segments_BT),
            "kv_segments_BS": jnp.minimum(m.kv_segments_BS, 1),
        },
    }.items()
]


def _appended(change):
    def new(old):
        @functools.wraps(old)
        def append(cache, given, start_B, split=None):
            return change(functools.partial(old, split=split), cache, given, start_B)

        return append

    return replaced("praxis_lite.layers.attention.kv_cache:append", new)


CACHES = {
    "is never written": lambda old, cache, given, start: cache,
    "has stale keys": lambda old, cache, given, start: {
        **old(cache, given, start),
        "key": cache["key"],
    },
    "has stale values": lambda old, cache, given, start: {
        **old(cache, given, start),
        "value": cache["value"],
    },
    "is written a place further on": lambda old, cache, given, start: old(cache, given, start + 1),
    "is written at the first place": lambda old, cache, given, start: old(cache, given, start * 0),
    "has the row before": lambda old, cache, given, start: old(
        cache, {k: jnp.roll(x, 1, axis=0) for k, x in given.items()}, start
    ),
    "has keys for values": lambda old, cache, given, start: old(
        cache, {"key": given["value"], "value": given["key"]}, start
    ),
}
DEFECTS += [
    Defect(f"cache {what}", tiny.Lm, _appended(change), (1, 2, 2), ("token by token",))
    for what, change in CACHES.items()
]


def _on_mesh(change):
    def made(old, cache, given, start):
        if num_devices() == 1:
            return old(cache, given, start)
        return change(old, cache, given, start)

    return made


DEFECTS += [
    Defect(
        f"cache on a mesh {what}",
        tiny.Lm,
        _appended(_on_mesh(CACHES[what])),
        (1, 2, 2),
        ("decoding",),
    )
    for what in ("is never written", "is written a place further on", "has the row before")
]


def _positions(change):
    where = "praxis_lite.layers.embedding.positional_embeddings:RotaryPositionalEmbedding.__call__"

    def new(old):
        @functools.wraps(old)
        def call(self, inputs, *args, **named):
            named = {
                k: change(x) if k.startswith("position") and x is not None else x
                for k, x in named.items()
            }
            args = tuple(change(x) if x is not None else x for x in args)
            return old(self, inputs, *args, **named)

        return call

    return replaced(where, new)


DEFECTS += [
    Defect(
        "rotary positions on a mesh restart",
        tiny.Lm,
        _positions(lambda x: x % 4 if num_devices() > 1 else x),
        (1, 2, 2),
        ("decoding", "packed segments"),
    ),
    Defect(
        "rotary positions of tokens one by one are those of the first",
        tiny.Lm,
        _positions(lambda x: x * 0 if x.shape[-1] == 1 else x),
        (1, 2, 2),
        ("token by token",),
    ),
    Defect(
        "rotary positions of tokens one by one are one off",
        tiny.Lm,
        _positions(lambda x: x + (x > 2) if x.shape[-1] == 1 else x),
        (1, 2, 2),
        ("token by token",),
    ),
]
