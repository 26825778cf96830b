"""Embeddings and positions: option values of the real Pax, ids without a row, constants."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from praxis_lite import ConfigError, layers
from praxis_lite.core import MeshConfig, NnxModel, make_mesh
from praxis_lite.layers.embedding import embeddings
from praxis_tools.explain import hlo
from tests.support.goldens import pax_options
from tests.support.pax_options import flat, mdl_vars_from

PAX = pax_options("softmaxes")
IN = {name: jnp.asarray(x) for name, x in PAX[""]["in"].items()}


def of_positions(module):
    return module(IN["positions"])


def of_heads(dtype):
    return lambda module: module(IN["heads"].astype(dtype), IN["positions"])


def rotary(**options):
    return lambda rngs: layers.RotaryPositionalEmbedding(6, **options)


CASES = {
    "embedding_matmul": (
        functools.partial(layers.Embedding, 13, 7, lookup_style="matmul", scale_sqrt_depth=True),
        lambda module: module(IN["ids"]),
    ),
    "learned_index": (functools.partial(layers.TrainablePositionalEmbedding, 11, 7), of_positions),
    "sinusoid_positions": (functools.partial(layers.PositionalEmbedding, 7), of_positions),
    "sinusoid_timescales": (
        functools.partial(layers.PositionalEmbedding, 6, min_timescale=2, max_timescale=50),
        lambda module: module(seq_length=5),
    ),
    "sinusoid_one": (
        functools.partial(layers.PositionalEmbedding, 3, max_timescale=50),
        lambda module: module(seq_length=5),
    ),
    "rotary_timescales": (rotary(min_timescale=2, max_timescale=50), of_heads(jnp.float32)),
    "rotary_bfloat16_cast_True": (rotary(), of_heads(jnp.bfloat16)),
    "rotary_bfloat16_cast_False": (rotary(cast_as_fprop_dtype=False), of_heads(jnp.bfloat16)),
}


@pytest.mark.parametrize("name", CASES)
def test_option_values_equal_pax(name):
    (build, call), golden = CASES[name], PAX[name]
    model = NnxModel(build)
    mdl_vars = mdl_vars_from(model, golden)

    def objective(params):
        outputs = call(model.module({**mdl_vars, "params": params}))
        cotangent = IN["cot"] if params else jnp.zeros(outputs.shape)
        return jnp.sum(outputs * cotangent), outputs

    grads, outputs = jax.jit(jax.grad(objective, has_aux=True))(mdl_vars["params"])
    tolerance = 0.02 if outputs.dtype == jnp.bfloat16 else 1e-5
    assert outputs.dtype == (jnp.bfloat16 if name.endswith("cast_True") else jnp.float32)
    np.testing.assert_allclose(
        outputs.astype(jnp.float32), golden["out"]["y"], rtol=tolerance, atol=tolerance
    )
    assert set(flat(grads)) - {""} == set(golden.get("grad", {}))
    for path, expected in golden.get("grad", {}).items():
        np.testing.assert_allclose(flat(grads)[path], expected, rtol=1e-5, atol=1e-5, err_msg=path)


@pytest.mark.parametrize("lookup_style, wanted", [("index", np.nan), ("matmul", 0.0)])
def test_an_id_without_a_row_shows(lookup_style, wanted):
    layer = layers.Embedding(5, 3, lookup_style=lookup_style, rngs=nnx.Rngs(0))
    embs = np.asarray(layer(jnp.array([[4, 5]])))
    np.testing.assert_array_equal(embs[0, 1], np.full(3, wanted))
    np.testing.assert_array_equal(embs[0, 0], layer.emb_var[...][4])


def test_both_lookups_have_the_same_vectors_and_gradients():
    ids, cotangent = jnp.array([[1, 4, 1]]), jnp.arange(9.0).reshape(1, 3, 3)

    def outputs_and_gradient(lookup_style):
        model = NnxModel(functools.partial(layers.Embedding, 5, 3, lookup_style=lookup_style))
        mdl_vars = {"params": {"emb_var": jnp.arange(15.0).reshape(5, 3)}, "non_trainable": {}}
        outputs, pull = jax.vjp(lambda v: model.module(v)(ids), mdl_vars)
        return outputs, pull(cotangent)[0]["params"]["emb_var"]

    for actual, expected in zip(*map(outputs_and_gradient, ("index", "matmul")), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("lookup_style", ["index", "matmul"])
def test_vectors_have_the_dtype_of_activations(lookup_style):
    layer = layers.Embedding(
        5, 3, lookup_style=lookup_style, fprop_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    actual, table = layer(jnp.array([4, 1])), np.asarray(layer.emb_var[...])
    assert actual.dtype == jnp.bfloat16 and table.dtype == np.float32
    np.testing.assert_array_equal(actual, table[[4, 1]].astype(jnp.bfloat16))


SPLIT = ("mdl", "data")


@pytest.mark.parametrize("num_ids", [8, 2000])
def test_a_table_split_by_columns_stays_where_it_is_unless_tokens_are_more_than_rows(num_ids):
    rng = np.random.default_rng(2)
    table = rng.normal(size=(100, 24)).astype(np.float32)
    ids = rng.integers(0, 100, (8, num_ids // 8)).astype(np.int32)
    cotangent = rng.normal(size=(*ids.shape, 24)).astype(np.float32)

    def pulled(table, ids):
        lookup = functools.partial(
            embeddings.lookup,
            ids=ids,
            weight_split_dims_mapping=SPLIT,
            lookup_style="index",
            dtype=jnp.float32,
            activation_split_dims_mapping=("data", None, None),
        )
        result, pull = jax.vjp(
            lambda table: embeddings.constrain_embeddings(
                lookup(table), ("data", None, None), SPLIT
            ),
            table,
        )
        return result, pull(cotangent)[0]

    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 4, 2)))
    shardings = [NamedSharding(mesh, P(*x)) for x in (SPLIT, ("data", None))]
    with jax.set_mesh(mesh):
        compiled = jax.jit(pulled, in_shardings=shardings).lower(table, ids).compile()
        actual, gradient = compiled(*map(jax.device_put, (table, ids), shardings))
    expected = np.zeros_like(table)
    np.add.at(expected, ids, cotangent)
    np.testing.assert_array_equal(actual, table[ids])
    np.testing.assert_allclose(gradient, expected, atol=2e-5)
    # A device has 50 rows of 6 columns; by the hand's count it would gather 50 rows of 24.
    moved = [collective.bytes for collective in hlo.collectives(compiled)]
    rows_whole = 50 * 24 * 4
    assert (max(moved) >= rows_whole) == (num_ids > 100)


def test_vectors_of_a_table_split_by_columns_go_to_their_part_of_time():
    """Rows and time take the columns' axes: no device has the vectors of all tokens."""
    rng = np.random.default_rng(2)
    table = rng.normal(size=(100, 24)).astype(np.float32)
    ids = rng.integers(0, 100, (8, 6)).astype(np.int32)
    columns, split = (None, ("data", "mdl")), ("data", "mdl", None)

    def looked_up(table, ids):
        vectors = embeddings.lookup(table, ids, columns, "index", jnp.float32, split)
        return embeddings.constrain_embeddings(vectors, split, columns)

    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 4, 2)))
    shardings = [NamedSharding(mesh, P(*x)) for x in (columns, ("data", None))]
    with jax.set_mesh(mesh):
        compiled = jax.jit(looked_up, in_shardings=shardings).lower(table, ids).compile()
        actual = compiled(*map(jax.device_put, (table, ids), shardings))
    np.testing.assert_array_equal(actual, table[ids])
    # A device reads 3 columns for 48 tokens, and exchanges these twice.
    moved = [collective.bytes for collective in hlo.collectives(compiled)]
    assert max(moved) == 48 * 3 * 4


def test_positions_left_out_are_those_from_zero():
    rows, x = jnp.arange(5)[None], IN["heads"]
    sinusoids, rotary = layers.PositionalEmbedding(8), layers.RotaryPositionalEmbedding(6)
    learned = layers.TrainablePositionalEmbedding(7, 4, rngs=nnx.Rngs(0))

    @jax.jit
    def run(rows):
        return (
            [sinusoids(rows), learned(rows), rotary(x, rows)],
            [sinusoids(seq_length=5), learned(seq_length=5), rotary(x)],
            rotary(x, rows + 1),
        )

    given, left_out, shifted = run(rows)
    jax.tree.map(np.testing.assert_array_equal, given, left_out)
    assert not np.allclose(given[-1], shifted)


def test_sinusoids_far_ahead_stay_exact():
    far = jnp.array([[1000, 1001, 4095]])
    actual = np.asarray(layers.PositionalEmbedding(4)(far))[0]
    frequency = np.array([1.0, 1e-4])
    angle = np.asarray(far, np.float64)[0][:, None] * frequency
    np.testing.assert_allclose(
        actual, np.concatenate([np.sin(angle), np.cos(angle)], axis=-1), atol=3e-4
    )


@pytest.mark.parametrize(
    "build, message",
    [
        (
            lambda r: layers.Embedding(5, 3, lookup_style="indx", rngs=r),
            r"Embedding\.lookup_style.*'indx'.*index",
        ),
        (
            lambda r: layers.TrainablePositionalEmbedding(5, 3, lookup_style="x", rngs=r),
            r"TrainablePositionalEmbedding\.lookup_style.*'x'",
        ),
        (lambda r: layers.PositionalEmbedding(0), r"PositionalEmbedding\.embedding_dims.*0"),
        (
            lambda r: layers.PositionalEmbedding(4, max_timescale=0.5),
            r"PositionalEmbedding\.min_timescale.*1.0.*max_timescale.*0.5",
        ),
        (
            lambda r: layers.RotaryPositionalEmbedding(4, min_timescale=0),
            r"RotaryPositionalEmbedding\.min_timescale.*0",
        ),
    ],
)
def test_a_wrong_setting_is_named(build, message):
    with pytest.raises(ConfigError, match=message):
        build(nnx.Rngs(0))
