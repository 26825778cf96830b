"""Latent attention: by NumPy, on a mesh, and decoded from a cache of latents."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError
from praxis_lite.layers import MultiHeadLatentAttention, lora

B, T, D, N = 2, 6, 7, 3
SIZES = {"kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 6, "v_head_dim": 3}
K, R, V, L = 4, 6, 3, 5
X = np.random.default_rng(2).normal(size=(B, T, D)).astype(np.float32)


@functools.cache
def attention(**settings):
    make = functools.partial(MultiHeadLatentAttention, D, N, **SIZES)
    if settings.pop("adapted", False):
        make = lora(make, rank=2)
    layer = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0), **settings))
    rng, state = np.random.default_rng(1), nnx.state(layer, nnx.Param)
    for _, weight in nnx.to_flat_state(state):
        weight.set_value(jnp.asarray(rng.normal(size=weight.shape), jnp.float32))
    nnx.update(layer, state)
    return layer


def by_numpy(layer, x):
    x = x.astype(np.float64)

    def normed(latent, norm):
        scale = np.asarray(norm.scale[...], np.float64)
        return latent / np.sqrt((latent**2).mean(-1, keepdims=True) + 1e-6) * scale

    def rotated(heads):  # Neighbors turn together, as complex numbers.
        pairs = heads[..., ::2] + 1j * heads[..., 1::2]
        angle = np.arange(T)[:, None, None] / 10_000.0 ** (np.arange(0, R, 2) / R)
        pairs = pairs * np.exp(1j * angle)
        return np.stack([pairs.real, pairs.imag], -1).reshape(heads.shape)

    w = {
        name: np.asarray(getattr(layer, name).w[...], np.float64)
        for name in ("query", "query_up", "query_latent", "key_value_latent", "key_value", "post")
        if getattr(layer, name) is not None
    }
    if "query" in w:
        q = np.einsum("btd,dnk->btnk", x, w["query"])
    else:
        latent = normed(x @ w["query_latent"], layer.query_latent_norm)
        q = np.einsum("btl,lnk->btnk", latent, w["query_up"])
    both = x @ w["key_value_latent"]
    kv = np.einsum(
        "btl,lnk->btnk", normed(both[..., :L], layer.key_value_latent_norm), w["key_value"]
    )
    key = rotated(both[..., None, L:]).repeat(N, 2)
    logits = np.einsum("btnk,bsnk->bnts", q[..., :K], kv[..., :K])
    logits += np.einsum("btnk,bsnk->bnts", rotated(q[..., K:]), key)
    logits = np.where(np.tril(np.ones((T, T), bool)), logits / np.sqrt(K + R), -np.inf)
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    return np.einsum("bnts,bsnv,dnv->btd", probs, kv[..., K:], w["post"])


@pytest.mark.parametrize("q_lora_rank", [None, 4])
def test_outputs_equal_numpy(q_lora_rank):
    layer = attention(q_lora_rank=q_lora_rank)
    actual, cache = jax.jit(lambda x: layer(x))(X)
    assert cache is None
    np.testing.assert_allclose(actual, by_numpy(layer, X), rtol=2e-4, atol=2e-4)


def test_decoding_from_latents_equals_the_whole_pass():
    layer = attention(q_lora_rank=4, adapted=True)
    expected, _ = jax.jit(lambda x: layer(x))(X)
    cache = layer.init_cache(B, T + 2, jnp.float32)
    # All that is kept of a token, for all heads together.
    assert {x.shape for x in cache.values()} == {(B, T + 2, L + R)}
    step = jax.jit(lambda x, positions, cache: layer(x, positions=positions, cache=cache))
    first, cache = step(X[:, :3], jnp.broadcast_to(jnp.arange(3), (B, 3)), cache)
    actual = [first]
    for place in range(3, T):
        item, cache = step(X[:, place : place + 1], jnp.full((B, 1), place), cache)
        actual.append(item)
    np.testing.assert_allclose(jnp.concatenate(actual, 1), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.slow
def test_segments_and_paddings_hide_what_they_hide_in_other_attention():
    layer = attention(q_lora_rank=4)
    run = jax.jit(lambda x, **what: layer(x, **what)[0])
    segments = jnp.asarray([[1, 1, 1, 2, 2, 2]] * B)
    positions = jnp.asarray([[0, 1, 2, 0, 1, 2]] * B)
    actual = run(X, segment_ids=segments, positions=positions)
    alone = run(X[:, 3:])
    np.testing.assert_allclose(actual[:, 3:], alone, rtol=1e-5, atol=1e-5)
    padded = run(X, paddings=jnp.asarray([[1.0, 0, 0, 0, 0, 0]] * B))
    shifted = run(X[:, 1:])  # What turns together keeps its distance.
    np.testing.assert_allclose(padded[:, 1:], shifted, rtol=2e-4, atol=2e-4)
    with pytest.raises(ConfigError, match="atten_mask"):
        run(X, atten_mask=jnp.zeros((1, 1, T, T)))


def test_all_of_its_matrices_split_as_its_mapping_says():
    layer = nnx.eval_shape(
        lambda: MultiHeadLatentAttention(
            D,
            N,
            q_lora_rank=4,
            **SIZES,
            weight_split_dims_mapping=("data", "mdl", None),
            rngs=nnx.Rngs(0),
        )
    )
    names = ("query_latent", "query_up", "key_value_latent", "key_value", "post")
    actual = {name: getattr(layer, name).w.get_metadata("split_dims_mapping") for name in names}
    latents = dict.fromkeys(("query_latent", "key_value_latent"), ("data", None))
    assert actual == latents | dict.fromkeys(
        ("query_up", "key_value", "post"), ("data", "mdl", None)
    )
