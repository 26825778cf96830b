"""What can be sampled, and how often, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.decode import Sampling
from praxis_lite.errors import ConfigError

LOGITS = np.random.default_rng(9).normal(scale=1.5, size=(5, 13)).astype(np.float32)
NUM_DRAWS = 20_011


def probabilities(logits, temperature=1.0, top_k=0, top_p=1.0):
    """Returns what each token is drawn with: by sorting, token by token."""
    result = np.zeros(logits.shape)
    for row, out in zip(logits.astype(np.float64) / temperature, result, strict=True):
        order = np.argsort(-row)[: top_k or None]
        probs = np.exp(row[order] - row.max())
        probs /= probs.sum()
        kept = np.searchsorted(np.cumsum(probs), top_p) + 1 if top_p < 1 else len(order)
        out[order[:kept]] = probs[:kept] / probs[:kept].sum()
    return result


SETTINGS = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 2.5},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_k of all": {"temperature": 1.0, "top_k": 99},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "top_p tiny": {"temperature": 1.0, "top_p": 1e-6},
    "all": {"temperature": 1.3, "top_k": 7, "top_p": 0.9},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_filtered_logits_are_the_distribution_that_numpy_gives(name):
    filtered = Sampling(**SETTINGS[name]).filtered_logits(jnp.asarray(LOGITS))
    wanted = probabilities(LOGITS, **SETTINGS[name])
    np.testing.assert_array_equal(np.isfinite(filtered), wanted > 0)
    np.testing.assert_allclose(jax.nn.softmax(filtered, axis=-1), wanted, atol=1e-6)


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "all"])
def test_tokens_are_drawn_as_often_as_they_are_likely(name):
    draw = jax.jit(Sampling(**SETTINGS[name]))
    ids = np.asarray(draw(jnp.tile(jnp.asarray(LOGITS), (NUM_DRAWS, 1)), jax.random.key(17)))
    assert ids.dtype == np.int32
    wanted = probabilities(LOGITS, **SETTINGS[name])
    for row in range(len(LOGITS)):
        found = np.bincount(ids[row :: len(LOGITS)], minlength=13) / NUM_DRAWS
        assert (found[wanted[row] == 0] == 0).all()
        # Five standard errors of a frequency.
        error = 5 * np.sqrt(wanted[row] * (1 - wanted[row]) / NUM_DRAWS)
        assert (np.abs(found - wanted[row]) <= error).all()


def test_greedy_takes_the_most_likely_token_whatever_the_key():
    for seed in (0, 1):
        ids = Sampling()(jnp.asarray(LOGITS), jax.random.key(seed))
        np.testing.assert_array_equal(ids, LOGITS.argmax(axis=-1))


def test_top_k_of_one_is_greedy():
    ids = Sampling(temperature=3.0, top_k=1)(jnp.asarray(LOGITS), jax.random.key(0))
    np.testing.assert_array_equal(ids, LOGITS.argmax(axis=-1))


def test_one_key_gives_one_choice_and_another_another():
    draw, many = Sampling(temperature=1.0), jnp.tile(jnp.asarray(LOGITS), (11, 1))
    first, same, other = (draw(many, jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(first, same)
    assert (first != other).any()


@pytest.mark.parametrize(
    "name, value",
    [("temperature", -0.1), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1),
     ("temperature", float("nan"))],
)
def test_a_value_out_of_range_names_the_setting(name, value):
    with pytest.raises(ConfigError, match=rf"Sampling\.{name} is {value}"):
        Sampling(**{name: value})
