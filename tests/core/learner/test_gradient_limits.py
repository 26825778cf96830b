"""Norms, clipping and the rule of which steps are skipped, against NumPy by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.core import GradientLimits
from praxis_lite.core.learner.gradient_limits import global_norm

RNG = np.random.default_rng(3)
GRADS = {
    "small": RNG.normal(size=(3, 5), scale=0.1).astype(np.float32),
    "large": {"w": RNG.normal(size=(7, 11), scale=9.0).astype(np.float32)},
    "zero": np.zeros((13,), np.float32),
}
JAX_GRADS = jax.tree.map(jnp.asarray, GRADS)


def norm(grads) -> float:
    return np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in jax.tree.leaves(grads)))


def test_the_global_norm_is_that_of_all_gradients_and_float32():
    np.testing.assert_allclose(global_norm(JAX_GRADS), norm(GRADS), rtol=1e-6)
    ones = {"w": jnp.ones((1031,), jnp.bfloat16)}  # In bfloat16 their sum would stop at 256.
    assert global_norm(ones).dtype == jnp.float32
    np.testing.assert_allclose(global_norm(ones), np.sqrt(1031), rtol=1e-6)
    assert float(global_norm({})) == 0.0


def test_clipping_keeps_the_dtype():
    grads = {"w": jnp.full((5,), 3.0, jnp.bfloat16)}
    for limits in (
        GradientLimits(1.0), GradientLimits(0, 1.0), GradientLimits(0, 0, 1.0),
    ):  # fmt: skip
        assert limits.clipped(grads, global_norm(grads))["w"].dtype == jnp.bfloat16


def test_a_norm_of_the_limit_or_more_is_not_accepted():
    limits = GradientLimits(skip_step_gradient_norm_value=2.0)
    actual = [bool(limits.accepts_step(jnp.float32(x))) for x in (0.0, 1.9, 2.0, 2.1)]
    assert actual == [True, True, False, False]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_gradient_norm_to_value": -1}, r"Learner\.clip_gradient_norm_to_value.*-1"),
        ({"clip_gradient_to_value": float("nan")}, r"Learner\.clip_gradient_to_value.*nan"),
        ({"skip_step_gradient_norm_value": "5"}, "skip_step_gradient_norm_value.*'5'"),
        ({"clip_gradient_single_norm_to_value": None}, "single_norm_to_value.*None"),
        (
            {"clip_gradient_norm_to_value": 1.0, "clip_gradient_to_value": 2.0},
            r"Learner\.clip_gradient_norm_to_value.*clip_gradient_to_value",
        ),
        (
            {"clip_gradient_norm_to_value": 1.0, "clip_gradient_single_norm_to_value": 2.0},
            "norm_to_value.*clip_gradient_single_norm_to_value",
        ),
    ],
)
def test_a_wrong_limit_names_the_setting(settings, message):
    with pytest.raises(ConfigError, match=message):
        GradientLimits(**settings)
