"""The least logits that may be drawn are those of NumPy's sorts, ties and -inf included."""

import jax
import numpy as np

from praxis_lite.decode.likely_logits import kth_logit, nucleus_end

R, V = 6, 101
RNG = np.random.default_rng(0)


def cases():
    """Yields float32 logits [R, V]: near, far, with ties, with many that cannot be drawn."""
    for number in range(60):
        logits = RNG.normal(scale=(0.1, 1.0, 30.0)[number % 3], size=(R, V)).astype(np.float32)
        if number % 4 == 1:
            logits = np.round(logits)
        if number % 5 == 2:
            logits[RNG.random((R, V)) < 0.4] = -np.inf
        if number % 7 == 3:
            logits[:, :4] = [0.0, -0.0, 1e-40, -1e-40]
        yield logits


def test_the_kth_logit_is_that_of_a_sort():
    kth = jax.jit(kth_logit)
    for logits in cases():
        k = RNG.integers(1, V + 1, R)
        expected = -np.sort(-logits, axis=1)[np.arange(R), k - 1]
        np.testing.assert_array_equal(np.asarray(kth(logits, k))[:, 0], expected)


def test_the_end_of_a_nucleus_is_that_of_sorted_sums():
    end = jax.jit(nucleus_end)
    for logits in cases():
        p = RNG.random(R).astype(np.float32)
        descending = -np.sort(-logits.astype(np.float64), axis=1)
        probs = np.exp(descending - descending[:, :1])
        probs /= probs.sum(axis=1, keepdims=True)
        stays = (np.cumsum(probs, axis=1) - probs <= p[:, None]) & (descending > -np.inf)
        expected = np.where(stays, descending, np.inf).min(axis=1)
        np.testing.assert_array_equal(np.asarray(end(logits, p))[:, 0], expected)
