"""DeepSeek-V3's router, by NumPy: groups, the correction, gates; and shared experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError
from praxis_lite.layers import TransformerFeedForwardMoe
from praxis_lite.layers.moe.routing import experts_by_group

G, S, E, NUM = 1, 40, 12, 3
RNG = np.random.default_rng(4)
LOGITS = RNG.normal(size=(G, S, E)).astype(np.float32)
CORRECTION = RNG.normal(size=E).astype(np.float32)


def by_numpy(logits, correction, groups, taken, scale, normalize):
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    experts, gates = [], []
    for row in scores.reshape(-1, E):
        choice = row + correction
        in_groups = choice.reshape(groups, -1)
        best = np.argsort(-np.sort(in_groups, axis=1)[:, -2:].sum(1))[:taken]
        allowed = [e for e in range(E) if e // (E // groups) in best]
        chosen = sorted(allowed, key=lambda e: -choice[e])[:NUM]
        gate = row[chosen]
        gates.append(scale * (gate / gate.sum() if normalize else gate))
        experts.append(chosen)
    return np.array(experts), np.array(gates)


@pytest.mark.parametrize("groups, taken, normalize", [(1, 1, True), (4, 2, True), (3, 1, False)])
def test_experts_and_gates_equal_numpy(groups, taken, normalize):
    is_token = np.ones((G, S), bool)
    is_token[0, 3] = False

    @jax.jit
    def run(logits, correction):
        return experts_by_group(
            logits, correction, jnp.asarray(is_token), NUM, groups, taken, 2.5, normalize
        )

    experts, gates = run(LOGITS, CORRECTION)
    expected = by_numpy(LOGITS, CORRECTION, groups, taken, 2.5, normalize)
    assert (experts[0] == expected[0]).all()
    np.testing.assert_allclose(gates[0, 4:], expected[1][4:], rtol=1e-5)
    assert not gates[0, 3].any()  # Padding.


def layer_of(**settings):
    return TransformerFeedForwardMoe(
        5,
        6,
        num_experts=4,
        num_experts_per_token=2,
        gating_func="top_k",
        dropless=True,
        score_func="sigmoid",
        use_gated_activation=True,
        activation="silu",
        rngs=nnx.Rngs(0),
        **settings,
    )


@pytest.mark.slow
def test_shared_experts_are_added_for_every_token():
    x = jnp.asarray(RNG.normal(size=(2, 7, 5)), jnp.float32)
    layer = layer_of(num_shared_experts=2)
    shared = layer.shared_experts
    run = nnx.jit(lambda layer, x: layer(x) - x)
    whole = run(layer, x)
    w = {
        name: np.asarray(getattr(shared, name).w[...])
        for name in ("ffn_layer1", "ffn_layer1_gate", "ffn_layer2")
    }
    assert w["ffn_layer1"].shape == (5, 12)
    normed = np.asarray(layer.layer_norm(x))
    gate = normed @ w["ffn_layer1_gate"]
    expected = (normed @ w["ffn_layer1"] * gate / (1 + np.exp(-gate))) @ w["ffn_layer2"]
    layer.shared_experts = None
    np.testing.assert_allclose(whole - run(layer, x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_expert_groups": 3}, "num_expert_groups.*3.*4"),
        ({"num_expert_groups": 2, "num_expert_groups_per_token": 3}, "groups_per_token.*3.*2"),
        ({"score_func": "relu"}, "score_func.*'relu'"),
        ({"score_func": "softmax", "gates_scale": 2.0}, "gates_scale.*2.0.*1.0"),
        ({"gating_func": "top2"}, "gating_func.*'top2'.*'top_k'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, said):
    given = {"num_experts": 4, "gating_func": "top_k", "score_func": "sigmoid", "rngs": nnx.Rngs(0)}
    with pytest.raises(ConfigError, match=said):
        functools.partial(TransformerFeedForwardMoe, 5, 6)(**given | settings)
