"""Routing against loops in NumPy: choices, slots, the moves there and back, losses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.layers.moe import routing as moe_routing
from praxis_lite.layers.moe.dispatch import combine, dispatch, slots_of

G, S, D, E, K = 3, 13, 5, 7, 3
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(scale=1.5, size=(G, S, E)).astype(np.float32)
PROBS = np.asarray(jax.nn.softmax(LOGITS, axis=-1))
IS_TOKEN = RNG.uniform(size=(G, S)) > 0.2


def by_loops(probs, is_token, num_chosen, capacity):
    """Returns experts, gates and slots, token by token."""
    experts = np.zeros((G, S, num_chosen), int)
    gates, slots = np.zeros(experts.shape), np.full(experts.shape, E * capacity)
    for g in range(G):
        for s in range(S):
            experts[g, s] = np.argsort(-probs[g, s])[:num_chosen]
            if is_token[g, s]:
                chosen = probs[g, s, experts[g, s]].astype(np.float64)
                gates[g, s] = chosen / chosen.sum() if num_chosen > 1 else chosen
        taken = [0] * E
        for k in range(num_chosen):
            for s in range(S):
                expert = experts[g, s, k]
                if is_token[g, s] and taken[expert] < capacity:
                    slots[g, s, k] = expert * capacity + taken[expert]
                    taken[expert] += 1
    return experts, gates, slots


@functools.partial(jax.jit, static_argnums=(0, 1))
def routed(num_chosen, capacity):
    experts, gates, is_routed = moe_routing.choose_experts(
        jnp.asarray(LOGITS), jnp.asarray(IS_TOKEN), None, num_chosen, "all", 0.0
    )
    return experts, gates, slots_of(experts, is_routed, E, capacity)


load_balance_loss = jax.jit(moe_routing.load_balance_loss)


@pytest.mark.parametrize("num_chosen, capacity", [(1, 2), (3, 4), (E, S)])
def test_choices_gates_and_slots_are_those_of_a_loop(num_chosen, capacity):
    actual, expected = routed(num_chosen, capacity), by_loops(PROBS, IS_TOKEN, num_chosen, capacity)
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_allclose(actual[1], expected[1], atol=1e-6)
    np.testing.assert_array_equal(actual[2], expected[2])
    has_dropped = (expected[2][IS_TOKEN] == E * capacity).any()
    assert has_dropped == (capacity < S)
    assert (expected[2][~IS_TOKEN] == E * capacity).all()


def test_tokens_go_to_their_slots_and_come_back_gated():
    """Values and gradients, against one-hot matrices that JAX differentiates by itself."""
    capacity = 3
    _, gates, slots = routed(K, capacity)
    num_slots = E * capacity
    rng = np.random.default_rng(1)
    x = rng.normal(size=(G, S, D)).astype(np.float32)
    scale = rng.normal(size=(G, num_slots, D)).astype(np.float32)

    def by_gathers(x, gates):
        return combine(jnp.sin(dispatch(x, slots, num_slots)) * scale, slots, gates)

    def by_matrices(x, gates):
        is_in_GSKN = jax.nn.one_hot(slots, num_slots)  # All zeros for a slot of num_slots.
        y = jnp.sin(jnp.einsum("gsd,gskn->gnd", x, is_in_GSKN)) * scale
        return jnp.einsum("gnd,gskn,gsk->gsd", y, is_in_GSKN, gates)

    weights = rng.normal(size=x.shape).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def outputs_and_grads(f, x, gates):
        def objective(x, gates):
            y = f(x, gates)
            return jnp.sum(y * weights), y

        return jax.grad(objective, argnums=(0, 1), has_aux=True)(x, gates)

    actual, expected = (outputs_and_grads(f, x, gates) for f in (by_gathers, by_matrices))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
    "group_size, num_experts, factor, capacity_dim, wanted",
    [
        (64, 8, 2.0, 0, 16),  # 64 x 2 / 8.
        (64, 7, 1.0, 0, 12),  # 9, rounded up to a multiple of 4.
        (64, 7, 1.0, 10, 10),  # capacity_dim is enough, and is not rounded.
        (64, 8, 0.0, 3, 3),
        (1, 8, 2.0, 0, 1),  # 0, but a token of a decode step must go somewhere.
        (5, 2, 2.0, 0, 5),  # 8: more than there are.
    ],
)
def test_capacity(group_size, num_experts, factor, capacity_dim, wanted):
    assert moe_routing.expert_capacity(group_size, num_experts, factor, capacity_dim) == wanted


def test_load_balance_loss_is_that_of_a_loop_and_1_when_balanced():
    first = PROBS.argmax(-1)
    expected = np.mean(
        [
            E
            * sum(
                np.mean((first[g] == e) & IS_TOKEN[g]) * np.mean(PROBS[g, :, e] * IS_TOKEN[g])
                for e in range(E)
            )
            for g in range(G)
        ]
    )
    actual = load_balance_loss(PROBS, first, IS_TOKEN, np.ones((G, S), bool))
    assert float(actual) == pytest.approx(expected, rel=1e-5)
    balanced = load_balance_loss(
        np.full((1, E, E), 1 / E, np.float32), np.arange(E)[None], *[np.ones((1, E), bool)] * 2
    )
    assert float(balanced) == pytest.approx(1.0)


@pytest.mark.parametrize("num_groups", [1, 4], ids=["groups_of_rows", "a_group_per_row"])
def test_rows_of_padding_alone_leave_the_load_balance_loss_as_it_is(num_groups):
    rng = np.random.default_rng(7)
    probs = rng.dirichlet(np.ones(E), (4, 6)).astype(np.float32)
    is_token = np.ones((4, 6), bool)
    is_token[0, 4:] = False

    def loss(num_rows, num_groups):
        in_row = np.broadcast_to(is_token[:num_rows].any(1, keepdims=True), (num_rows, 6))
        arrays = probs[:num_rows], probs[:num_rows].argmax(-1), is_token[:num_rows], in_row
        grouped = (x.reshape(num_groups, -1, *x.shape[2:]) for x in arrays)
        return float(load_balance_loss(*grouped))

    expected = loss(2, max(num_groups // 2, 1))
    is_token[2:] = False
    assert loss(4, num_groups) == pytest.approx(expected, rel=1e-6)


def test_router_z_loss_is_the_mean_over_tokens():
    z = np.log(np.exp(LOGITS.astype(np.float64)).sum(-1)) ** 2
    loss = jax.jit(moe_routing.router_z_loss)
    assert float(loss(LOGITS, IS_TOKEN)) == pytest.approx(z[IS_TOKEN].mean(), rel=1e-5)
    assert float(loss(LOGITS, np.zeros((G, S), bool))) == 0.0


def test_a_sampled_second_expert_is_drawn_from_the_rest():
    num = 4001
    logits = np.broadcast_to(np.float32([2.0, 1.0, 0.0, -1.0]), (1, num, 4))

    @jax.jit
    def draw(key):
        probs, is_token = jax.nn.softmax(logits), jnp.ones((1, num), bool)
        return moe_routing.sampled_second_expert(jnp.asarray(logits), probs, is_token, key)

    experts, gates = draw(jax.random.key(3))
    assert (experts[..., 0] == 0).all()
    np.testing.assert_allclose(np.sum(gates, -1), 1.0, atol=1e-6)
    share = np.bincount(np.asarray(experts[0, :, 1]), minlength=4) / num
    expected = np.exp([1.0, 0.0, -1.0])
    np.testing.assert_allclose(share, [0, *expected / expected.sum()], atol=0.03)


def test_a_random_second_expert_is_used_in_proportion_to_its_gate():
    gates = np.broadcast_to(np.float32([0.8, 0.2]), (1, 4001, 2))

    @jax.jit
    def draw(key):
        return [
            moe_routing.is_second_expert_used(jnp.asarray(gates), threshold, key)
            for threshold in (0.5, 0.0)
        ]

    used, always = map(np.asarray, draw(jax.random.key(1)))
    assert used[..., 0].all()
    assert used[..., 1].mean() == pytest.approx(0.4, abs=0.03)
    assert always.all()


def test_expert_load_is_relative_to_the_mean():
    experts, gates, _ = routed(K, S)

    @jax.jit
    def load_of(experts, gates):
        return moe_routing.expert_load(moe_routing.expert_choices(experts, gates > 0, E))

    load = load_of(experts, gates)
    count = np.bincount(np.asarray(experts)[IS_TOKEN].reshape(-1), minlength=E)
    np.testing.assert_allclose(load, count / count.mean(), rtol=1e-6)


def test_the_mean_of_a_sentence_is_of_its_tokens_alone_and_padding_has_none():
    # In the last row each token is a sentence, so that there are as many as tokens.
    segments = np.array([[1, 1, 2, 3, 0], [1, 0, 0, 0, 0], [1, 2, 3, 4, 5]])
    x = RNG.normal(size=(3, 5, D)).astype(np.float32)
    actual = jax.jit(moe_routing.sentence_means)(x, segments)
    for row, token in np.ndindex(3, 5):
        is_same = segments[row] == segments[row, token]
        expected = x[row, is_same].mean(axis=0) if segments[row, token] else np.zeros(D)
        np.testing.assert_allclose(actual[row, token], expected, rtol=1e-6, atol=1e-6)
