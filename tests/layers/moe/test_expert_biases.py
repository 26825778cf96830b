"""Biases of experts and of the router, and GPT-OSS's clamped activation, by NumPy."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite.layers import TransformerFeedForwardMoe
from tests.support.marks import slow_but

B, T, D, F, E, NUM = 2, 6, 5, 4, 5, 3
X = np.random.default_rng(6).normal(size=(B, T, D)).astype(np.float32)


@functools.cache
def layer_of(dropless, swiglu_limit):
    layer = TransformerFeedForwardMoe(
        D,
        F,
        num_experts=E,
        num_experts_per_token=NUM,
        gating_func="top_k",
        dropless=dropless,
        unadjusted_expert_capacity_factor=float(E),
        use_gated_activation=True,
        activation="silu",
        score_func="softmax_of_chosen",
        has_bias=True,
        swiglu_limit=swiglu_limit,
        rngs=nnx.Rngs(0),
    )
    rng, state = np.random.default_rng(8), nnx.state(layer, nnx.Param)
    for _, weight in nnx.to_flat_state(state):
        weight.set_value(jnp.asarray(rng.normal(size=weight.shape), jnp.float32))
    nnx.update(layer, state)
    return layer


@pytest.mark.parametrize("dropless", slow_but([True], [True, False]))
@pytest.mark.parametrize("limit", slow_but([0.7], [None, 0.7]))
def test_outputs_equal_numpy(dropless, limit):
    layer = layer_of(dropless, limit)
    w = {
        name: np.asarray(getattr(layer, name)[...], np.float64)
        for name in ("gate", "gate_bias", "wi_0", "wi_gate_0", "wo_0", "bi_0", "bi_gate_0", "bo_0")
    }
    normed = np.asarray(layer.layer_norm(jnp.asarray(X)), np.float64)
    expected = X.astype(np.float64)
    for place in np.ndindex(B, T):
        x = normed[place]
        logits = x @ w["gate"] + w["gate_bias"]
        chosen = np.argsort(-logits)[:NUM]
        gates = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
        for e, share in zip(chosen, gates, strict=True):
            up = x @ w["wi_0"][e] + w["bi_0"][e]
            gate = x @ w["wi_gate_0"][e] + w["bi_gate_0"][e]
            if limit is None:
                hidden = up * gate / (1 + np.exp(-gate))
            else:
                gate = np.minimum(gate, limit)
                hidden = (np.clip(up, -limit, limit) + 1) * gate / (1 + np.exp(-1.702 * gate))
            expected[place] += share * (hidden @ w["wo_0"][e] + w["bo_0"][e])
    actual = nnx.jit(lambda layer, x: layer(x))(layer, jnp.asarray(X))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
