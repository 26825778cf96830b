"""Plain functions as a model: any tree in and out, specs by tree or prefix, and what is refused."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from praxis_lite import ConfigError
from praxis_lite.core import Learner
from praxis_lite.core.models.model import ShardedWeight, spec_leaves
from praxis_lite.core.partitioner.train_state import layout_and_learner
from praxis_lite.core.sharding.devices.axis_types import abstract_mesh_of
from praxis_lite.models import FunctionModel
from praxis_lite.tasks.loss import LossTask

AXES = {"data": 4, "mdl": 2}


class Dense(NamedTuple):
    """A layer as a named tuple; the bias may be absent."""

    w: jax.Array
    b: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Norm:
    """A layer as a dataclass with a tuple in it."""

    scale: jax.Array
    pair: tuple


def init(key):
    w = jax.random.normal(key, (3, 5))
    return {
        "mlp/~/linear": {"w": w},
        "layers": [Dense(w, None), Dense(w + 1.0, 0.5)],
        "norm": Norm(np.ones(7), (jnp.zeros(2), jnp.zeros((2, 11)))),
    }


PATHS = [
    "layers/0/w",
    "layers/1/b",
    "layers/1/w",
    "mlp/~/linear/w",
    "norm/pair/0",
    "norm/pair/1",
    "norm/scale",
]


def splits(specs, init=init):
    """Returns the declared mapping of each weight, by its path."""
    leaves = spec_leaves(FunctionModel(init, specs).weight_specs())
    return {path.removeprefix("params/"): spec.split_dims_mapping for path, spec in leaves}


def layout(specs, init=init):
    task = LossTask(FunctionModel(init, specs), lambda *_: 0.0, Learner(optax.adamw, 0.1))
    return layout_and_learner(task, AXES)[0]


def test_any_tree_comes_back_as_init_made_it():
    model, key = FunctionModel(init), jax.random.key(7)
    mdl_vars, expected = model.init(key), init(key)
    assert sorted(splits(None)) == PATHS and set(splits(None).values()) == {None}
    assert mdl_vars["non_trainable"] == {} and isinstance(mdl_vars["params"]["layers"], dict)
    linear = mdl_vars["params"]["mlp"]["~"]["linear"]
    np.testing.assert_array_equal(linear["w"], expected["mlp/~/linear"]["w"])
    actual = model.module(mdl_vars)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert isinstance(actual["layers"][1], Dense) and isinstance(actual["norm"], Norm)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    # What a Python or a NumPy number becomes is what a step returns: it compiles once.
    dtypes = {(x.dtype.name, x.weak_type) for x in jax.tree.leaves(mdl_vars)}
    assert dtypes == {("float32", False)}
    specs = jax.tree.map(lambda x: (x.shape, x.dtype), mdl_vars)
    assert specs == jax.tree.map(lambda s: (s.shape, s.dtype), model.weight_specs())


def test_a_single_array_is_a_tree_too():
    model = FunctionModel(lambda key: jnp.ones((3, 5)), specs=("data",))
    ((path, spec),) = spec_leaves(model.weight_specs())
    assert (path, spec.split_dims_mapping) == ("params/value", ("data",))
    assert model.module(model.init(jax.random.key(0))).shape == (3, 5)


def test_weights_in_shards_are_gathered():
    model = FunctionModel(lambda key: [jnp.arange(3.0), jnp.ones(2)])
    params = model.init(jax.random.key(0))["params"]
    params["0"] = ShardedWeight(params["0"], lambda block: 2 * block)
    np.testing.assert_array_equal(model.module({"params": params})[0], [0.0, 2.0, 4.0])


def test_specs_are_a_tree_or_a_prefix_and_none_declares_nothing():
    actual = splits(
        {
            "mlp/~/linear": {"w": P("data", "mdl")},
            "layers": [P("mdl"), {"w": P(None, ("data", "mdl")), "b": ()}],
            "norm": None,
        }
    )
    assert actual == dict.fromkeys(PATHS) | {
        "mlp/~/linear/w": ("data", "mdl"),
        "layers/0/w": ("mdl",),
        "layers/1/w": (None, ("data", "mdl")),
        "layers/1/b": (),
    }
    # As jax.jit reads a prefix: the one spec is that of every weight beneath.
    assert set(splits(P("data")).values()) == set(splits(("data",)).values()) == {("data",)}
    norm = Norm(P("mdl"), (None, P(None, "data")))
    actual = splits({"mlp/~/linear": None, "layers": None, "norm": norm})
    assert actual == dict.fromkeys(PATHS) | {"norm/scale": ("mdl",), "norm/pair/1": (None, "data")}


def test_a_tuple_is_the_spec_of_an_array_and_the_entries_of_a_tuple():
    def init(key):
        return jnp.ones((3, 5)), jnp.ones((5, 7))

    assert splits((None, "mdl"), lambda key: init(key)[0]) == {"value": (None, "mdl")}
    assert splits((None, ("mdl", "data")), init) == {"0": None, "1": ("mdl", "data")}
    assert splits(P(None, "mdl"), init) == {"0": (None, "mdl"), "1": (None, "mdl")}


def test_specs_may_be_a_function_of_the_shapes():
    def by_rank(shapes):
        assert shapes["layers"][0].w.shape == (3, 5)
        return jax.tree.map(lambda x: P(None, "mdl") if len(x.shape) == 2 else None, shapes)

    actual = splits(by_rank)
    assert {path for path, split in actual.items() if split} == {
        "layers/0/w",
        "layers/1/w",
        "mlp/~/linear/w",
        "norm/pair/1",
    }


def test_the_layout_has_the_specs_the_padding_and_who_declared_them():
    specs = {"mlp/~/linear": P("data", "mdl"), "layers": None, "norm": None}
    leaves = {leaf.path: leaf for leaf in layout(specs).leaves()}
    leaf = leaves["mdl_vars/params/mlp/~/linear/w"]
    assert (leaf.spec, leaf.padded_shape) == (P("data", "mdl"), (4, 6))
    assert "specs ('data', 'mdl')" in leaf.declared_by
    assert leaves["mdl_vars/params/layers/0/w"].spec == P(None, None)
    slot = leaves["opt_states/slots/unstacked/0/mu/mlp/~/linear/w"]
    assert (slot.spec, slot.padded_shape) == (leaf.spec, leaf.padded_shape)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"mlp/~/linear": None, "layrs": None, "norm": None}, r"'layrs'.*layers\?"),
        ({"mlp/~/linear": None, "norm": None}, r"'layers'\."),
        (
            {"mlp/~/linear": {"w": "mdl"}, "layers": None, "norm": None},
            r"'mdl'.*'mlp/~/linear/w'.*\(3, 5\)",
        ),
        ({"mlp/~/linear": None, "layers": [None], "norm": None}, "'layers/1'"),
        ({"mlp/~/linear": None, "layers": [None] * 3, "norm": None}, "an entry 'layers/2'"),
        ({"mlp/~/linear": "mdl", "layers": None, "norm": None}, "'w'.*tree"),
        (7, "specs.* 7 .*dict"),
        (
            {
                "mlp/~/linear": None,
                "layers": None,
                "norm": NamedSharding(abstract_mesh_of((1,), ("data",)), P("data")),
            },
            "NamedSharding.*'norm'.*PartitionSpec",
        ),
    ],
)
def test_specs_that_do_not_match_the_params_are_refused_by_path(specs, message):
    with pytest.raises(ConfigError, match=message):
        FunctionModel(init, specs).weight_specs()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P("data", None, "mdl"), "('data'|3|'mdl').*3.*2"),
        (P("dta"), r"'dta'.*data\?"),
        (P("mdl", "mdl"), r"\('mdl', 'mdl'\)"),
    ],
)
def test_a_spec_that_fits_no_weight_or_mesh_is_refused_before_anything_compiles(spec, message):
    with pytest.raises(ConfigError, match=f"params/mlp/~/linear/w.*{message}"):
        layout({"mlp/~/linear": {"w": spec}, "layers": None, "norm": None})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (None, r"\(NoneType\)"),
        ({"layers": []}, r"\(dict\)"),
        ({"w": np.ones(2), "table": np.arange(3)}, "params/table.*int32"),
        ({"step": 3}, "params/step: .* returns int32"),
        ([jax.nn.relu], "params/0: .* returns custom_jvp"),
        ({"name": "dense"}, "params/name"),
        ({"a": {"b": 1.0}, "a/b": 2.0}, "params/a/b"),
        ({"a": 1.0, "a/b": 2.0}, "params/a/b"),
    ],
)
def test_params_that_cannot_be_trained_are_refused_by_path(params, message):
    with pytest.raises(ConfigError, match=message):
        FunctionModel(lambda key: params).weight_specs()


def test_init_takes_a_key_alone():
    def needs_inputs(key, images):
        return {"w": images}

    with pytest.raises(ConfigError, match=r"needs_inputs"):
        FunctionModel(needs_inputs)
    with pytest.raises(ConfigError, match="FunctionModel.init.*3"):
        FunctionModel(3)
    model = FunctionModel(functools.partial(needs_inputs, images=jnp.ones(3)))
    assert model.init(jax.random.key(0))["params"]["w"].shape == (3,)


def test_keys_are_drawn_from():
    model = FunctionModel(init)
    item, same, other = (model.init(jax.random.key(n))["params"]["layers"] for n in (1, 1, 2))
    np.testing.assert_array_equal(item["0"]["w"], same["0"]["w"])
    assert not np.array_equal(item["0"]["w"], other["0"]["w"])
