"""Padding that leaks, or is not zeros; filler rows of a batch; draws at padded shapes."""

import functools
import re

import jax
import jax.numpy as jnp

from tests.tools.check import tiny
from tests.tools.check.defects.defect import Defect, after, num_devices, replaced

LEAVES = {
    "the vocabulary": r"params/softmax/",
    "attention heads": r"params/.*self_attention/(query|key|value|post)",
    "hidden dims": r"params/.*ff_layer/",
    "first moments": r"opt_states/slots/.*mu/.*softmax",
    "second moments": r"opt_states/slots/.*nu/.*softmax",
    "averages": r"opt_states/ema/softmax",
}


def _where_padded(pattern, change, true, padded):
    """Returns `true` with `change(true, padded, where the padding is)` of the padded leaves meant.

    `pattern` is of their paths.
    """

    def one(path, x, filled):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if x.shape == filled.shape or not re.search(pattern, name):
            return x
        inside = jnp.zeros(filled.shape, bool).at[tuple(map(slice, x.shape))].set(True)
        return change(x, filled, ~inside)

    return jax.tree_util.tree_map_with_path(one, true, padded)


def _leaks(pattern):
    """Returns a planter of a defect: the first place of a leaf has the padding added."""

    def add(x, padded, is_padding):
        return x.at[(0,) * x.ndim].add(jnp.sum(jnp.where(is_padding, padded, 0.0)))

    return after(
        "praxis_lite.core.partitioner.train_state:unpad_tree",
        lambda cut, padded, *_: _where_padded(pattern, add, cut, padded),
    )


def _padded_with_ones(pattern):
    def pad_tree(padded, tree, *_):
        ones = _where_padded(
            pattern, lambda x, filled, is_padding: jnp.where(is_padding, 1.0, filled), tree, padded
        )
        return jax.tree.map(lambda x, y: x if x.shape == y.shape else y, ones, padded)

    return after("praxis_lite.core.partitioner.train_state:pad_tree", pad_tree)


DEFECTS = [
    Defect(f"padding of {what} leaks", tiny.Lm, _leaks(pattern), (1, 2, 2))
    for what, pattern in LEAVES.items()
] + [
    Defect(f"padding of {what} is ones", tiny.Lm, _padded_with_ones(pattern), (1, 2, 2))
    for what, pattern in LEAVES.items()
]


def _all_rows(batch, axis_names):
    return batch.inputs


def _first_rows_again(inputs, batch, *_):
    if num_devices() == 1:
        return inputs
    return jax.tree.map(lambda x: x.at[-1].set(x[0]) if x.ndim else x, inputs)


def _weights_of_filler(inputs, batch, *_):
    if num_devices() == 1:
        return inputs
    return {**inputs, "weights": jnp.maximum(inputs["weights"], 1e-3)}


ROWS = "praxis_lite.core.partitioner.task_on_mesh:drop_padding_rows"
DEFECTS += [
    Defect(
        "rows of padding enter the batch", tiny.Points, replaced(ROWS, lambda _: _all_rows), (5, 1)
    ),
    Defect(
        "rows are one off where there is padding",
        tiny.Points,
        after(
            ROWS,
            lambda x, batch, axes: (
                {**x, "labels": jnp.roll(x["labels"], 1)} if -batch.num_rows % num_devices() else x
            ),
        ),
        (5, 1),
    ),
    Defect("the last row is the first again", tiny.Points, after(ROWS, _first_rows_again), (2, 1)),
    Defect(
        "rows without weight get a little", tiny.Points, after(ROWS, _weights_of_filler), (2, 1)
    ),
    Defect(
        "inputs and labels are of different rows on a mesh",
        tiny.Points,
        after(
            ROWS,
            lambda x, *_: {**x, "inputs": jnp.flip(x["inputs"], 0)} if num_devices() > 1 else x,
        ),
        (2, 1),
    ),
]

INIT = "praxis_lite.core.partitioner.steps:init_state"


def _drawn_anew(change):
    def made(state, *_):
        if num_devices() == 1:
            return state
        params = jax.tree.map(change, state.mdl_vars["params"])
        return type(state)(state.step, {**state.mdl_vars, "params": params}, state.opt_states)

    return after(INIT, made)


def _key_of_the_mesh(old):
    @functools.wraps(old)
    def init_state(task, key, bound_learner=None):
        return old(task, jax.random.fold_in(key, num_devices()), bound_learner)

    return init_state


def _at_padded_shapes(x):
    key, shape = jax.random.key(0), tuple(-(-dim // 2) * 2 for dim in x.shape)
    drawn = jax.random.normal(key, shape)[tuple(map(slice, x.shape))]
    return drawn.astype(x.dtype) if x.ndim == 2 else x


DEFECTS += [
    Defect(f"initial weights {what}", tiny.Points, planted, (2, 2), ("initial weights",))
    for what, planted in {
        "are of a key that depends on the mesh": replaced(INIT, _key_of_the_mesh),
        "are drawn at padded shapes": _drawn_anew(_at_padded_shapes),
        "differ in a last bit": _drawn_anew(
            lambda x: x * (1 + 2.0**-23) if jnp.issubdtype(x.dtype, jnp.floating) else x
        ),
        "are rounded to bfloat16": _drawn_anew(lambda x: x.astype(jnp.bfloat16).astype(x.dtype)),
    }.items()
]
