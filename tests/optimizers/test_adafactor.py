"""Adafactor against optax, and by hand: edges, the int8 momentum, wrong settings."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite import ConfigError
from praxis_lite.optimizers import adafactor
from praxis_lite.optimizers.adafactor import dequantize_momentum, quantize_momentum


def test_some_settings_equal_optax():
    rng = np.random.default_rng(3)
    # Of (4, 2, 9) and (9, 2, 4) the largest dims are not the last two.
    shapes = [(13, 7), (4, 2, 9), (9, 2, 4), (2, 11, 5), (11, 2), (7,), ()]
    params = {str(s): jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes}
    ours = adafactor(
        0.03,
        decay_method="pow",
        decay_pow=0.6,
        beta1=0.7,
        quantized_dtype="float32",
        sort_factored_second_moment_dims=True,
        min_dim_size_to_factor=3,
        clip_threshold=0.9,
        multiply_by_parameter_scale=True,
        weight_decay=0.2,
    )
    theirs = optax.adafactor(
        0.03,
        decay_rate=0.6,
        momentum=0.7,
        min_dim_size_to_factor=3,
        clipping_threshold=0.9,
        weight_decay_rate=0.2 * 0.03,
    )
    sizes = np.float32([1.0, 3.0, 9.0])
    grads = {
        n: np.stack([size * rng.normal(size=w.shape) for size in sizes]).astype(np.float32)
        for n, w in params.items()
    }

    @jax.jit
    def after_three_steps(params, grads):
        def step(carry, grad):
            params, states = carry
            stepped = [
                o.update(grad, s, p) for o, s, p in zip((ours, theirs), states, params, strict=True)
            ]
            params = [optax.apply_updates(p, u) for p, (u, _) in zip(params, stepped, strict=True)]
            return (params, [state for _, state in stepped]), None

        start = [params, params], [ours.init(params), theirs.init(params)]
        return jax.lax.scan(step, start, grads)[0][0]

    actual, expected = after_three_steps(params, grads)
    for name, weight in actual.items():
        np.testing.assert_allclose(weight, expected[name], rtol=2e-5, atol=1e-6, err_msg=name)


EDGES = {"one": (1, 1), "row": (1, 7), "scalar": (), "square": (5, 5), "vector": (3,)}


def edge_step(settings, grad_of, rate=0.1, num_steps=2, weight=2.0, dtype=jnp.float32):
    """Returns the updates and state after steps on constant gradients and weights."""
    optimizer = adafactor(rate, **settings)
    params = {name: jnp.full(shape, weight, dtype) for name, shape in EDGES.items()}
    grads = jax.tree.map(grad_of, params)

    @jax.jit
    def steps(params, grads):
        def step(carry, _):
            return optimizer.update(grads, carry[1], params), None

        start = jax.tree.map(lambda w: jnp.zeros(w.shape), params), optimizer.init(params)
        return jax.lax.scan(step, start, length=num_steps)[0]

    return steps(params, grads)


ALL_ON = dict(decay_method="pow", decay_pow=0.8, beta1=0.9, multiply_by_parameter_scale=True,
              layerwise_adaptation=True)  # fmt: skip


@pytest.mark.parametrize("settings", [
    dict(decay_method="adam", decay_adam=0.999), ALL_ON, {**ALL_ON, "factored": False},
], ids=["bare", "all", "unfactored"])  # fmt: skip
def test_gradients_of_zero_move_nothing(settings):
    updates, state = edge_step(settings, jnp.zeros_like)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(updates))


@pytest.mark.parametrize("size", [1e-12, 1e18])
def test_the_first_step_is_the_gradients_sign_whatever_its_size(size):
    updates, _ = edge_step(
        dict(decay_method="adam", decay_adam=0.999), lambda w: jnp.full_like(w, -size), num_steps=1
    )
    for update in jax.tree.leaves(updates):
        np.testing.assert_allclose(update, 0.1, rtol=1e-5)


@pytest.mark.parametrize("settings", [ALL_ON, {**ALL_ON, "quantized_dtype": "float32"}])
def test_a_learning_rate_of_zero_moves_nothing(settings):
    updates, state = edge_step(settings, jnp.ones_like, rate=0.0)
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(updates))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


@pytest.mark.parametrize("becomes_nan", [True, False])
def test_an_infinite_gradient_cannot_hide_in_a_division(becomes_nan):
    updates, _ = edge_step(
        dict(decay_method="adam", decay_adam=0.9, maybe_inf_to_nan=becomes_nan, factored=False,
             clip_threshold=None),
        lambda w: w.at[(0,) * w.ndim].set(1e30), num_steps=1,
    )  # fmt: skip
    # Squared it is infinite: 1e30 / inf is a harmless looking 0.
    first = {float(update[(0,) * update.ndim]) for update in jax.tree.leaves(updates)}
    assert (all(np.isnan(x) for x in first)) if becomes_nan else first == {0.0}


def test_bfloat16_weights_have_float32_slots_and_stay_bfloat16():
    updates, state = edge_step(
        dict(decay_method="adam", decay_adam=0.9, beta1=0.5, quantized_dtype="float32"),
        jnp.ones_like, dtype=jnp.bfloat16,
    )  # fmt: skip
    assert {x.dtype for x in jax.tree.leaves(state[1:])} == {jnp.dtype("float32")}
    params = optax.apply_updates({n: jnp.ones(s, jnp.bfloat16) for n, s in EDGES.items()}, updates)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    # Two steps of 0.1 along the sign; the momentum has seen 1 - 0.5^2 of them.
    np.testing.assert_allclose(updates["square"], -0.1 * 0.75, rtol=1e-5)


def test_an_int8_momentum_is_within_half_a_bucket_of_its_column():
    x = np.random.default_rng(0).normal(size=(13, 7)).astype(np.float32)
    x[:, 2] = 0.0
    x[5, 3] = np.nan
    stored, scale = jax.jit(lambda x: quantize_momentum(x, "int8"))(x)
    back = np.asarray(dequantize_momentum(stored, scale))
    assert stored.dtype == jnp.int8 and scale.shape == (7,)
    assert np.isnan(back[:, 3]).all()  # The scale keeps what integers cannot.
    fine = [0, 1, 2, 4, 5, 6]
    largest = np.abs(x[:, fine]).max(0)
    np.testing.assert_allclose(scale[np.array(fine)], largest / 127, rtol=1e-6)
    assert (np.abs(back - x)[:, fine] <= largest / 127 / 2 * 1.0001).all()
    # What came back is stored as the same integers.
    again, _ = quantize_momentum(jnp.asarray(back), "int8")
    np.testing.assert_array_equal(again[:, :2], stored[:, :2])
    with jax.debug_nans(True):  # What integer a NaN becomes is up to the machine.
        assert not quantize_momentum(jnp.zeros((3, 2)), "int8")[0].any()


@pytest.mark.parametrize("settings, message", [
    (dict(decay_method="adm"), r"decay_method.*'adm'.*adam\?"),
    (dict(decay_adam=0.0), "decay_adam.*0.0"),
    (dict(decay_adam=1.0), r"decay_adam.*1.0.*\[0, 1"),
    (dict(decay_method="pow"), "decay_pow.*0.0"),
    (dict(beta1=1.0), "beta1.*1.0"),
    (dict(clip_threshold=0.0), "clip_threshold.*0.0"),
    (dict(clip_threshold=-1.0), "clip_threshold.*-1.0"),
    (dict(epsilon1_grad_sq_reg=0.0), "epsilon1_grad_sq_reg.*0.0"),
    (dict(epsilon2_param_scale_reg=-1.0), "epsilon2_param_scale_reg.*-1.0"),
    (dict(quantized_dtype="int4"), "quantized_dtype.*'int4'.*int8"),
    (dict(weight_decay=-0.1), r"weight_decay .*-0\.1"),
    (dict(weight_decay={"head": -0.1}), r"weight_decay\['head'\].*-0.1"),
    (dict(weight_decay={"(": 0.1}), r"'\('"),
    (dict(exclude_from_layerwise_adaptation=["*"]), r"'\*'"),
])  # fmt: skip
def test_a_wrong_setting_is_named(settings, message):
    right = {"decay_method": "adam", "decay_adam": 0.9}
    with pytest.raises(ConfigError, match=message):
        adafactor(0.1, **{**right, **settings})
