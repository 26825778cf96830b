"""Pax's Adam against optax's and by hand; that it is Pax's, the goldens and the options show."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite import ConfigError
from praxis_lite.optimizers import adam

SHAPES = {"b": (7,), "w": (5, 7)}


def draw(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def trained(optimizer, num_steps, dtype=jnp.float32):
    """Returns (weights, optimizer state) after some steps."""
    weights = jax.tree.map(lambda w: jnp.asarray(w, dtype), draw(0))
    state = optimizer.init(weights)
    for i in range(num_steps):
        updates, state = optimizer.update(draw(1 + i), state, weights)
        weights = optax.apply_updates(weights, updates)
    return weights, state


def test_without_clipping_it_is_optax_adam_with_slots_of_corrected_bias():
    settings = dict(beta1=0.8, beta2=0.95, epsilon=1e-3, epsilon_root=0.1)
    weights, state = trained(adam(0.1, clip_threshold=0.0, **settings), 7)
    expected, optax_state = trained(optax.adam(0.1, b1=0.8, b2=0.95, eps=1e-3, eps_root=0.1), 7)
    for name in SHAPES:
        np.testing.assert_allclose(weights[name], expected[name], rtol=1e-5, atol=1e-6)
        corrected = optax_state[0].mu[name] / (1 - 0.8**7), optax_state[0].nu[name] / (1 - 0.95**7)
        np.testing.assert_allclose(state[0].m[name], corrected[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state[0].v[name], corrected[1], rtol=1e-5)
    assert state[0].count == 7


@pytest.mark.parametrize(
    "clip_threshold, of_all, of_one", [(0.25, 0.25, 0.5), (0.75, 0.75, 1.0), (2.0, 1.0, 1.0)]
)
def test_each_tensor_is_clipped_by_the_root_mean_square_of_its_own_update(
    clip_threshold, of_all, of_one
):
    # The first update is the gradient's sign: its root mean square is 1, and 1/2 for one of four.
    grads = {"all": np.array([1.0, -3.0, 5.0]), "one": np.array([0.0, 0.0, 0.0, 7.0])}
    grads = jax.tree.map(np.float32, grads)
    optimizer = adam(1.0, clip_threshold=clip_threshold)
    updates, _ = optimizer.update(grads, optimizer.init(grads), grads)
    np.testing.assert_allclose(updates["all"], of_all * np.array([-1.0, 1.0, -1.0]), rtol=2e-6)
    np.testing.assert_allclose(updates["one"], of_one * np.array([0.0, 0.0, 0.0, -1.0]), rtol=2e-6)


def test_weight_decay_is_added_after_the_clipping():
    weights, grads = draw(0), draw(1)
    optimizer = adam(0.1, epsilon=0.0, clip_threshold=0.25, weight_decay=3.0)
    updates, _ = optimizer.update(grads, optimizer.init(weights), weights)
    for name in SHAPES:
        expected = -0.1 * (0.25 * np.sign(grads[name]) + 3.0 * weights[name])
        np.testing.assert_allclose(updates[name], expected, rtol=1e-5, atol=1e-6)


def test_the_first_update_has_no_rounding_of_the_bias_correction():
    """optax divides (1 - 0.9999) g g by 1 - 0.9999 ** 1, a difference of rounded numbers."""
    grads = draw(1)
    optimizer = adam(1.0, beta2=0.9999, epsilon=0.0, clip_threshold=0.0)
    updates, _ = optimizer.update(grads, optimizer.init(grads), grads)
    for name in SHAPES:
        np.testing.assert_allclose(updates[name], -np.sign(grads[name]), rtol=3e-7)


def test_slots_of_bfloat16_weights_are_float32_and_remain_so():
    for num_steps in (0, 1):
        weights, state = trained(adam(0.1), num_steps, jnp.bfloat16)
        slots = jax.tree.leaves((state[0].m, state[0].v))
        assert {str(slot.dtype) for slot in slots} == {"float32"}
        assert {str(weight.dtype) for weight in weights.values()} == {"bfloat16"}


@pytest.mark.parametrize(
    "setting, value",
    [("beta1", 1.0), ("beta2", -0.1), ("beta2", "0.9"), ("epsilon", -1e-8), ("epsilon_root", -1.0),
     ("clip_threshold", -1.0), ("clip_threshold", None), ("weight_decay", float("nan"))],
)  # fmt: skip
def test_a_setting_out_of_range_is_named(setting, value):
    with pytest.raises(ConfigError, match=f"{setting}.*{value!r}"):
        adam(0.1, **{setting: value})
