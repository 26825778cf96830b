"""Norms, clipping and the rule of which steps are skipped, against NumPy by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.core import GradientLimits
from praxis_lite.core.learner.gradients import global_norm

RNG = np.random.default_rng(3)
GRADS = {
    "small": RNG.normal(size=(3, 5), scale=0.1).astype(np.float32),
    "large": {"w": RNG.normal(size=(7, 11), scale=9.0).astype(np.float32)},
    "zero": np.zeros((13,), np.float32),
}
JAX_GRADS = jax.tree.map(jnp.asarray, GRADS)


def norm(grads) -> float:
    return np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in jax.tree.leaves(grads)))


def clipped(grad_norm=None, **limits):
    grad_norm = jnp.float32(norm(GRADS) if grad_norm is None else grad_norm)
    return jax.jit(GradientLimits(**limits).clipped)(JAX_GRADS, grad_norm)


def assert_trees_close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), actual, expected)


def test_the_global_norm_is_that_of_all_gradients_and_float32():
    np.testing.assert_allclose(global_norm(JAX_GRADS), norm(GRADS), rtol=1e-6)
    ones = {"w": jnp.ones((1031,), jnp.bfloat16)}  # In bfloat16 their sum would stop at 256.
    assert global_norm(ones).dtype == jnp.float32
    np.testing.assert_allclose(global_norm(ones), np.sqrt(1031), rtol=1e-6)
    assert float(global_norm({})) == 0.0


def test_a_global_norm_scales_all_by_one_factor_and_only_down():
    assert norm(GRADS) > 5
    actual = clipped(clip_gradient_norm_to_value=5.0)
    assert_trees_close(actual, jax.tree.map(lambda g: g * 5.0 / norm(GRADS), GRADS))
    np.testing.assert_allclose(norm(actual), 5.0, rtol=1e-6)
    jax.tree.map(
        np.testing.assert_array_equal, clipped(clip_gradient_norm_to_value=1e4), GRADS
    )


def test_the_norm_that_counts_is_the_one_given_not_that_of_the_group():
    actual = clipped(grad_norm=50.0, clip_gradient_norm_to_value=5.0)
    assert_trees_close(actual, jax.tree.map(lambda g: g * np.float32(0.1), GRADS))


def test_a_single_norm_scales_each_by_its_own():
    assert norm(GRADS["small"]) < 2 < norm(GRADS["large"])
    actual = clipped(clip_gradient_single_norm_to_value=2.0)
    np.testing.assert_array_equal(actual["small"], GRADS["small"])
    large = GRADS["large"]["w"]
    np.testing.assert_allclose(actual["large"]["w"], large * 2.0 / norm(large), rtol=1e-5)
    np.testing.assert_array_equal(actual["zero"], GRADS["zero"])  # Not NaN.


def test_a_value_clips_each_element():
    actual = clipped(clip_gradient_to_value=3.0)
    large = GRADS["large"]["w"]
    assert 0 < np.mean(np.abs(large) > 3) < 1
    np.testing.assert_array_equal(actual["large"]["w"], np.clip(large, -3, 3))
    np.testing.assert_array_equal(actual["small"], GRADS["small"])


def test_no_limit_leaves_gradients_as_they_are():
    assert GradientLimits().clipped(JAX_GRADS, jnp.float32(1.0)) is JAX_GRADS
    assert bool(GradientLimits().keeps(jnp.float32(1e30)))


def test_clipping_keeps_the_dtype():
    grads = {"w": jnp.full((5,), 3.0, jnp.bfloat16)}
    for limits in (
        GradientLimits(1.0), GradientLimits(0, 1.0), GradientLimits(0, 0, 1.0),
    ):  # fmt: skip
        assert limits.clipped(grads, global_norm(grads))["w"].dtype == jnp.bfloat16


def test_a_norm_of_the_limit_or_more_is_not_kept():
    keeps = GradientLimits(skip_step_gradient_norm_value=2.0).keeps
    assert [bool(keeps(jnp.float32(x))) for x in (0.0, 1.9, 2.0, 2.1)] == [True, True, False, False]


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


def test_skipping_goes_with_any_clipping():
    GradientLimits(clip_gradient_norm_to_value=1.0, skip_step_gradient_norm_value=9.0)
