"""Split-dims mappings become PartitionSpecs as in Pax, and what does not fit is refused."""

import ast

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from praxis_lite import ConfigError
from praxis_lite.core import constrain, to_partition_spec
from tests.support.goldens import golden, trimmed

AXES = ("replica", "data", "mdl")


def test_every_mapping_of_pax_gives_its_spec():
    pax = golden("pax/partitioning.json")
    assert tuple(pax["mesh_axis_names"]) == AXES
    for case in pax["to_partition_spec"]:
        mapping = case["split_dims_mapping"]
        actual = to_partition_spec(mapping, AXES)
        assert trimmed(actual) == trimmed(case["spec"]), mapping
        assert len(actual) == len(mapping), mapping


def test_every_mapping_of_the_reference_gives_its_spec():
    cases = golden("reference/uneven_padding.json")["spec_cases"]
    assert tuple(cases["axis_names"]) == AXES
    for mapping, spec in cases["split_dims"]:
        actual = to_partition_spec(ast.literal_eval(mapping), AXES)
        assert trimmed(actual) == trimmed(spec), mapping


def test_a_short_mapping_is_extended_to_the_rank():
    # Pax raises here; DESIGN.md ("A short mapping is extended to the rank") departs from it.
    spec = to_partition_spec(["data"], AXES, rank=3)
    assert spec == PartitionSpec("data", None, None)
    assert len(spec) == 3


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (("modle", None), r"lm/w.*'modle'.*\('replica', 'data', 'mdl'"),
        ((3, None), r"lm/w.*\(3, None\).* 3 .*\('replica', 'data', 'mdl'"),
        (("data", "data"), r"lm/w.* \('data', 'data'\) "),
        (("data", ("mdl", 1)), r"lm/w.*\('data', \('mdl', 1\)\).*'data'"),
        ((("data", "data"), None), r"lm/w.*\(\('data', 'data'\), None\)"),
        (("data", None, None), r"lm/w.*\('data', None, None\).*3.*2.*1"),
        (("data", 1.5), r"lm/w.* 1\.5"),
        ((True, None), "lm/w.*True"),
        ("data", r"lm/w.* 'data' .*\('data',\)"),
        (2, r"lm/w.* 2 .*\(2,\)"),
    ],
)
def test_what_does_not_fit_names_the_weight_the_mapping_and_the_axes(mapping, message):
    with pytest.raises(ConfigError, match=message) as raised:
        to_partition_spec(mapping, AXES, rank=2, path="lm/w")
    assert isinstance(raised.value, ValueError)


def test_pax_refuses_the_same_axes():
    errors = {case["what"]: case for case in golden("pax/partitioning.json")["errors"]}
    assert set(errors) == {"missing rank", "rank mismatch", "unknown axis", "axis out of range"}
    for mapping in (["nowhere"], [3]):  # "unknown axis", "axis out of range"
        with pytest.raises(ConfigError):
            to_partition_spec(mapping, AXES)
    # Pax's "rank mismatch" is ['data'] on (2, 2), which is extended here; a longer one is refused.
    with pytest.raises(ConfigError, match="Remove 1"):
        to_partition_spec(["data", None, None], AXES, rank=2)
    # "missing rank": test_inputs.py


def test_an_activation_of_mapping_none_is_left_alone_and_all_none_is_replicated(mesh_of):
    mesh = mesh_of(1, 4, 2)
    x = jax.device_put(jnp.ones((8, 6)), NamedSharding(mesh, PartitionSpec("data", "mdl")))

    def layout_after(mapping):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            y = jax.jit(lambda x: constrain(x, mapping))(x)
        return trimmed(y.sharding.spec)

    assert layout_after(None) == ["data", "mdl"]
    assert layout_after((None, None)) == []
    assert layout_after(()) == []
    assert layout_after(("mdl",)) == ["mdl"]


def test_a_layer_runs_where_there_is_no_mesh():
    x = jnp.ones((7, 3))
    assert constrain(x, ("nowhere", "mdl")) is x


def test_an_activation_that_does_not_fit_is_named(mesh_of):
    with (
        jax.sharding.use_abstract_mesh(mesh_of(1, 4, 2).abstract_mesh),
        pytest.raises(ConfigError, match=r"\(7, 3\).*3"),
    ):
        jax.eval_shape(lambda x: constrain(x, (None, None, "mdl")), jnp.ones((7, 3)))
