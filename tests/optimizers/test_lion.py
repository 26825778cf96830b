"""Pax's Lion against optax's and by hand; that it is Pax's, the goldens and the options show."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite import ConfigError
from praxis_lite.optimizers import lion


def draw(seed: int) -> dict[str, np.ndarray]:
    return {"w": np.random.default_rng(seed).normal(size=(5, 7)).astype(np.float32)}


def trained(optimizer, num_steps):
    weights, state = draw(0), optimizer.init(draw(0))
    for i in range(num_steps):
        updates, state = optimizer.update(draw(1 + i), state, weights)
        weights = optax.apply_updates(weights, updates)
    return weights["w"], state


def test_with_a_float32_momentum_it_is_optax_lion():
    settings = dict(beta1=0.7, beta2=0.8, weight_decay=0.3, m_dtype=jnp.float32)
    weights, state = trained(lion(0.1, **settings), 7)
    expected, optax_state = trained(optax.lion(0.1, b1=0.7, b2=0.8, weight_decay=0.3), 7)
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state[0].m["w"], optax_state[0].mu["w"], rtol=1e-5, atol=1e-6)


def test_a_bfloat16_momentum_is_rounded_once_a_step():
    _, state = trained(lion(0.1, beta2=0.8), 3)
    m = np.zeros((5, 7), np.float32)
    for i in range(3):
        # XLA rounds to the nearest, as NumPy's cast does.
        m = (0.2 * draw(1 + i)["w"] + 0.8 * m).astype(jnp.bfloat16).astype(np.float32)
    assert state[0].m["w"].dtype == jnp.bfloat16
    # Where float32 rounds another way just before a tie, the last bit may differ.
    np.testing.assert_allclose(state[0].m["w"].astype(jnp.float32), m, rtol=2**-7)
    assert np.mean(state[0].m["w"].astype(jnp.float32) == m) > 0.97


@pytest.mark.parametrize("clip_threshold, size", [(0.25, 0.25), (1.0, 1.0), (0.0, 1.0)])
def test_an_update_is_clipped_only_by_a_threshold_below_1(clip_threshold, size):
    optimizer = lion(0.5, clip_threshold=clip_threshold, weight_decay=3.0)
    updates, _ = optimizer.update(draw(1), optimizer.init(draw(0)), draw(0))
    expected = -0.5 * (size * np.sign(draw(1)["w"]) + 3.0 * draw(0)["w"])
    np.testing.assert_allclose(updates["w"], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "setting, value",
    [("beta1", 1.0), ("beta2", -0.1), ("clip_threshold", -1), ("weight_decay", -1)],
)
def test_a_setting_out_of_range_is_named(setting, value):
    with pytest.raises(ConfigError, match=f"{setting}.*{value!r}"):
        lion(0.1, **{setting: value})


def test_the_state_has_the_momentum_only():
    slots = jax.tree.leaves(lion(0.1).init(draw(0)))
    assert [(slot.shape, slot.dtype) for slot in slots] == [((5, 7), jnp.bfloat16)]
