"""The routers of Qwen3 and GPT-OSS, by NumPy from their definitions; DeepSeek-V3's has its own."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from praxis_lite.layers import TransformerFeedForwardMoe

B, T, D, F, E, K = 2, 5, 6, 4, 7, 3
RNG = np.random.default_rng(8)
X = RNG.normal(size=(B, T, D)).astype(np.float32)
PADDINGS = np.zeros((B, T), np.float32)
PADDINGS[1, 3:] = 1.0


def layer_of(**settings):
    layer = TransformerFeedForwardMoe(
        D,
        F,
        num_experts=E,
        num_experts_per_token=K,
        gating_func="top_k",
        dropless=True,
        use_gated_activation=True,
        activation="silu",
        rngs=nnx.Rngs(3),
        **settings,
    )
    if settings.get("has_bias"):
        for name in ("gate_bias", "bi_0", "bi_gate_0", "bo_0"):
            variable = getattr(layer, name)
            drawn = RNG.normal(size=variable.shape).astype(np.float32)
            variable.set_value(jnp.asarray(drawn))
    return layer


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def outputs_by_numpy(layer, route, expert_of_token):
    """Returns [B, T, D]: by token, the sum over its experts of gate times output."""
    x = np.asarray(layer.layer_norm(X), np.float64)
    result = np.zeros(X.shape)
    for b, t in np.ndindex(B, T):
        if PADDINGS[b, t] == 0:
            for expert, gate in route(x[b, t]):
                result[b, t] += gate * expert_of_token(expert, x[b, t])
    return result


def weights_of(layer):
    return {
        name: np.asarray(getattr(layer, name)[...], np.float64)
        for name in ("gate", "gate_bias", "wi_0", "wi_gate_0", "wo_0", "bi_0", "bi_gate_0", "bo_0")
        if getattr(layer, name) is not None
    }


def actual_outputs(layer):
    return (
        np.asarray(
            nnx.jit(lambda layer: layer(jnp.asarray(X), paddings=jnp.asarray(PADDINGS)))(layer)
        )
        - X
    )


def test_qwen3_normalizes_the_probabilities_of_the_best_of_all_experts():
    """Qwen3MoeSparseMoeBlock with norm_topk_prob: softmax over all, the best K, divided by sums."""
    layer = layer_of()
    w = weights_of(layer)

    def route(x):
        probs = softmax(x @ w["gate"])
        best = np.argsort(-probs)[:K]
        return zip(best, probs[best] / probs[best].sum(), strict=True)

    def expert(e, x):
        gate = x @ w["wi_gate_0"][e]
        return (gate / (1 + np.exp(-gate)) * (x @ w["wi_0"][e])) @ w["wo_0"][e]

    expected = outputs_by_numpy(layer, route, expert)
    np.testing.assert_allclose(actual_outputs(layer), expected, rtol=1e-4, atol=1e-5)


def test_gpt_oss_takes_the_softmax_of_the_best_logits():
    """GptOssTopKRouter and GptOssExperts: logits with a bias; a clamped gate times (up + 1)."""
    layer = layer_of(
        score_func="softmax_of_chosen", has_bias=True, swiglu_limit=1.5, swiglu_alpha=1.702
    )
    w = weights_of(layer)

    def route(x):
        logits = x @ w["gate"] + w["gate_bias"]
        best = np.argsort(-logits)[:K]
        return zip(best, softmax(logits[best]), strict=True)

    def expert(e, x):
        gate = np.minimum(x @ w["wi_gate_0"][e] + w["bi_gate_0"][e], 1.5)
        up = np.clip(x @ w["wi_0"][e] + w["bi_0"][e], -1.5, 1.5)
        hidden = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
        return hidden @ w["wo_0"][e] + w["bo_0"][e]

    expected = outputs_by_numpy(layer, route, expert)
    np.testing.assert_allclose(actual_outputs(layer), expected, rtol=1e-4, atol=1e-5)


def test_deepseek_v3_weighs_by_scores_without_the_correction():
    """DeepseekV3TopkRouter, one group: sigmoids, the best with the correction, times a scale."""
    layer = layer_of(score_func="sigmoid", gates_scale=2.5)
    correction = RNG.normal(size=E)
    layer.gate_correction.set_value(jnp.asarray(correction, jnp.float32))
    w = weights_of(layer)

    def route(x):
        scores = 1 / (1 + np.exp(-x @ w["gate"]))
        best = np.argsort(-(scores + correction))[:K]
        return zip(best, 2.5 * scores[best] / scores[best].sum(), strict=True)

    def expert(e, x):
        gate = x @ w["wi_gate_0"][e]
        return (gate / (1 + np.exp(-gate)) * (x @ w["wi_0"][e])) @ w["wo_0"][e]

    expected = outputs_by_numpy(layer, route, expert)
    np.testing.assert_allclose(actual_outputs(layer), expected, rtol=1e-4, atol=1e-5)
