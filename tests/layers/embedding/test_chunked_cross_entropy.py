"""The chunked softmax equals the whole one, and holds no logits of a whole vocabulary."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from praxis_lite import layers
from praxis_lite.core import MeshConfig, NnxModel, make_mesh
from praxis_lite.core.models.model import spec_leaves
from praxis_lite.layers.embedding.chunked_cross_entropy import token_stats
from praxis_tools.explain import hlo
from tests.support.marks import slow_but

# B batch, T time, D input dims, V classes, C classes of a chunk.
BATCH = ("replica", "data")
ALL_OPTIONS = {"soft_cap_logits": 3.0, "z_loss_weight": 0.1, "label_smoothing_prob": 0.2}


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def stats_of(x, w, b, ids, **options):
    return token_stats([(x, w)], b, ids, **options)


@pytest.mark.parametrize(
    "num_classes, chunk_size, class_dim",
    [(12, 4, 1), (13, 5, 0), (13, 5, 1), (13, 1, 1), (13, 99, 0)],
)
def test_statistics_equal_numpy_for_any_chunk(num_classes, chunk_size, class_dim):
    x, w, b = draw(2, 3, 5), draw(5, num_classes, seed=1), draw(num_classes, seed=2)
    ids = np.random.default_rng(3).integers(0, num_classes, (2, 3))
    run = functools.partial(stats_of, chunk_size=chunk_size, class_dim=class_dim)
    actual = jax.jit(run)(x, w if class_dim == 1 else w.T, b, ids)
    logits = x.astype(np.float64) @ w + b
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(actual.log_z, np.log(np.exp(logits).sum(-1)))
    close(actual.label_logit, np.take_along_axis(logits, ids[..., None], -1)[..., 0])
    close(actual.logit_sum, logits.sum(-1))
    np.testing.assert_array_equal(actual.argmax, logits.argmax(-1))


def test_the_first_of_equal_logits_wins_and_huge_ones_neither_overflow_nor_vanish():
    x = np.ones((1, 1), np.float32)
    w = np.array([[2.0, 7.0, 1.0, 7.0, 7.0]], np.float32)
    run = jax.jit(stats_of, static_argnames="chunk_size")
    for chunk_size in (1, 2, 3):
        assert run(x, w, None, np.array([0]), chunk_size=chunk_size).argmax == 1
    for scale in (3e4, -3e4):
        actual = run(x * scale, w, None, np.array([0]), chunk_size=2)
        np.testing.assert_allclose(actual.log_z, (7 if scale > 0 else 1) * scale, rtol=1e-4)


@pytest.mark.parametrize("shape", [(), (2, 1, 3)], ids=str)
def test_tokens_have_any_number_of_dims(shape):
    x, w = draw(*shape, 5), draw(5, 13, seed=1)
    run = jax.jit(functools.partial(stats_of, chunk_size=4))
    actual = run(x, w, None, np.zeros(shape, np.int32))
    assert {stat.shape for stat in actual} == {shape}
    np.testing.assert_allclose(actual.log_z, np.log(np.exp(x @ w).sum(-1)), rtol=1e-5)


@pytest.mark.slow
def test_gradients_equal_finite_differences():
    x, w, b = draw(3, 5), draw(5, 13, seed=1), draw(13, seed=2)

    def objective(x, w, b):
        stats = stats_of(
            x,
            w,
            b,
            jnp.array([1, 12, 4]),
            chunk_size=4,
            activation=lambda logits: 3.0 * jnp.tanh(logits / 3.0),
        )
        weights = jnp.array([1.0, 0.3, 2.0])
        return jnp.sum(weights * (stats.log_z**2 - stats.label_logit + 0.1 * stats.logit_sum))

    check_grads(objective, (x, w, b), order=1, modes=["rev"], eps=1e-2, rtol=1e-2, atol=1e-2)


def loss_and_grads(model, params, x, ids, weights):
    def objective(params, x):
        outputs = model.module({"params": params, "non_trainable": {}}).compute_loss(
            x, ids, weights
        )
        total = outputs["total_xent"] + outputs.get("z_loss", 0.0)
        return total, {name: outputs[name] for name in ("per_example_xent", "per_example_argmax")}

    return jax.grad(objective, argnums=(0, 1), has_aux=True)(params, x)


def test_bfloat16_equals_the_whole_softmax_within_its_rounding():
    x = jnp.asarray(draw(2, 3, 16), jnp.bfloat16)
    ids, weights = jnp.array([[1, 2, 30], [36, 0, 7]]), jnp.ones((2, 3))
    results = {}
    for chunk_size in (None, 5):
        model = NnxModel(
            functools.partial(layers.FullSoftmax, 37, 16, chunk_size=chunk_size, **ALL_OPTIONS)
        )
        params = model.init(jax.random.key(0))["params"]
        results[chunk_size] = jax.jit(functools.partial(loss_and_grads, model))(
            params, x, ids, weights
        )
    (grads, x_grad), outputs = results[5]
    assert x_grad.dtype == jnp.bfloat16
    assert {grad.dtype for grad in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    # The very same products, so the losses are equal; gradients round in another order.
    (of_whole, x_of_whole), whole = results[None]
    np.testing.assert_allclose(outputs["per_example_xent"], whole["per_example_xent"], rtol=1e-5)
    for leaf, expected in zip(
        jax.tree.leaves((grads, x_grad)), jax.tree.leaves((of_whole, x_of_whole)), strict=True
    ):
        leaf, expected = np.asarray(leaf, np.float32), np.asarray(expected, np.float32)
        assert np.abs(leaf - expected).max() < 0.01 * np.abs(expected).max()


SPLITS = {  # Of the weight [D, V], and of the logits [B, T, V].
    "mdl": ((None, "mdl"), (BATCH, None, "mdl")),
    "data_mdl": (("data", "mdl"), (BATCH, None, "mdl")),
    "both_axes": ((None, ("data", "mdl")), (None, None, ("data", "mdl"))),
}
SIZES = {"even": (8, 8, 40), "uneven": (7, 5, 37)}  # B, D, V; V = 37 on 8 shards of 5: the last
CHUNK = 3  # shard has 2 classes, and 3 are not divided by a shard's 5, 19 or 20 classes.
LAYERS = (layers.FullSoftmax, layers.NClassMajorSharedEmbeddingSoftmax)
CASES = [(LAYERS[0], sizes, splits) for sizes in SIZES for splits in SPLITS]
OF_SHARED_TABLE = (LAYERS[1], "uneven", "data_mdl")


def compiled_and_arguments(layer, sizes, splits, mesh, **options):
    """Returns a jitted function of (params, x, ids, weights) on `mesh`, and its arguments."""
    B, D, V = SIZES[sizes]
    weight_split, logits_split = SPLITS[splits]
    model = NnxModel(
        functools.partial(
            layer,
            V,
            D,
            weight_split_dims_mapping=weight_split,
            activation_split_dims_mapping=logits_split,
            **options,
        )
    )
    shapes = jax.eval_shape(model.init, jax.random.key(0))["params"]
    params = jax.tree.map(lambda leaf: draw(*leaf.shape, seed=leaf.size), shapes)
    specs = [
        spec.partition_spec(BATCH + ("mdl",), path)
        for path, spec in spec_leaves(model.weight_specs()["params"])
    ]

    def run(params, x, ids, weights):
        if mesh is not None:
            leaves, treedef = jax.tree.flatten(params)
            leaves = map(jax.lax.with_sharding_constraint, leaves, specs)
            params = jax.tree.unflatten(treedef, leaves)
        return loss_and_grads(model, params, x, ids, weights)

    ids = np.random.default_rng(5).integers(0, V, (B, 3))
    weights = (np.arange(B * 3) % 4 > 0).reshape(B, 3).astype(np.float32)
    return jax.jit(run), (params, draw(B, 3, D, seed=4), ids, weights)


@functools.cache
def result_of(layer, sizes, splits, mesh_shape, chunk_size):
    mesh = mesh_shape and make_mesh(MeshConfig(ici_mesh_shape=mesh_shape))
    run, arguments = compiled_and_arguments(
        layer, sizes, splits, mesh, chunk_size=chunk_size, **ALL_OPTIONS
    )
    if mesh is None:
        return jax.device_get(run(*arguments))
    with jax.set_mesh(mesh):
        return jax.device_get(run(*arguments))


@pytest.mark.parametrize(
    "case", slow_but({CASES[-1], OF_SHARED_TABLE}, [*CASES, OF_SHARED_TABLE]), ids=str
)
def test_split_over_a_mesh_equals_the_whole_softmax_on_one_device(case):
    layer, sizes, splits = case
    actual = result_of(layer, sizes, splits, (1, 4, 2), CHUNK)
    expected = result_of(layer, sizes, "mdl", None, None)
    paths = jax.tree_util.tree_leaves_with_path(actual)
    for (path, leaf), of_whole in zip(paths, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, of_whole, rtol=1e-5, atol=1e-5, err_msg=str(path))


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_no_collective_carries_weights_over_the_classes_or_logits(layer):
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 4, 2)))
    run, arguments = compiled_and_arguments(layer, "even", "data_mdl", mesh, chunk_size=4)
    with jax.set_mesh(mesh):
        compiled = run.lower(*arguments).compile()
    tokens, D, shard = 2 * 3, 8, 20
    gathers = [
        c
        for c in hlo.collectives(compiled)
        # For argmax, the greatest logit of each token on each of two shards.
        if c.kind != "all-reduce" and c.bytes > 2 * 4 * tokens
    ]
    # Over data, which splits D: a chunk of the weight at a time, forward and backward.
    assert {(c.kind, c.bytes, c.count, c.group_size) for c in gathers} == {
        ("all-gather", D * 4 * 4, shard // 4, 4)
    }
    assert len(gathers) == 2
    reduced = sorted(
        (c.bytes, c.count, c.group_size)
        for c in hlo.collectives(compiled)
        if c.kind == "all-reduce"
    )
    assert sum(size * count for size, count, _ in reduced) <= 4 * (
        D * shard
        + shard  # The gradient of the weight and of the bias, over data.
        + tokens * D  # The gradient of the inputs, over mdl, once.
        + 5 * tokens  # Statistics, over mdl.
    )
    assert not re.search(r"f32\[2,3,(1,)?(20|40)\]", compiled.as_text())


def temporary_bytes(num_classes: int, input_dims: int, tokens: int, chunk_size: int | None) -> int:
    """Returns the temporary bytes of a softmax's loss and gradients, as the compiler reports."""
    model = NnxModel(
        functools.partial(layers.FullSoftmax, num_classes, input_dims, chunk_size=chunk_size)
    )

    def total_xent(params, inputs, class_ids, class_weights):
        module = model.module({"params": params, "non_trainable": {}})
        return module.compute_loss(inputs, class_ids, class_weights)["total_xent"]

    lowered = jax.jit(jax.value_and_grad(total_xent, argnums=(0, 1))).lower(
        jax.eval_shape(model.init, jax.random.key(0))["params"],
        jax.ShapeDtypeStruct((tokens, input_dims), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
        jax.ShapeDtypeStruct((tokens,), jnp.float32),
    )
    return lowered.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("tokens, input_dims", [(7, 64), (128, 16)])
def test_temporary_memory_is_that_of_a_chunk(tokens, input_dims):
    num_classes, chunk_size = 30_011, 256
    # The weight and its gradient for a chunk; the logits, their exponentials and gradients for a
    # chunk; the values stored per token. Without chunks, all logits.
    allowed = 4 * (2 * chunk_size * input_dims + 4 * chunk_size * tokens + 16 * tokens * input_dims)
    assert temporary_bytes(num_classes, input_dims, tokens, chunk_size) <= allowed
    assert allowed < 4 * tokens * num_classes
    assert temporary_bytes(num_classes, input_dims, tokens, None) > 4 * tokens * num_classes
