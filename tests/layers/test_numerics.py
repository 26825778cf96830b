"""Dropout's expectation, causality, bfloat16 near float32, and attention against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import layers
from praxis_lite.core import NnxModel


def test_dropout_keeps_the_expected_value_and_is_off_without_a_key():
    layer, x = layers.Dropout(0.3), jnp.full((101, 103), 2.0)
    outputs = np.asarray(layer(x, jax.random.key(3)))
    # Standard error of the mean: 2 sqrt(0.3 / 0.7 / 10403) = 0.013.
    assert outputs.mean() == pytest.approx(2.0, abs=0.05)
    assert (outputs == 0).mean() == pytest.approx(0.3, abs=0.02)
    np.testing.assert_allclose(outputs[outputs != 0], 2.0 / 0.7, rtol=1e-6)
    assert layer(x, None) is x
    assert layers.Dropout(0.0)(x, jax.random.key(3)) is x


def test_dropout_keeps_bfloat16_and_differs_by_key():
    layer, x = layers.Dropout(0.5), jnp.ones((7, 13), jnp.bfloat16)
    first, second = (layer(x, jax.random.key(i)) for i in range(2))
    assert first.dtype == jnp.bfloat16
    assert (first != second).any()


def lm(dtype=jnp.float32, **options):
    return NnxModel(
        functools.partial(
            layers.TransformerLm, 29, 12, 17, 3, 2, dim_per_head=4, fprop_dtype=dtype, **options
        )
    )


@pytest.fixture(scope="module")
def mdl_vars():
    return jax.jit(lm().init)(jax.random.key(0))


IDS = np.random.default_rng(4).integers(0, 29, (3, 7), dtype=np.int32)


def logits_of(model, mdl_vars, ids):
    return jax.jit(lambda v, ids: model.module(v)(ids)[0])(mdl_vars, ids)


@pytest.mark.slow
def test_bfloat16_is_close_to_float32_and_keeps_float32_weights_and_logits(mdl_vars):
    half = lm(jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(jax.eval_shape(half.init, jax.random.key(0)))} == {
        jnp.dtype("float32")
    }
    actual, expected = logits_of(half, mdl_vars, IDS), logits_of(lm(), mdl_vars, IDS)
    assert actual.dtype == jnp.float32
    # bfloat16 keeps 8 bits of mantissa; a handful of roundings one after the other.
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert 1e-5 < error < 0.03  # Above nothing: otherwise bfloat16 was not used.


def test_no_position_sees_a_later_token(mdl_vars):
    changed = IDS.copy()
    changed[:, 4] = (changed[:, 4] + 1) % 29
    before, after = (np.asarray(logits_of(lm(), mdl_vars, ids)) for ids in (IDS, changed))
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert (np.abs(before[:, 4:] - after[:, 4:]).max(axis=-1) > 1e-4).all()


def test_dropout_of_the_model_needs_a_key(mdl_vars):
    model = lm(residual_dropout_prob=0.4)
    np.testing.assert_array_equal(logits_of(model, mdl_vars, IDS), logits_of(lm(), mdl_vars, IDS))
    run = jax.jit(lambda v, ids, key: model.module(v)(ids, key=key)[0])
    first, same, second = (run(mdl_vars, IDS, jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(first, same)
    assert np.abs(first - second).max() > 1e-2


def test_attention_equals_numpy_with_rotary_positions_that_start_anywhere():
    num_heads, dim = 3, 4
    layer = layers.DotProductAttention(
        5,
        num_heads,
        dim_per_head=dim,
        use_bias=False,
        use_rotary_position_emb=True,
        scale_query_by_dim_per_head=True,
        internal_enable_per_dim_scale=False,
        rngs=nnx.Rngs(1),
    )
    x = np.random.default_rng(5).normal(size=(2, 6, 5)).astype(np.float32)
    actual = jax.jit(lambda x: layer(x, positions=jnp.arange(6)[None])[0])(x)

    def rotate(heads):
        angle = np.arange(6)[:, None] / 10_000.0 ** (np.arange(0, dim, 2) / dim)
        turn = np.exp(1j * angle)[None, :, None, :]
        turned = (heads[..., : dim // 2] + 1j * heads[..., dim // 2 :]) * turn
        return np.concatenate([turned.real, turned.imag], axis=-1)

    q, k, v = (
        np.einsum("btd,dnk->btnk", x, np.asarray(p.w[...], np.float64))
        for p in (layer.query, layer.key, layer.value)
    )
    logits = np.einsum("btnk,bsnk->bnts", rotate(q), rotate(k)) / np.sqrt(dim)
    logits = np.where(np.tril(np.ones((6, 6), bool)), logits, -np.inf)
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    encoded = np.einsum("bnts,bsnk->btnk", probs, v)
    expected = np.einsum("btnk,dnk->btd", encoded, np.asarray(layer.post.w[...]))
    np.testing.assert_allclose(actual, expected, atol=1e-6)
