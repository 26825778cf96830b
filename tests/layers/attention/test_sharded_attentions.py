"""Attention's options on a mesh equal themselves on one device: outputs and gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import layers
from praxis_lite.core import MeshConfig, NnxModel, make_mesh
from praxis_lite.core.models.model import spec_leaves
from praxis_lite.core.xla_workarounds.xla_errors import without_xla_errors
from praxis_tools.check.asserts.layers import revealing

BATCH = ("replica", "data")
T, S = 5, 3
# Batch, model dims, heads and heads of keys: of the even ones all divide (1, 4, 2), of the uneven
# none does.
SIZES = {"uneven": (7, 13, 6, 3)}
OPTIONS: dict[str, dict[str, Any]] = {
    "grouped": {
        "window": 3, "use_rotary_position_emb": True, "ln_tpl": layers.RmsNorm, "num_kv_heads": 2,
    },
    "multi_query": {
        "num_kv_heads": 1, "relative_bias_tpl": layers.RelativeBias, "attention_extra_logit": 0.3,
    },
    "cross": {"is_cross_attention": True, "num_kv_heads": 2, "zero_fully_masked": True},
    "combined_qkv": {"combine_qkv": True, "atten_logit_cap": 2.0, "is_causal": False},
    "chunked": {"atten_kernel": "chunked", "atten_chunk_size": 2, "num_kv_heads": 2, "window": 4},
}


def models(sizes: str) -> dict[str, NnxModel]:
    _, D, N, G = SIZES[sizes]

    def model(**options: Any) -> NnxModel:
        if options.get("num_kv_heads") == 2:
            options["num_kv_heads"] = G
        return NnxModel(
            functools.partial(
                layers.DotProductAttention, D, N, dim_per_head=4,
                weight_split_dims_mapping=("data", "mdl", None),
                activation_split_dims_mapping=(BATCH, None, "mdl", None),
                output_split_dims_mapping=(BATCH, None, None),
                **options,
            )
        )

    return {name: model(**options) for name, options in OPTIONS.items()}


@functools.cache
def results(sizes: str, mesh_shape: tuple[int, ...] | None) -> dict[str, Any]:
    """Returns outputs and gradients of every case: one program, so one compilation."""
    B, D, *_ = SIZES[sizes]
    rng = np.random.default_rng(11)
    x, encoded = (rng.normal(size=(B, n, D)).astype(np.float32) for n in (T, S))
    segment_ids = np.sort(rng.integers(1, 3, (B, T)))
    encoded_paddings = (np.arange(S) >= rng.integers(1, S + 1, (B, 1))).astype(np.float32)
    params = {
        name: jax.tree.map(
            lambda w: rng.normal(scale=0.4, size=w.shape).astype(np.float32),
            jax.eval_shape(model.init, jax.random.key(0))["params"],
        )
        for name, model in models(sizes).items()
    }
    mesh = mesh_shape and make_mesh(MeshConfig(ici_mesh_shape=mesh_shape))

    def place(model, params):
        if mesh is None:
            return params
        declared = spec_leaves(model.weight_specs()["params"])
        specs = [spec.partition_spec(mesh.axis_names, path) for path, spec in declared]
        leaves, treedef = jax.tree.flatten(params)
        constrained = map(jax.lax.with_sharding_constraint, leaves, specs)
        return jax.tree.unflatten(treedef, constrained)

    def one(name, model, params, x, encoded):
        inputs = {"segment_ids": segment_ids}
        if name == "cross":
            inputs = {"encoded": encoded, "encoded_paddings": encoded_paddings}

        def objective(params, x):
            y = model.module({"params": params, "non_trainable": {}})(x, **inputs)[0]
            return revealing(y), y

        grads, y = jax.grad(objective, argnums=(0, 1), has_aux=True)(place(model, params), x)
        return {"outputs": y, "grads": grads}

    @jax.jit
    @without_xla_errors
    def run(params, x, encoded):
        return {
            name: one(name, model, params[name], x, encoded)
            for name, model in models(sizes).items()
        }

    if mesh is None:
        return jax.device_get(run(params, x, encoded))
    with jax.set_mesh(mesh):
        return jax.device_get(run(params, x, encoded))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", OPTIONS)
def test_sharded_equals_unsharded(name, sizes):
    sharded, whole = results(sizes, (1, 4, 2))[name], results(sizes, None)[name]
    flat, _ = jax.tree_util.tree_flatten_with_path(sharded)
    # Of all leaves: the gradient of the keys' bias is 0 but for what rounding leaves of large ones.
    tolerance = 2e-6 * max(1.0, *(np.abs(leaf).max() for leaf in jax.tree.leaves(whole)))
    for (path, actual), expected in zip(flat, jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=tolerance, err_msg=str(path))


def test_the_cache_is_split_as_keys_are_and_a_head_that_all_read_stays_whole(mesh_of):
    heads = (BATCH, None, "mdl", None)

    def layer(**options):
        return layers.DotProductAttention(
            8, 4, dim_per_head=3, activation_split_dims_mapping=heads, rngs=nnx.Rngs(0), **options
        )

    assert layer(num_kv_heads=1).kv_split_dims_mapping == (BATCH, None, None, None)
    assert layer(num_kv_heads=2).kv_split_dims_mapping == heads
    local = (BATCH, None, None, "mdl")
    assert layer(num_kv_heads=2, kv_split_dims_mapping=local).kv_split_dims_mapping == local
    grouped = layer(num_kv_heads=2)
    with jax.set_mesh(mesh_of(1, 4, 2)):
        cache = jax.jit(lambda: grouped.init_cache(4, 5, jnp.float32))()
    assert cache["key"].sharding.shard_shape(cache["key"].shape) == (1, 1, 5, 3)
