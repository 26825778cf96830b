"""Every spelling of Flax's metadata ends in the spec that Flax itself reads from it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import spmd
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from praxis_lite import ConfigError
from praxis_lite.core import NnxModel, WeightSharding
from praxis_lite.core.sharding.devices.axis_types import mesh_of
from praxis_lite.core.sharding.weight_sharding import decide_shardings
from praxis_lite.layers import Repeat
from tests.support.goldens import trimmed
from tests.support.nnx_stacks import in_vmap

ROWS, COLUMNS = 7, 13
AXES = {"data": 2, "model": 4}
INIT = nnx.initializers.lecun_normal()


class OneWeight(nnx.Module):
    """A weight [7, 13], made as a user may write it."""

    def __init__(self, make, rngs: nnx.Rngs):
        self.w = make(rngs.params())


def drawn(key, init=INIT):
    return init(key, (ROWS, COLUMNS))


def on_a_mesh(spec):
    return NamedSharding(mesh_of(np.asarray(jax.devices()).reshape(2, 4), ("data", "model")), spec)


SPELLINGS = {
    "with_partitioning": lambda key: nnx.Param(
        drawn(key, nnx.with_partitioning(INIT, (None, "model")))
    ),
    "with_metadata": lambda key: nnx.Param(
        drawn(key, nnx.with_metadata(INIT, out_sharding=("model", None)))
    ),
    "tuple": lambda key: nnx.Param(drawn(key), out_sharding=("data", "model")),
    "two axes": lambda key: nnx.Param(drawn(key), out_sharding=(None, ("data", "model"))),
    "PartitionSpec": lambda key: nnx.Param(drawn(key), out_sharding=P("model", None)),
    "NamedSharding": lambda key: nnx.Param(drawn(key), out_sharding=on_a_mesh(P(None, "data"))),
    "short": lambda key: nnx.Param(drawn(key), out_sharding=("model",)),
    "replicated": lambda key: nnx.Param(drawn(key), out_sharding=(None, None)),
    "none": lambda key: nnx.Param(drawn(key)),
    "other kind": lambda key: nnx.BatchStat(drawn(key), out_sharding=("model", None)),
    "own rules": lambda key: nnx.Param(
        drawn(key),
        out_sharding=("embed", "mlp"),
        sharding_rules=(("mlp", "model"), ("embed", None)),
    ),
    "rules over an axis": lambda key: nnx.Param(
        drawn(key),
        out_sharding=("data", "mlp"),
        sharding_rules=(("mlp", ("model",)), ("data", None)),
    ),
}


def decided(make, sharding=None):
    specs = NnxModel(functools.partial(OneWeight, make)).weight_specs()
    (weights,) = filter(None, decide_shardings(specs, sharding, AXES).weight_specs.values())
    return weights["w"]


def flax_spec(make):
    """Returns the spec by which Flax would place the weight as it is made."""
    with nnx.use_eager_sharding(False):
        metadata = OneWeight(make, nnx.Rngs(0)).w.get_metadata()
    if not metadata.get("out_sharding"):
        return []
    actual = spmd.apply_rules(metadata["out_sharding"], metadata.get("sharding_rules"))
    return trimmed(P(*getattr(actual, "spec", actual)))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_spelling_ends_in_the_spec_that_flax_reads(spelling):
    weight = decided(SPELLINGS[spelling])
    assert trimmed(weight.partition_spec(tuple(AXES), "w")) == flax_spec(SPELLINGS[spelling])
    assert (weight.shape, weight.logical_axes) == ((ROWS, COLUMNS), None)
    declares = "default: no split declared" if spelling == "none" else "nnx out_sharding"
    assert weight.declared_by.startswith(declares)


@pytest.mark.parametrize("name", ["sharding", "sharding_names"])
def test_deprecated_names_of_the_metadata_still_count(name):
    with pytest.warns(DeprecationWarning, match=name):
        weight = decided(lambda key: nnx.Param(drawn(key), **{name: ("model", None)}))
    assert weight.split_dims_mapping == ("model", None)


def test_names_without_rules_of_their_own_take_the_jobs():
    def make(key):
        return nnx.Param(drawn(key), out_sharding=("embed", "mlp"))

    rules = WeightSharding(logical_axis_rules=(("embed", "data"), ("mlp", "model")))
    assert decided(make, rules).split_dims_mapping == ("data", "model")
    with spmd.logical_axis_rules(rules.logical_axis_rules):
        assert flax_spec(make) == ["data", "model"]


def test_a_stack_of_our_own_adds_its_dim_in_front_of_the_names():
    block = functools.partial(
        OneWeight, lambda key: nnx.Param(drawn(key), out_sharding=(None, "model"))
    )
    build = functools.partial(Repeat, block, 3, stack_split="data")
    specs = decide_shardings(NnxModel(build).weight_specs(), None, AXES).weight_specs
    weight = specs["params"]["blocks"]["w"]
    assert weight.shape == (3, ROWS, COLUMNS)
    assert weight.stack_split_dims_mapping == ("data",)
    assert weight.split_dims_mapping == (None, "model")


class Stack(nnx.Module):
    """Blocks as Flax's users stack them: made by `nnx.vmap`, called by `nnx.scan`."""

    def __init__(self, rngs: nnx.Rngs):
        def create(rngs):
            return OneWeight(SPELLINGS["with_partitioning"], rngs)

        self.blocks = nnx.split_rngs(splits=3)(in_vmap(create, "layers"))(rngs)


def test_a_stack_by_nnx_vmap_is_one_of_layers_unless_a_rule_splits_it():
    specs = NnxModel(Stack).weight_specs()
    weight = decide_shardings(specs, None, AXES).weight_specs["params"]["blocks"]["w"]
    assert weight.stack_split_dims_mapping == (None,)
    assert weight.split_dims_mapping == (None, "model")
    rules = WeightSharding(logical_axis_rules=(("layers", "data"),))
    weight = decide_shardings(specs, rules, AXES).weight_specs["params"]["blocks"]["w"]
    assert weight.stack_split_dims_mapping == ("data",)


WRONG = {
    "too long": (
        lambda key: nnx.Param(drawn(key), out_sharding=(None, "model", None)),
        r"params/w.*\(None, 'model', None\).*3.*2.*\(7, 13\)",
    ),
    "a string": (
        lambda key: nnx.Param(drawn(key), out_sharding="model"),
        "params/w.*out_sharding.* 'model';",
    ),
    "numbers": (
        lambda key: nnx.Param(drawn(key), out_sharding=(0, 1)),
        r"params/w.*out_sharding.*\(0, 1\)",
    ),
    "no pairs": (
        lambda key: nnx.Param(drawn(key), out_sharding=("mlp",), sharding_rules=("mlp",)),
        r"params/w.*sharding_rules.*\('mlp',\)",
    ),
    "unknown axis": (
        lambda key: nnx.Param(drawn(key), out_sharding=(None, "modle")),
        r"w.*'modle'.*model\?",
    ),
    "axis twice": (
        lambda key: nnx.Param(drawn(key), out_sharding=("model", "model")),
        r"w.*\('model', 'model'\)",
    ),
    "rule to no axis": (
        lambda key: nnx.Param(
            drawn(key), out_sharding=("mlp", None), sharding_rules=(("mlp", "tensor"),)
        ),
        r"w.*'tensor'.*\('data', 'model'\)",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_declaration_is_an_error_with_the_weights_path(wrong):
    make, message = WRONG[wrong]
    with pytest.raises(ConfigError, match=message):
        decided(make)


def test_a_model_is_built_at_its_true_shapes_where_the_dims_do_not_divide(mesh_of):
    make = SPELLINGS["with_partitioning"]
    mesh = mesh_of(2, 4, axis_names=("data", "model"))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"'model'.*13.*\(7, 13\)"):
        OneWeight(make, nnx.Rngs(0))  # As Flax would.
    model = NnxModel(functools.partial(OneWeight, make))
    with jax.set_mesh(mesh):
        weight = model.init(jax.random.key(0))["params"]["w"]
    np.testing.assert_array_equal(weight, drawn(nnx.Rngs(0).params()))
    assert isinstance(model.module({"params": {"w": jnp.ones(weight.shape)}}).w, nnx.Param)
