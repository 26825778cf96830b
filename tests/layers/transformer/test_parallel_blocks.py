"""A block whose two parts read the same, and experts with settings of other libraries' models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError
from praxis_lite.layers import Transformer, TransformerFeedForwardMoe

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 6)), jnp.float32)


def test_attention_and_feed_forward_read_the_same_and_are_both_added():
    @jax.jit
    def run(x):
        block = Transformer(6, 11, 2, is_parallel=True, rngs=nnx.Rngs(0))
        attended, _ = block.self_attention(block.layer_norm(x))
        ff = block.ff_layer
        hidden = jax.nn.relu(ff.layer_norm(x) @ ff.ffn_layer1.linear.w[...])
        # Biases start as zeros.
        return block(x)[0], x + attended + hidden @ ff.ffn_layer2.linear.w[...]

    actual, expected = run(X)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"norm_policy": "post_skip"}, "is_parallel cannot .*norm_policy 'post_skip'"),
        ({"use_cross_attention": True}, "is_parallel cannot .*use_cross"),
    ],
)
def test_what_cannot_be_parallel_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        Transformer(6, 11, 2, is_parallel=True, rngs=nnx.Rngs(0), **settings)


@pytest.mark.slow
@pytest.mark.parametrize("normalizes", [True, False])
def test_gates_are_the_probabilities_or_add_up_to_one(normalizes):
    layer = TransformerFeedForwardMoe(
        6,
        11,
        expert_hidden_dims=7,
        num_experts=5,
        num_experts_per_token=3,
        gating_func="top_k",
        dropless=True,
        normalize_gates=normalizes,
        activation="silu",
        rngs=nnx.Rngs(0),
    )
    assert layer.wi_0.shape == (5, 6, 7)
    actual = np.asarray(nnx.jit(lambda layer: layer(X))(layer))
    x = np.asarray(layer.layer_norm(X), np.float64)
    gate, wi, wo = (np.asarray(w[...], np.float64) for w in (layer.gate, layer.wi_0, layer.wo_0))
    logits = x @ gate
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    for b, t in np.ndindex(2, 5):
        best = np.argsort(-probs[b, t])[:3]
        gates = probs[b, t, best] / (probs[b, t, best].sum() if normalizes else 1.0)
        hidden = [x[b, t] @ wi[e] for e in best]
        result = sum(
            g * ((h / (1 + np.exp(-h))) @ wo[e])
            for g, h, e in zip(gates, hidden, best, strict=True)
        )
        np.testing.assert_allclose(actual[b, t], np.asarray(X)[b, t] + result, atol=1e-5)


def test_gates_that_do_not_add_up_are_for_tokens_that_choose():
    with pytest.raises(ConfigError, match="normalize_gates"):
        TransformerFeedForwardMoe(
            6,
            11,
            num_experts=5,
            gating_func="expert_choice",
            normalize_gates=False,
            rngs=nnx.Rngs(0),
        )
