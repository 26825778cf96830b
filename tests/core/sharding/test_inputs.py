"""Batches: split over the whole mesh at entry, any number of rows, resharded by rank inside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.core import global_batch, reshard_by_rank
from praxis_lite.core.sharding.batch_sharding import (
    abstract_global_batch,
    batch_spec,
    check_inputs_split_mapping,
    drop_padding_rows,
)
from tests.support.goldens import golden, trimmed

AXES = ("replica", "data", "mdl")


def test_every_entry_spec_of_pax_and_of_the_reference():
    for rank, spec in golden("pax/partitioning.json")["input_spec_of_rank"].items():
        assert trimmed(batch_spec(int(rank), AXES)) == trimmed(spec)
        assert len(batch_spec(int(rank), AXES)) == int(rank)
    for rank, spec in golden("reference/uneven_padding.json")["spec_cases"]["batch_spec"]:
        assert trimmed(batch_spec(rank, AXES)) == trimmed(spec)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 4, 2), (2, 2, 2), (1, 3, 2)])
@pytest.mark.parametrize("rows", [1, 3, 8, 11])
def test_rows_are_padded_to_the_devices_and_cut_inside_a_step(mesh_of, shape, rows):
    mesh = mesh_of(*shape)
    inputs = {
        "ids": np.arange(1, rows * 7 + 1, dtype=np.int32).reshape(rows, 7),
        "weights": np.ones(rows, np.float32),
        "temperature": np.float32(0.3),
    }
    batch = global_batch(inputs, mesh)
    padded_rows = -(-rows // mesh.size) * mesh.size
    assert batch.num_rows == rows
    assert batch.inputs["ids"].shape == (padded_rows, 7)
    assert not np.any(np.asarray(batch.inputs["ids"])[rows:])
    for name in ("ids", "weights"):
        item = batch.inputs[name].addressable_shards[0].data
        assert item.shape[0] == padded_rows // mesh.size, name
    assert batch.inputs["temperature"].sharding.is_fully_replicated

    def step(batch):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return drop_padding_rows(batch, mesh.axis_names)

    jax.tree.map(np.testing.assert_array_equal, jax.jit(step)(batch), inputs)
    expected = abstract_global_batch(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs), mesh
    )
    assert expected.num_rows == rows
    for name, leaf in batch.inputs.items():
        assert expected.inputs[name].shape == leaf.shape
        assert expected.inputs[name].sharding == leaf.sharding


def test_leaves_that_disagree_on_their_rows_are_named(mesh_of):
    inputs = {"ids": np.zeros((7, 3)), "labels": np.zeros((5, 3))}
    with pytest.raises(ConfigError, match=r"disagree.*ids \(7, 3\), labels \(5, 3\)"):
        global_batch(inputs, mesh_of(1, 4, 2))


@pytest.fixture
def resharded_specs(mesh_of):
    """Returns a function from (inputs, mapping) to the spec of each leaf after resharding."""
    mesh = mesh_of(1, 4, 2)

    def specs(inputs, mapping):
        def step(batch):
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return reshard_by_rank(batch.inputs, mapping, mesh.axis_names)

        arrays = jax.jit(step)(global_batch(inputs, mesh))
        jax.tree.map(np.testing.assert_array_equal, arrays, inputs)
        return {name: trimmed(x.sharding.spec) for name, x in arrays.items()}

    return specs


INPUTS = {
    "weights": np.ones(8, np.float32),
    "ids": np.arange(32).reshape(8, 4),
    "images": np.arange(64.0, dtype=np.float32).reshape(8, 4, 2),
    "scale": np.float32(0.5),
}


def test_each_rank_is_resharded_by_its_entry(resharded_specs):
    mapping = {"map_1d": (None,), "map_2d": ("data", "mdl"), "map_3d": (1, None, 2)}
    assert resharded_specs(INPUTS, mapping) == {
        "weights": [],
        "ids": ["data", "mdl"],
        "images": ["data", None, "mdl"],
        "scale": [],
    }


def test_an_entry_of_none_leaves_its_rank_as_it_came(resharded_specs):
    assert golden("pax/partitioning.json")["map_of_None_returns_input_unchanged"] is True
    entry = [list(AXES)]
    mapping = {"map_1d": None, "map_2d": ("data", None), "map_3d": None}
    # One axis has a single device: what JAX reports of it may leave it out.
    actual = resharded_specs(INPUTS, mapping)
    assert actual["ids"] == ["data"]
    assert actual["weights"] in (entry, [["data", "mdl"]])
    assert actual["images"] in (entry, [["data", "mdl"]])
    untouched = resharded_specs(INPUTS, None)
    assert untouched["ids"] in (entry, [["data", "mdl"]])


def test_a_mapping_of_none_adds_no_operation():
    x = jnp.ones((8, 3))
    for mapping in (None, {"map_2d": None}):
        assert reshard_by_rank({"x": x}, mapping, AXES)["x"] is x


def test_a_missing_rank_names_the_leaf_its_shape_and_the_key_to_add():
    (case,) = [c for c in golden("pax/partitioning.json")["errors"] if c["what"] == "missing rank"]
    assert case["raises"] == "ValueError"
    inputs = {"images": {"raw": jnp.ones((7, 3))}}
    with pytest.raises(ConfigError, match=r"images/raw.*\(7.*3\).*'map_2d'"):
        reshard_by_rank(inputs, {"map_1d": None}, AXES)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (("nowhere", None), r"map_2d'\].*'nowhere'"),
        (("data", "data"), r"map_2d'\].*\('data', 'data'\)"),
        (("data", None, None), r"map_2d'\].*3 entries"),
    ],
)
def test_an_entry_that_does_not_fit_is_refused_before_anything_runs(entry, message):
    spec = {"ids": jax.ShapeDtypeStruct((7, 3), jnp.int32)}
    with pytest.raises(ConfigError, match=message):
        check_inputs_split_mapping(spec, {"map_2d": entry}, AXES)
