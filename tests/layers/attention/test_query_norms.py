"""Norms of queries and keys before they rotate, over a head or over all, and biases, by NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite.layers import DotProductAttention, RmsNorm

B, T, D, N, G, K = 2, 5, 7, 6, 3, 4


def attention(**settings):
    layer = DotProductAttention(
        D,
        N,
        dim_per_head=K,
        num_kv_heads=G,
        hidden_dim=N * K,
        use_rotary_position_emb=True,
        internal_enable_per_dim_scale=False,
        ln_tpl=functools.partial(RmsNorm, epsilon=1e-5),
        ln_before_rotary=True,
        rngs=nnx.Rngs(0),
        **settings,
    )
    rng = np.random.default_rng(1)
    state = nnx.state(layer, nnx.Param)
    for _, weight in nnx.to_flat_state(state):
        weight.set_value(jnp.asarray(rng.normal(size=weight.shape), jnp.float32))
    nnx.update(layer, state)
    return layer


def by_numpy(layer, x, over_heads):
    x = x.astype(np.float64)

    def projected(part):
        heads = np.einsum("btd,dnk->btnk", x, np.asarray(part.w[...], np.float64))
        return heads if part.b is None else heads + np.asarray(part.b[...])

    def normed(heads, norm):
        shape = heads.shape
        heads = heads.reshape(*shape[:2], -1) if over_heads else heads
        heads = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-5)
        return (heads * np.asarray(norm.scale[...])).reshape(shape)

    def rotated(heads):
        pairs = heads[..., : K // 2] + 1j * heads[..., K // 2 :]
        angle = np.arange(T)[:, None, None] / 10_000.0 ** (np.arange(0, K, 2) / K)
        pairs = pairs * np.exp(1j * angle)
        return np.concatenate([pairs.real, pairs.imag], -1)

    q = rotated(normed(projected(layer.query), layer.layer_norm_q)) / np.sqrt(K)
    k = rotated(normed(projected(layer.key), layer.layer_norm_k)).repeat(N // G, 2)
    v = projected(layer.value).repeat(N // G, 2)
    logits = np.einsum("btnk,bsnk->bnts", q, k)
    logits = np.where(np.tril(np.ones((T, T), bool)), logits, -np.inf)
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    actual = np.einsum("bnts,bsnk,dnk->btd", probs, v, np.asarray(layer.post.w[...]))
    return actual if layer.post.b is None else actual + np.asarray(layer.post.b[...])


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"use_bias": False}, marks=pytest.mark.slow),
        {"use_bias": False, "ln_over_heads": True},
        {"use_bias": True, "use_output_bias": False},
        pytest.param({"use_bias": False, "use_output_bias": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_outputs_equal_numpy(settings):
    layer = attention(**settings)
    x = np.random.default_rng(2).normal(size=(B, T, D)).astype(np.float32)
    actual, _ = jax.jit(lambda x: layer(x))(x)
    expected = by_numpy(layer, x, settings.get("ln_over_heads", False))
    np.testing.assert_allclose(actual, expected, atol=3e-5 * np.abs(expected).max())
    wide = settings.get("ln_over_heads", False)
    assert layer.layer_norm_q.scale.shape == ((N * K,) if wide else (K,))
    assert layer.layer_norm_k.scale.shape == ((G * K,) if wide else (K,))
    assert (layer.query.b is None) == (not settings["use_bias"])
    assert (layer.post.b is None) == (not settings.get("use_output_bias", settings["use_bias"]))
