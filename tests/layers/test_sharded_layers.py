"""Every layer on a mesh equals itself on one device: outputs and gradients, even and uneven."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite import layers
from praxis_lite.core import MeshConfig, NnxModel, constrain, make_mesh
from praxis_lite.core.models.model import spec_leaves
from praxis_lite.core.xla_workarounds.xla_errors import without_xla_errors
from praxis_tools.check.asserts.layers import revealing

BATCH = ("replica", "data")
T = 5


@dataclasses.dataclass(frozen=True)
class Sizes:
    batch: int
    model: int
    hidden: int
    heads: int
    vocab: int


SIZES = {
    # Both meshes divide these (data 4 or 3, mdl 2) ...
    "even": Sizes(batch=12, model=24, hidden=36, heads=2, vocab=48),
    # ... and neither divides these.
    "uneven": Sizes(batch=7, model=13, hidden=17, heads=3, vocab=29),
}
RUNS = (("uneven", (1, 4, 2)), ("even", (1, 3, 2)))
HIDDEN, RESIDUAL = (BATCH, None, "mdl"), (BATCH, None, None)
HEADS = (BATCH, None, "mdl", None)

ATTENTION = functools.partial(
    layers.DotProductAttention,
    use_bias=True,
    # Without it the gradient of the keys' biases is nothing but rounding.
    use_rotary_position_emb=True,
    weight_split_dims_mapping=("data", "mdl", None),
    activation_split_dims_mapping=HEADS,
    output_split_dims_mapping=RESIDUAL,
)
FFN = functools.partial(
    layers.TransformerFeedForward,
    activation="gelu",
    use_gated_activation=True,
    weight_split_dims_mapping=("data", "mdl"),
    hidden_split_dims_mapping=HIDDEN,
    activation_split_dims_mapping=RESIDUAL,
)
BLOCK = functools.partial(layers.Transformer, tr_atten_tpl=ATTENTION, tr_fflayer_tpl=FFN)


def positions(batch: int) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(T), (batch, T))


def cases(s: Sizes) -> dict[str, tuple[Any, Any]]:
    """Returns, by name, what builds a layer and what calls it on ([B, T, D] floats, ids, key)."""
    split = {
        "weight_split_dims_mapping": ("data", "mdl"),
        "activation_split_dims_mapping": HIDDEN,
    }
    norm = {
        "weight_split_dims_mapping": (("data", "mdl"),),
        "activation_split_dims_mapping": HIDDEN,
    }
    per_dim = {**split, "weight_split_dims_mapping": ("mdl",)}

    def of_x(module, x, ids, key):
        return module(x)

    def of_ids(module, x, ids, key):
        return module(ids)

    def of_flat(module, x, ids, key):
        return module(x[:, 0])

    def of_positions(module, x, ids, key):
        return module(x, positions=positions(s.batch), key=key)[0]

    def softmax(module, x, ids, key):
        return module(x + module.emb_lookup(ids))

    def lm(module, x, ids, key):
        return module(ids)[0]

    partial = functools.partial
    return {
        "linear": (partial(layers.Linear, s.model, s.hidden, **split), of_x),
        "bias": (partial(layers.Bias, s.model, **per_dim), of_x),
        "feed_forward": (partial(layers.FeedForward, s.model, s.hidden, **split), of_x),
        "einsum": (
            partial(
                layers.Einsum, "...d,dnk->...nk", (s.model, s.heads, 4), has_bias=True,
                weight_split_dims_mapping=("data", "mdl", None),
                activation_split_dims_mapping=HEADS,
            ),
            of_x,
        ),
        "mlp": (
            partial(
                layers.Mlp, s.model, (s.hidden, s.vocab), s.heads,
                weight_split_dims_mapping=("data", "mdl"),
                activation_split_dims_mapping=(BATCH, "mdl"),
            ),
            of_flat,
        ),
        "embedding": (
            partial(layers.Embedding, s.vocab, s.model, **split | {
                "weight_split_dims_mapping": ("mdl", "data")}),
            of_ids,
        ),
        "embedding_matmul": (
            partial(layers.Embedding, s.vocab, s.model, lookup_style="matmul", **split | {
                "weight_split_dims_mapping": ("mdl", "data")}),
            of_ids,
        ),
        "shared_softmax": (
            partial(
                layers.SharedEmbeddingSoftmax, s.vocab, s.model, has_bias=True, **split,
                lookup_split_dims_mapping=RESIDUAL,
            ),
            softmax,
        ),
        "learned_positions": (
            partial(
                layers.TrainablePositionalEmbedding, s.hidden, s.model,
                weight_split_dims_mapping=("mdl", "data"),
                activation_split_dims_mapping=(None, None, "mdl"),
            ),
            lambda module, x, ids, key: x + module(positions(1)),
        ),
        "rotary": (
            lambda rngs: layers.RotaryPositionalEmbedding(4),
            lambda module, x, ids, key: module(
                constrain(jnp.stack([x[..., :4]] * s.heads, axis=2), HEADS), positions(s.batch)
            ),
        ),
        "layer_norm": (partial(layers.LayerNorm, s.model, **norm), of_x),
        "rms_norm": (partial(layers.RmsNorm, s.model, **norm), of_x),
        "dropout": (
            lambda rngs: layers.Dropout(0.3),
            lambda module, x, ids, key: module(constrain(x, HIDDEN), key),
        ),
        "projection": (
            partial(
                layers.AttentionProjection, s.model, s.heads, 4, use_bias=True,
                weight_split_dims_mapping=("data", "mdl", None),
                activation_split_dims_mapping=HEADS,
            ),
            of_x,
        ),
        "attention": (
            partial(ATTENTION, s.model, s.heads, dim_per_head=4),
            of_positions,
        ),
        "transformer_feed_forward": (
            partial(FFN, s.model, s.hidden, residual_dropout_prob=0.2),
            lambda module, x, ids, key: module(x, key=key),
        ),
        # Holds Repeat and Transformer as well. Without dropout and remat, which cost much
        # compilation here and have tests of their own.
        "lm": (
            partial(
                layers.TransformerLm, s.vocab, s.model, s.hidden, s.heads, 2, dim_per_head=4,
                max_seq_length=s.hidden, transformer_layer_tpl=BLOCK,
                stacked_transformer_tpl=partial(
                    layers.Repeat, checkpoint_policy="save_everything"
                ),
                softmax_tpl=partial(layers.SharedEmbeddingSoftmax, **split),
            ),
            lm,
        ),
    }


NAMES = tuple(cases(SIZES["even"]))


@functools.cache
def results(sizes: str, mesh_shape: tuple[int, ...] | None) -> dict[str, Any]:
    """Returns outputs and gradients of every layer: one program, so one compilation."""
    s = SIZES[sizes]
    models = {name: (NnxModel(build), call) for name, (build, call) in cases(s).items()}
    rng = np.random.default_rng(11)
    x = rng.normal(size=(s.batch, T, s.model)).astype(np.float32)
    ids = rng.integers(0, s.vocab, (s.batch, T), dtype=np.int32)
    mesh = mesh_shape and make_mesh(MeshConfig(ici_mesh_shape=mesh_shape))

    def place(model, params):
        if mesh is None:
            return params
        declared = spec_leaves(model.weight_specs()["params"])
        specs = [spec.partition_spec(mesh.axis_names, path) for path, spec in declared]
        leaves, treedef = jax.tree.flatten(params)
        constrained = map(jax.lax.with_sharding_constraint, leaves, specs)
        return jax.tree.unflatten(treedef, constrained)

    @jax.jit
    @without_xla_errors
    def run(all_params, x, ids, key):
        def one(name, model, call):
            params = place(model, all_params[name])

            def objective(params, x):
                module = model.module({"params": params, "non_trainable": {}})
                outputs = call(module, x, ids, key)
                return revealing(outputs), outputs

            grads, outputs = jax.grad(objective, argnums=(0, 1), has_aux=True)(params, x)
            return {"outputs": outputs, "grads": grads}

        return {name: one(name, *model) for name, model in models.items()}

    # Drawn by NumPy: to compile each layer's init would take longer than all else.
    params = {
        name: jax.tree.map(
            lambda w: rng.normal(scale=0.4, size=w.shape).astype(np.float32),
            jax.eval_shape(model.init, jax.random.key(0))["params"],
        )
        for name, (model, _) in models.items()
    }
    if mesh is None:
        return jax.device_get(run(params, x, ids, jax.random.key(5)))
    with jax.set_mesh(mesh):
        return jax.device_get(run(params, x, ids, jax.random.key(5)))


every_run = pytest.mark.parametrize(
    ("sizes", "mesh_shape"),
    [RUNS[0], pytest.param(*RUNS[1], marks=pytest.mark.slow)],
    ids=str,
)


@every_run
@pytest.mark.parametrize("name", NAMES)
def test_sharded_equals_unsharded(name, sizes, mesh_shape):
    sharded, whole = results(sizes, mesh_shape)[name], results(sizes, None)[name]
    flat, _ = jax.tree_util.tree_flatten_with_path(sharded)
    for (path, actual), expected in zip(flat, jax.tree.leaves(whole), strict=True):
        tolerance = 2e-6 * max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=tolerance, err_msg=str(path))


def shard_shape_of(mesh, mapping) -> tuple[int, ...]:
    """Returns the shape that a device holds of a [8, 8] output constrained by `mapping`."""
    x = jax.device_put(
        np.ones((8, 8), np.float32),
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", None)),
    )
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda x: constrain(x * 2.0, mapping)).lower(x).compile()
    return compiled.output_shardings.shard_shape((8, 8))


def test_a_mapping_of_all_none_forces_replication_and_none_leaves_free(mesh_of):
    mesh = mesh_of(1, 4, 2)
    assert shard_shape_of(mesh, (None, None)) == (8, 8)
    assert shard_shape_of(mesh, None) == (2, 8)  # As the input came.
    assert shard_shape_of(mesh, (None, "mdl")) == (8, 4)
    assert shard_shape_of(mesh, ("data",)) == (2, 8)  # Extended to the rank.


def test_without_a_mesh_constrain_returns_its_argument():
    x = jnp.ones((2, 3))
    assert constrain(x, ("no such axis", None)) is x


def test_weights_and_activations_are_really_split(mesh_of):
    """The test above would pass with no split at all; a device's program shows its share."""
    mesh = mesh_of(1, 4, 2)
    model = NnxModel(
        functools.partial(
            layers.FeedForward, 13, 17, weight_split_dims_mapping=("data", "mdl"),
            activation_split_dims_mapping=(BATCH, "mdl"),
        )
    )
    params = {"linear": {"w": np.ones((13, 17), np.float32)}, "bias": {"b": np.ones(17, "f")}}

    def run(params, x):
        return model.module({"params": params, "non_trainable": {}})(x)

    with jax.set_mesh(mesh):
        compiled = jax.jit(run).lower(params, np.ones((7, 13), np.float32)).compile()
    assert "f32[2,9]" in compiled.as_text()  # ceil(7 / 4) rows, ceil(17 / 2) columns.
