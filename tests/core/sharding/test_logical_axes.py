"""Logical axis names: Flax Linen's answers, what is dropped and unmapped, and MeshRules."""

import fiddle as fdl
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from praxis_lite import ConfigError
from praxis_lite.core import MeshRules, logical_to_mesh_axes

NAMES = ["batch", "embed", "heads", "kv", "mlp", "vocab"]
AXES = ["replica", "data", "mdl", ("data", "mdl"), ("replica", "data"), None]


def test_the_answers_are_those_of_flax_linen():
    rng = np.random.default_rng(11)
    num_fallbacks = 0
    for _ in range(700):
        names = tuple(rng.permutation(NAMES)[: rng.integers(0, 5)].tolist())
        names = tuple(None if rng.integers(5) == 0 else name for name in names)
        rules = tuple(
            (NAMES[rng.integers(len(NAMES))], AXES[rng.integers(len(AXES))])
            for _ in range(rng.integers(0, 17))
        )
        split = logical_to_mesh_axes(names, rules)
        assert split.spec == tuple(nn.logical_to_mesh_axes(names, rules)), (names, rules)
        num_fallbacks += any(", so it uses " in text for text in split.dropped)
    assert num_fallbacks > 20


def test_the_first_rule_that_fits_wins_whatever_the_order_of_the_dims():
    rules = (("mlp", "mdl"), ("embed", "mdl"), ("embed", "data"))
    assert logical_to_mesh_axes(("embed", "mlp"), rules).spec == ("data", "mdl")
    assert logical_to_mesh_axes(("embed",), rules).spec == ("mdl",)
    # A rule of None settles it.
    assert logical_to_mesh_axes(("embed",), (("embed", None), *rules)).spec == (None,)


def test_what_is_dropped_and_unmapped_is_told():
    rules = (("mlp", ("data", "mdl")), ("embed", "mdl"), ("heads", "data"), ("heads", "replica"))
    split = logical_to_mesh_axes(("embed", "mlp", "heads", "kv"), rules)
    assert split.spec == (None, ("data", "mdl"), "replica", None)
    assert split.mapped == ("mlp->data+mdl", "heads->replica")
    assert split.dropped == (
        "'embed' cannot use mdl (used by 'mlp')",
        "'heads' cannot use data (used by 'mlp'), so it uses replica",
    )
    assert split.unmapped == ("kv",)


def test_a_name_without_a_rule_is_a_mesh_axis_of_that_name():
    names, axis_names = ("data", "embed"), ("data", "mdl")
    assert logical_to_mesh_axes(names, (), axis_names=axis_names).spec == ("data", None)
    # Linen has no such thing, and a rule of the name comes first.
    assert logical_to_mesh_axes(names, ()).spec == (None, None)
    rules = (("data", None), ("embed", "data"))
    assert logical_to_mesh_axes(names, rules, axis_names=axis_names).spec == (None, "data")
    # A name with rules is none, where they do not fit either.
    rules = (("embed", "mdl"), ("data", "mdl"))
    assert logical_to_mesh_axes(names, rules, axis_names=axis_names).spec == (None, "mdl")
    # Rules have the first choice of an axis.
    rules = (("data", None), ("embed", "data"))
    split = logical_to_mesh_axes(names, rules[1:], axis_names=axis_names)
    assert split.spec == (None, "data") and len(split.dropped) == 1


def test_a_dim_of_several_names_has_the_axes_of_all():
    split = logical_to_mesh_axes(
        (("data", "heads"), "kv"), (("heads", "mdl"),), axis_names=("data", "mdl")
    )
    assert split.spec == (("data", "mdl"), None)


def test_an_axis_that_is_taken_is_not_used_again():
    split = logical_to_mesh_axes(
        ("embed", "mlp"), (("mlp", "mdl"), ("embed", "data")), taken=("mdl",)
    )
    assert split.spec == ("data", None)
    assert split.dropped == ("'mlp' cannot use mdl (used by another dim)",)


def test_one_name_on_two_dims_is_an_error_as_in_linen():
    with pytest.raises(ValueError):
        nn.logical_to_mesh_axes(("embed", "embed"), ())
    with pytest.raises(ConfigError, match=r"up/w.*\('embed'.*'embed'\).*'embed'"):
        logical_to_mesh_axes(("embed", "embed"), (), path="up/w")


class Dense(nnx.Module):
    """As Flax's lm1b_nnx: the constructor asks rules for mesh axes."""

    def __init__(self, mesh_rules, *, rngs):
        self.mesh_rules, self.split = mesh_rules, mesh_rules("embed", "mlp")
        self.w = nnx.Param(rngs.params.uniform((3, 7)))


def test_mesh_rules_give_a_models_constructor_its_mesh_axes():
    rules = MeshRules(embed=None, mlp=["data", "mdl"], kv="mdl")
    assert rules("kv", None, "embed", "mlp") == ("mdl", None, None, ("data", "mdl"))
    assert rules() == ()
    assert rules == MeshRules(mlp=("data", "mdl"), kv="mdl", embed=None)
    # A module holds them as a static attribute.
    graphdef, _ = nnx.split(Dense(MeshRules(embed="data", mlp=None), rngs=nnx.Rngs(0)))
    same, _ = nnx.split(Dense(MeshRules(embed="data", mlp=None), rngs=nnx.Rngs(1)))
    assert graphdef == same and hash(graphdef) == hash(same)
    assert fdl.build(fdl.Config(MeshRules, embed="data"))("embed") == ("data",)


def test_mesh_rules_name_what_there_is():
    with pytest.raises(ConfigError, match="'embd'"):
        MeshRules(mlp="mdl", embed=None)("embd")
    with pytest.raises(ConfigError, match="MeshRules.*'mlp'.*7"):
        MeshRules(mlp=7)
