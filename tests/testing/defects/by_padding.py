"""Padding that leaks, or is not zeros; filler rows of a batch; draws at padded shapes."""

import functools
import re

import jax
import jax.numpy as jnp

from tests.testing import tiny
from tests.testing.defects.defect import Defect, after, num_devices, replaced

LEAVES = {
    "the vocabulary": r"params/softmax/",
    "attention heads": r"params/.*self_attention/(query|key|value|post)",
    "hidden dims": r"params/.*ff_layer/",
    "norms": r"params/.*(ln|norm|layer_norm).*scale",
    "first moments": r"opt_states/slots/.*mu/.*softmax",
    "second moments": r"opt_states/slots/.*nu/.*softmax",
    "averages": r"opt_states/ema/softmax",
}


def _path(path):
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _leaks(pattern):
    """Returns what plants that of a leaf the first place has the padding added."""
    def new(old):
        @functools.wraps(old)
        def unpad_tree(tree, shapes, specs):
            cut = old(tree, shapes, specs)

            def one(path, x, padded):
                if x.shape == padded.shape or not re.search(pattern, _path(path)):
                    return x
                inside = jnp.zeros(padded.shape, bool).at[tuple(map(slice, x.shape))].set(True)
                leaked = jnp.sum(jnp.where(inside, 0.0, padded))
                return x.at[(0,) * x.ndim].add(leaked)

            return jax.tree_util.tree_map_with_path(one, cut, tree)

        return unpad_tree

    return replaced("praxis_lite.partitioner.train_state:unpad_tree", new)


def _padded_with_ones(pattern):
    def new(old):
        @functools.wraps(old)
        def pad_tree(tree, specs, axis_sizes):
            padded = old(tree, specs, axis_sizes)

            def one(path, x, true):
                if x.shape == true.shape or not re.search(pattern, _path(path)):
                    return x
                inside = jnp.zeros(x.shape, bool).at[tuple(map(slice, true.shape))].set(True)
                return jnp.where(inside, x, 1.0)

            return jax.tree_util.tree_map_with_path(one, padded, tree)

        return pad_tree

    return replaced("praxis_lite.partitioner.train_state:pad_tree", new)


DEFECTS = [
    Defect(f"padding of {what} leaks", tiny.Lm, _leaks(pattern), (1, 2, 2))
    for what, pattern in LEAVES.items() if what != "norms"
] + [
    Defect(f"padding of {what} is ones", tiny.Lm, _padded_with_ones(pattern), (1, 2, 2))
    for what, pattern in LEAVES.items() if what != "norms"
]


def _all_rows(batch, axis_names):
    return batch.inputs


def _rows_of_first_device(inputs, batch, *_):
    missing = -batch.num_rows % num_devices()
    if not missing:
        return inputs
    return jax.tree.map(lambda x: jnp.roll(x, 1, axis=0) if x.ndim else x, inputs)


def _first_rows_again(inputs, batch, *_):
    if num_devices() == 1:
        return inputs
    return jax.tree.map(lambda x: x.at[-1].set(x[0]) if x.ndim else x, inputs)


def _weights_of_filler(inputs, batch, *_):
    if num_devices() == 1:
        return inputs
    return {**inputs, "weights": jnp.maximum(inputs["weights"], 1e-3)}


ROWS = "praxis_lite.partitioner.partitioner:true_rows"
DEFECTS += [
    Defect("rows of padding enter the batch", tiny.Points, replaced(ROWS, lambda _: _all_rows),
           (5, 1)),
    Defect("rows are one off where there is padding", tiny.Points,
           after(ROWS, lambda x, batch, axes: {**x, "labels": jnp.roll(x["labels"], 1)}
                 if -batch.num_rows % num_devices() else x), (5, 1)),
    Defect("the last row is the first again", tiny.Points, after(ROWS, _first_rows_again), (2, 1)),
    Defect(
        "rows without weight get a little", tiny.Points, after(ROWS, _weights_of_filler), (2, 1)
    ),
    Defect("inputs and labels are of different rows on a mesh", tiny.Points, after(
        ROWS, lambda x, *_: {**x, "inputs": jnp.flip(x["inputs"], 0)} if num_devices() > 1 else x
    ), (2, 1)),
]

INIT = "praxis_lite.partitioner.steps:init_state"


def _drawn_anew(change):
    def made(state, *_):
        if num_devices() == 1:
            return state
        params = jax.tree.map(change, state.mdl_vars["params"])
        return type(state)(state.step, {**state.mdl_vars, "params": params}, state.opt_states)

    return after(INIT, made)


def _key_of_the_mesh(old):
    @functools.wraps(old)
    def init_state(task, key, groups=None):
        return old(task, jax.random.fold_in(key, num_devices()), groups)

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
            lambda x: x * (1 + 2.0**-23) if jnp.issubdtype(x.dtype, jnp.floating) else x),
        "are rounded to bfloat16": _drawn_anew(lambda x: x.astype(jnp.bfloat16).astype(x.dtype)),
    }.items()
]
