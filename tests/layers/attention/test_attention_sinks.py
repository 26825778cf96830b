"""A learned logit for each head that takes weight and gives nothing, by NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError
from praxis_lite.layers import DotProductAttention

B, T, D, N, G, K = 2, 5, 7, 4, 2, 3
RNG = np.random.default_rng(3)
X = RNG.normal(size=(B, T, D)).astype(np.float32)
SINKS = RNG.normal(scale=3.0, size=N).astype(np.float32)


@functools.cache
def attention(**settings):
    layer = DotProductAttention(
        D,
        N,
        dim_per_head=K,
        num_kv_heads=G,
        hidden_dim=N * K,
        attention_sinks=True,
        internal_enable_per_dim_scale=False,
        use_bias=False,
        rngs=nnx.Rngs(0),
        **settings,
    )
    assert not layer.sinks[...].any()
    layer.sinks.set_value(jnp.asarray(SINKS))
    return layer


def test_the_sink_takes_its_share_of_each_head():
    layer = attention()
    x = X.astype(np.float64)
    heads = {
        name: np.einsum("btd,dnk->btnk", x, np.asarray(getattr(layer, name).w[...]))
        for name in ("query", "key", "value")
    }
    k, v = (heads[name].repeat(N // G, 2) for name in ("key", "value"))
    logits = np.einsum("btnk,bsnk->bnts", heads["query"] / np.sqrt(K), k)
    exp = np.exp(np.where(np.tril(np.ones((T, T), bool)), logits, -np.inf))
    probs = exp / (exp.sum(-1, keepdims=True) + np.exp(SINKS)[None, :, None, None])
    expected = np.einsum("bnts,bsnk,dnk->btd", probs, v, np.asarray(layer.post.w[...]))
    actual, _ = jax.jit(lambda x: layer(x))(X)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    # And token by token.
    cache, steps = layer.init_cache(B, T, jnp.float32), []
    step = jax.jit(lambda x, positions, cache: layer(x, positions=positions, cache=cache))
    for place in range(T):
        item, cache = step(X[:, place : place + 1], np.full((B, 1), place), cache)
        steps.append(item)
    np.testing.assert_allclose(jnp.concatenate(steps, 1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"atten_kernel": "cudnn"}, "attention_sinks"),
        ({"attention_extra_logit": 0.0}, "attention_extra_logit 0.0 .*attention_sinks"),
    ],
)
def test_what_does_not_go_with_sinks_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        attention(**settings)
