"""The layout of a state: made without arrays, true to its bytes, wrong splits named."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from praxis_lite import ConfigError, Task
from praxis_lite.core import Learner, SplitDims
from praxis_lite.core.partitioner.train_state import layout_and_learner
from praxis_lite.layers import BaseLayer
from praxis_lite.layers.base.base_layer import zeros
from praxis_lite.layers.base.variables import stacked

P = PartitionSpec
AXIS_SIZES = {"replica": 1, "data": 4, "mdl": 2}


class Tower(BaseLayer):
    """A matrix, and a stack of vectors with a count that is not trained."""

    def __init__(self, rows: int, columns: int, split: SplitDims, *, rngs: nnx.Rngs):
        self.w = self.weight((rows, columns), split, rngs=rngs)
        self.blocks = stacked(
            jax.vmap(lambda key: Block(columns, rngs=nnx.Rngs(key)))(jax.random.split(rngs(), 3)),
            None,
        )


class Block(BaseLayer):
    def __init__(self, dims: int, *, rngs: nnx.Rngs):
        self.b = self.weight((dims,), ("mdl",), init=zeros, rngs=rngs)
        self.seen = nnx.BatchStat(jnp.zeros((dims,)))


class Untrained(Task):
    def compute_loss(self, model, inputs, key):
        raise NotImplementedError


def layout_of(rows, columns, split=("data", "mdl"), optimizer=optax.adamw):
    model = functools.partial(Tower, rows, columns, split)
    return layout_and_learner(Untrained(model, Learner(optimizer, 0.1)), AXIS_SIZES)[0]


def test_a_layout_of_what_no_machine_holds_is_made_without_an_array():
    before = len(jax.live_arrays())
    rows, columns = 10**7, 10**6 + 1
    layout = layout_of(rows, columns)
    leaves = {leaf.path: leaf for leaf in layout.leaves()}
    assert len(jax.live_arrays()) == before
    w = leaves["mdl_vars/params/w"]
    assert w.padded_shape == (rows, columns + 1)
    assert w.bytes_per_device == 4 * rows * (columns + 1) // 8  # 5 TB
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(layout.shapes))


def test_every_leaf_has_its_place_shape_spec_and_bytes():
    layout = layout_of(7, 5)
    leaves = {leaf.path: leaf for leaf in layout.leaves()}
    expected = {
        "step": ((), (), P(), 4),
        "mdl_vars/params/w": ((7, 5), (8, 6), P("data", "mdl"), 4 * 2 * 3),
        "mdl_vars/params/blocks/b": ((3, 5), (3, 6), P(None, "mdl"), 4 * 3 * 3),
        "mdl_vars/non_trainable/blocks/seen": ((3, 5), (3, 5), P(None, None), 4 * 3 * 5),
        "opt_states/num_skipped_in_a_row": ((), (), P(), 4),
        "opt_states/num_updates": ((), (), P(), 4),
        "opt_states/num_skipped_steps": ((), (), P(), 4),
        "opt_states/slots/unstacked/0/count": ((), (), P(), 4),
        "opt_states/slots/unstacked/0/mu/w": ((7, 5), (8, 6), P("data", "mdl"), 4 * 2 * 3),
        "opt_states/slots/unstacked/0/nu/w": ((7, 5), (8, 6), P("data", "mdl"), 4 * 2 * 3),
        # A stack is updated one layer at a time: each layer has a count.
        "opt_states/slots/stack_3/0/count": ((3,), (3,), P(None), 4 * 3),
        "opt_states/slots/stack_3/0/mu/blocks/b": ((3, 5), (3, 6), P(None, "mdl"), 4 * 3 * 3),
        "opt_states/slots/stack_3/0/nu/blocks/b": ((3, 5), (3, 6), P(None, "mdl"), 4 * 3 * 3),
    }
    actual = {
        path: (leaf.shape, leaf.padded_shape, leaf.spec, leaf.bytes_per_device)
        for path, leaf in leaves.items()
    }
    assert actual == expected
    assert leaves["mdl_vars/params/w"].padding_share == pytest.approx(1 - 35 / 48)
    assert leaves["step"].padding_share == 0.0


def test_padded_shapes_abstract_and_select_agree_with_the_leaves(mesh_of):
    mesh, layout = mesh_of(1, 4, 2), layout_of(7, 5)
    leaves = list(layout.leaves())
    assert [x.shape for x in jax.tree.leaves(layout.padded_shapes)] == [
        leaf.padded_shape for leaf in leaves
    ]
    abstract = jax.tree.leaves(layout.abstract(mesh))
    assert [x.shape for x in abstract] == [leaf.padded_shape for leaf in leaves]
    assert [x.sharding.spec for x in abstract] == [leaf.spec for leaf in leaves]
    mdl_vars = [leaf for leaf in leaves if leaf.path.startswith("mdl_vars/")]
    selected = list(layout.select("mdl_vars").leaves())
    assert [f"mdl_vars/{leaf.path}" for leaf in selected] == [leaf.path for leaf in mdl_vars]
    assert [leaf.spec for leaf in selected] == [leaf.spec for leaf in mdl_vars]


def test_pad_and_unpad_are_inverse_over_a_whole_state():
    layout = layout_of(7, 5)
    state = jax.tree.map(
        lambda x: jnp.arange(1, x.size + 1, dtype=x.dtype).reshape(x.shape), layout.shapes
    )
    padded = layout.pad(state)
    for x, leaf in zip(jax.tree.leaves(padded), layout.leaves(), strict=True):
        assert x.shape == leaf.padded_shape
        assert float(jnp.sum(x)) == sum(range(1, int(np.prod(leaf.shape)) + 1))
    jax.tree.map(np.testing.assert_array_equal, layout.unpad(padded), state)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (("modle", None), r"params/w.*'modle'.*mdl\?"),
        (("data", "data"), r"params/w.*\('data', 'data'\)"),
        (("data", None, None), r"params/w.*\('data', None, None\).*3.*2"),
    ],
)
def test_a_split_that_does_not_fit_names_the_weights_path(split, message):
    with pytest.raises(ConfigError, match=message):
        layout_of(7, 5, split=split)


def test_an_axis_of_the_stack_cannot_split_the_layer_too():
    class Stack(BaseLayer):
        def __init__(self, *, rngs):
            keys = jax.random.split(rngs(), 4)
            self.blocks = stacked(jax.vmap(lambda k: Block(7, rngs=nnx.Rngs(k)))(keys), "mdl")

    with pytest.raises(ConfigError, match=r"params/blocks/b.*'mdl'"):
        layout_and_learner(Untrained(Stack, Learner(optax.sgd, 0.1)), AXIS_SIZES)[0]
