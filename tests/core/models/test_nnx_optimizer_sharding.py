"""Slots that split as a variable's `optimizer_sharding` says, and the weight as its own says."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from praxis_lite import ConfigError
from praxis_lite.core import Learner, MeshConfig, Partitioner, WeightSharding, make_mesh
from praxis_lite.tasks.loss import LossTask

X = np.random.default_rng(0).normal(size=(8, 7)).astype(np.float32)


class Net(nnx.Module):
    """A weight of uneven dims with metadata, and another whose slots follow it."""

    def __init__(self, metadata, *, rngs):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Param(init(rngs.params(), (7, 13)), **metadata)
        self.down = nnx.Param(init(rngs.params(), (13, 5)), out_sharding=("mdl", None))

    def __call__(self, x):
        return jnp.tanh(x @ self.up) @ self.down


def squared(model, inputs, key):
    return jnp.mean(model(inputs["x"]) ** 2)


def partitioner(metadata, shape=(1, 4, 2), optimizer=optax.adam, rules=None, **settings):
    task = LossTask(
        lambda rngs: Net(metadata, rngs=rngs), squared, Learner(optimizer, 1e-2, **settings)
    )
    if rules is not None:
        task.weight_sharding = WeightSharding(logical_axis_rules=rules)
    return Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=shape)))


def specs_of(state):
    """Returns the PartitionSpec of each array of the weight and its slots, by path."""
    paths = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(p, simple=True, separator="/"): x.sharding.spec for p, x in paths}


def initial_specs(ours):
    return {leaf.path: leaf.spec for leaf in ours.layout.leaves()}


def losses(ours, num_steps=3):
    state, result = ours.init(ours.key(0)), []
    for _ in range(num_steps):
        state, output = ours.train_step(state, ours.global_batch({"x": X}), ours.key(1))
        result.append(float(output["metrics"]["loss"][0]))
    return state, result


def test_the_slots_split_as_it_says_and_the_weight_as_its_own_says():
    metadata = {"out_sharding": ("data", None), "optimizer_sharding": ("mdl", "data")}
    ours = partitioner(metadata)
    renamed = partitioner({"out_sharding": ("data", None), "opt_sharding": ("mdl", "data")})
    assert list(renamed.layout.leaves()) == list(ours.layout.leaves())
    state, actual = losses(ours)
    specs = specs_of(state)
    weights = {path: spec for path, spec in specs.items() if path.endswith("params/up")}
    slots = {path: spec for path, spec in specs.items() if "slots" in path and path.endswith("/up")}
    assert list(weights.values()) == [P("data", None)]
    assert len(slots) == 2 and set(slots.values()) == {P("mdl", "data")}
    others = [s for path, s in specs.items() if path.endswith("/down")]
    assert len(others) == 3 and set(others) == {P("mdl", None)}
    [mu] = [
        x
        for p, x in jax.tree_util.tree_flatten_with_path(state.opt_states)[0]
        if "mu" in str(p) and "up" in str(p)
    ]
    assert mu.shape == (8, 16) and mu.addressable_shards[0].data.shape == (4, 4)
    _, expected = losses(partitioner(metadata, (1, 1, 1)))
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    assert actual[0] > actual[-1]


def test_a_weight_may_be_whole_and_its_slots_split_by_names_with_rules():
    metadata = {"optimizer_sharding": P("embed", "hidden"), "sharding_rules": (("embed", "data"),)}
    specs = initial_specs(partitioner(metadata, rules=(("hidden", "mdl"),)))
    assert [s for p, s in specs.items() if p.endswith("params/up")] == [P(None, None)]
    slots = [s for p, s in specs.items() if "slots" in p and p.endswith("/up")]
    assert len(slots) == 2 and set(slots) == {P("data", "mdl")}


def test_factored_slots_and_slot_mesh_axes_follow_it_too():
    metadata = {"out_sharding": ("data", None), "optimizer_sharding": (None, "mdl")}

    def adafactor(learning_rate):
        return optax.adafactor(learning_rate, min_dim_size_to_factor=2)

    specs = initial_specs(partitioner(metadata, optimizer=adafactor))
    [row] = [s for p, s in specs.items() if p.endswith("v_row/up")]
    [column] = [s for p, s in specs.items() if p.endswith("v_col/up")]
    # Of (7, 13) optax's v_row has the dim of 7, and v_col that of 13.
    assert (row, column) == (P(None), P("mdl"))
    specs = initial_specs(partitioner(metadata, slot_mesh_axes=("data",)))
    slots = {s for p, s in specs.items() if "slots" in p and p.endswith("/up")}
    # 7 x 16 elements are as many as 8 x 14: the larger dim takes the axis.
    assert slots == {P(None, ("mdl", "data"))}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (3, "up: optimizer_sharding is 3"),
        ("data", "up: optimizer_sharding is 'data'"),
        ((1, None), r"up: optimizer_sharding is \(1, None\)"),
        (("data", None, "mdl"), r"up: optimizer_sharding .* has 3 entries.*2 dims"),
        (("daat", None), "up: the name 'daat'.*Did you mean data"),
        (("data", "data"), "up: .*'data' twice"),
    ],
)
def test_a_wrong_value_names_the_weight(value, words):
    with pytest.raises(ConfigError, match=words):
        partitioner({"optimizer_sharding": value})


@pytest.mark.parametrize("value", [None, ()])
def test_an_empty_one_counts_as_absent(value):
    metadata = {"out_sharding": ("data", None), "optimizer_sharding": value}
    specs = initial_specs(partitioner(metadata))
    assert {s for p, s in specs.items() if p.endswith("/up")} == {P("data", None)}


def test_flaxs_own_optimizer_reads_the_same_key():
    """Else Flax has renamed it, and `nnx_declarations` has to follow."""
    with nnx.use_eager_sharding(False):
        model = Net({"optimizer_sharding": ("mdl", None)}, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    slots = [x for p, x in nnx.to_flat_state(nnx.state(optimizer)) if p[-1] == "up"]
    assert len(slots) == 2 and all(x.out_sharding == ("mdl", None) for x in slots)
