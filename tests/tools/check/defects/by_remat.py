"""Remat that draws, counts or updates otherwise than the same layers without it."""

import functools

import jax
import jax.numpy as jnp

from tests.tools.check import tiny
from tests.tools.check.defects.by_pipeline import Split
from tests.tools.check.defects.defect import Defect, replaced

SETTING, ATTRIBUTE = ("settings switched",), ("remat switched",)
MESH = (2, 2)
TINY = "tests.tools.check.tiny:"
LIBRARY = "praxis_lite.layers.stacking."


class Stages(Split):
    """Three layers on two stages, the backward pass in one part."""

    def task(self):
        task = super().task()
        task.model.stacked_transformer_tpl.split_backward = False
        return task


def _other_key(old):
    """Remat whose layers get another key."""
    return lambda layer: (
        lambda x, w, key: old(layer)(x, w, None if key is None else jax.random.fold_in(key, 1))
    )


def _other_key_again(old):
    """Remat whose backward pass computes with another key than the forward pass did."""

    def rematted(layer):
        @jax.custom_vjp
        def again(x, w, key):
            return layer(x, w, key)

        def backward(given, g):
            x, w, key = given
            return *jax.vjp(lambda x, w: layer(x, w, jax.random.fold_in(key, 1)), x, w)[1](g), None

        again.defvjp(lambda *given: (layer(*given), given), backward)
        return lambda x, w, key: layer(x, w, key) if key is None else again(x, w, key)

    return rematted


def _with_remat(change):
    """Returns a planter of `change(stack, x)` after the updates of a stack with remat."""

    def new(old):
        def updated(stack, x):
            old(stack, x)
            if stack.remat:
                change(stack, x)

        return updated

    return replaced(f"{TINY}updated", new)


def _count_twice(stack, x):
    stack.num_calls[...] += 1


def _mean_twice(stack, x):
    stack.mean[...] = 0.9 * stack.mean[...] + 0.1 * jnp.mean(jax.lax.stop_gradient(x), axis=0)


def _library_key(old):
    """The library's remat, with another key in what is computed again."""

    def remat(step, policy, layer, **settings):
        if policy == "save_everything":
            return old(step, policy, layer, **settings)

        def other(x, given):
            block, key, *rest = given
            key = None if key is None else jax.random.fold_in(key, 1)
            return step(x, (block, key, *rest))

        return old(other, policy, layer, **settings)

    return remat


def _ticks_key(old):
    """The same of a pipeline's layers."""

    def apply_in_microbatches(self, *args, key, **kwargs):
        if key is not None and self.checkpoint_policy != "save_everything":
            key = jax.random.fold_in(key, 1)
        return old(self, *args, key=key, **kwargs)

    return functools.wraps(old)(apply_in_microbatches)


DEFECTS = [
    *(
        Defect(f"remat of a stack, {where}: {what}", experiment, planted, MESH, parts)
        for where, experiment, parts in (
            ("in a row", tiny.RematOfOthers, SETTING),
            ("scanned", tiny.ScannedRematOfOthers, SETTING),
            ("a bare class", tiny.BareRematOfOthers, SETTING),
            ("an attribute", tiny.InnerRematOfOthers, ATTRIBUTE),
        )
        for what, planted in (
            ("another dropout key", replaced(f"{TINY}rematted", _other_key)),
            (
                "another dropout key in the backward pass",
                replaced(f"{TINY}rematted", _other_key_again),
            ),
            ("a statistic moved twice", _with_remat(_mean_twice)),
            ("a count advanced twice", _with_remat(_count_twice)),
        )
        if where in ("in a row", "an attribute") or what.startswith("another dropout key")
    ),
    Defect(
        "remat of Repeat: another dropout key",
        tiny.Lm,
        replaced(f"{LIBRARY}repeats:remat", _library_key),
        (1, 2, 2),
        ATTRIBUTE,
    ),
    Defect(
        "remat of StackedTransformer, off: another dropout key",
        tiny.RowOfLayers,
        replaced(f"{LIBRARY}repeats:remat", _library_key),
        (1, 2, 2),
        ATTRIBUTE,
    ),
    Defect(
        "remat of Pipeline: another dropout key",
        Stages,
        replaced(f"{LIBRARY}pipelines:Pipeline.apply_in_microbatches", _ticks_key),
        (2, 1, 1),
        ATTRIBUTE,
    ),
]
