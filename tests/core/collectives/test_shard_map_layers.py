"""What a device runs by itself inside a checked `jax.shard_map` is what one device alone computes.

JAX tracks there what varies between devices: loops begin with what varies, kernels are kept apart.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite.core.collectives.varying import varying_over
from praxis_lite.decode import BeamSearch, Greedy
from praxis_lite.layers.attention.kernels.chunks import chunked_attention
from praxis_lite.layers.attention.kernels.einsum import LogitOptions
from praxis_lite.layers.attention.kernels.splash import splash_attention
from praxis_lite.layers.attention.masks import AttentionMask
from praxis_lite.layers.embedding.chunked_cross_entropy import token_stats
from praxis_lite.layers.moe.dropless import dropless
from praxis_lite.layers.moe.experts import Experts, glu
from tests.decode.toy_models import Recurrent, row_keys
from tests.layers.stacking.pipeline_cases import drawn, pipeline_model
from tests.support.marks import slow_but

ROWS, LENGTH, DIMS, NUM_CLASSES = 16, 11, 6, 13


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def attention(kernel):
    def values(params, x):
        q, k, v = jnp.split((x @ params["w"]).reshape(*x.shape[:2], 2, -1), 3, axis=-1)
        segments = (jnp.cumsum(x[..., 0] > 1, axis=1)).astype(jnp.int32)
        mask = AttentionMask(5, 0, None, segments, segments)
        return kernel(q, k, v, mask, LogitOptions(scale=0.5, cap=3.0))

    return values, {"w": draw(DIMS, 2 * 3 * 4, seed=1)}


def chunked_softmax():
    def values(params, x):
        ids = jnp.argmax(x, axis=-1)
        stats = token_stats(
            [(x, params["w"])],
            params["b"],
            ids,
            chunk_size=3,
            weight_split_dims_mapping=(None, "mdl"),
        )
        return stats.log_z - stats.label_logit

    return values, {"w": draw(DIMS, NUM_CLASSES, seed=1), "b": draw(NUM_CLASSES, seed=2)}


def experts_without_a_capacity():
    def values(params, x):
        gates, experts = jax.lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
        weights = {name: params[name] for name in ("wi_0", "wo_0")}
        layer = Experts(
            weights,
            glu(jax.nn.silu, None),
            tokens_split=(("data", "mdl"), None, None),
            weights_split=("mdl", None, None),
        )
        return dropless(layer, "auto", x, experts, gates)

    return values, {
        "router": draw(DIMS, 5),
        "wi_0": draw(5, DIMS, 7, seed=1),
        "wo_0": draw(5, 7, DIMS, seed=2),
    }


def pipeline():
    model = pipeline_model("gpipe", num_stages=2, num_microbatches=2, stage_axis="replica")

    def values(params, x):
        return model.module({"params": params, "non_trainable": {}})(x[:, 0])[0]

    return values, drawn(model)


LAYERS = {
    "chunked attention": lambda: attention(functools.partial(chunked_attention, chunk_size=4)),
    "splash": lambda: attention(
        functools.partial(splash_attention, interpret=True, split=("data", None, "mdl", None))
    ),
    "chunked softmax": chunked_softmax,
    "dropless experts": experts_without_a_capacity,
    "pipeline": pipeline,
}


@pytest.mark.parametrize("name", slow_but({"dropless experts"}, LAYERS))
def test_gradients_on_a_devices_rows_add_up_to_those_of_all_rows(mesh_of, name):
    by_hand = ("data", "mdl")
    values, params = LAYERS[name]()
    x = draw(ROWS, LENGTH, 8 if name == "pipeline" else DIMS)

    def loss(params, x):
        return jnp.sum(jnp.sin(values(params, x)))

    def on_a_device(params, x):
        result = jax.value_and_grad(loss)(varying_over(params, by_hand), x)
        return jax.lax.psum(result, by_hand)

    expected = jax.jit(jax.value_and_grad(loss))(params, x)
    with jax.set_mesh(mesh_of(1, 4, 2)):
        mapped = jax.shard_map(
            on_a_device, in_specs=(P(), P(by_hand)), out_specs=P(), axis_names=set(by_hand)
        )
        actual = jax.jit(mapped)(params, x)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max()),
        actual,
        expected,
    )


DECODERS = {
    "greedy": Greedy(max_decode_steps=4, eos_id=2),
    "step by step": Greedy(max_decode_steps=4, eos_id=2, fprop_for_prefix=False),
    "beam": BeamSearch(beam_size=2, max_decode_steps=4, eos_id=2),
}


@pytest.mark.parametrize("name", slow_but({"beam"}, DECODERS))
def test_each_device_decodes_its_rows_until_the_last_device_has_ended(mesh_of, name):
    decoder, model = DECODERS[name], Recurrent(5, seed=3, scale=3.0)
    prompts, lengths = np.arange(24, dtype=np.int32).reshape(8, 3) % 5, np.arange(8) % 3 + 1

    def decoded(ids, lengths, keys):
        return decoder(model, ids, lengths, keys)

    args = prompts, lengths.astype(np.int32), row_keys(8)
    expected = jax.jit(decoded)(*args)
    with jax.set_mesh(mesh_of(1, 4, 1)):
        mapped = jax.shard_map(decoded, in_specs=P("data"), out_specs=P("data"))
        actual = jax.jit(mapped)(*args)
    assert len(set(np.asarray(expected["decode_lengths"]).ravel())) > 1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), actual, expected)
