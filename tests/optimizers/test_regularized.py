"""Regularization by hand around SGD; that it is Pax's, the goldens and the options show."""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite import ConfigError
from praxis_lite.optimizers import adam, regularized

W = np.array([[2.0, -3.0, 0.0], [0.5, 7.0, -1.0]], np.float32)
B = np.array([1.0, -2.0, 5.0], np.float32)
WEIGHTS = {"norm": {"scale": B.copy(), "table": W.copy()}, "dense": {"b": B, "w": W}}
SGD = functools.partial(optax.sgd, momentum=0.9)


def first_update(learning_rate=0.1, **settings):
    """Returns the update of the weights for gradients of 1."""
    optimizer = regularized(learning_rate, optimizer=SGD, **settings)
    grads = jax.tree.map(np.ones_like, WEIGHTS)
    return optimizer.update(grads, optimizer.init(WEIGHTS), WEIGHTS)[0]


@pytest.mark.parametrize("setting, term", [("l1", np.sign), ("l2", lambda w: w)])
@pytest.mark.parametrize("skip_1d", [False, True])
def test_l1_and_l2_go_into_the_gradient(setting, term, skip_1d):
    updates = first_update(
        **{f"{setting}_regularizer_weight": 0.3},
        skip_lp_1d_vectors=skip_1d,
        skip_lp_regularization="norm",
    )
    np.testing.assert_allclose(updates["dense"]["w"], -0.1 * (1 + 0.3 * term(W)), rtol=1e-6)
    of_b = 1 if skip_1d else 1 + 0.3 * term(B)
    np.testing.assert_allclose(updates["dense"]["b"], -0.1 * of_b * np.ones(3), rtol=1e-6)
    np.testing.assert_allclose(updates["norm"]["table"], -0.1 * np.ones((2, 3)), rtol=1e-6)


@pytest.mark.parametrize("learning_rate", [0.1, lambda count: 0.1 / (1.0 + count)])
def test_the_decoupled_decay_goes_past_the_slots_and_takes_in_vectors(learning_rate):
    optimizer = regularized(
        learning_rate, optimizer=SGD, decoupled_weight_decay=0.3, skip_lp_1d_vectors=True,
        skip_lp_regularization=("norm/scale", "nothing of this name"),
    )  # fmt: skip
    grads, state = jax.tree.map(np.ones_like, WEIGHTS), optimizer.init(WEIGHTS)
    for i in range(2):
        rate = learning_rate(i) if callable(learning_rate) else learning_rate
        updates, state = optimizer.update(grads, state, WEIGHTS)
        trace = 1.0 if i == 0 else 1.9
        np.testing.assert_allclose(updates["dense"]["w"], -rate * (trace + 0.3 * W), rtol=1e-6)
        np.testing.assert_allclose(updates["dense"]["b"], -rate * (trace + 0.3 * B), rtol=1e-6)
        np.testing.assert_allclose(updates["norm"]["scale"], -rate * trace * np.ones(3), rtol=1e-6)


def test_ewc_draws_weights_towards_those_they_began_with():
    # The numbers are Pax's own: -1, -2.5, -4.25 for gradients of 1, 2, 3 and rates of 1.
    rates = np.array([1.0, 0.5, 0.25], np.float32)
    for rate, weight in (("one", 1.0), ("falling", 0.7)):
        optimizer = regularized(
            1.0 if rate == "one" else lambda count: jnp.asarray(rates)[count],
            optimizer=optax.sgd,
            ewc_regularizer_weight=weight,
        )
        first = {"w": W, "b": B}
        weights, state, actual = first, optimizer.init(first), []
        expected = {name: [w] for name, w in first.items()}
        for t in range(3):
            grads = jax.tree.map(lambda w, t=t: np.full_like(w, t + 1.0), first)
            updates, state = optimizer.update(grads, state, weights)
            weights = optax.apply_updates(weights, updates)
            actual.append(weights)
            lr = 1.0 if rate == "one" else rates[t]
            for name, path in expected.items():
                drawn = weight / 2 * (path[-1] - first[name])
                path.append(path[-1] - lr * (t + 1.0 + drawn))
        for name, path in expected.items():
            for item, other in zip(actual, path[1:], strict=True):
                np.testing.assert_allclose(item[name], other, rtol=1e-6, atol=1e-6)
        if rate == "one":
            np.testing.assert_allclose(actual[-1]["w"] - W, -4.25, rtol=1e-6)


def test_without_regularization_it_is_the_optimizer():
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6),
        first_update(), jax.tree.map(lambda w: np.full_like(w, -0.1), WEIGHTS),
    )  # fmt: skip


def test_it_is_configured_as_an_optimizer_of_an_optimizer():
    config = fdl.Partial(
        regularized, optimizer=fdl.Partial(adam, beta2=0.99), l2_regularizer_weight=0.1
    )
    optimizer = fdl.build(config)(learning_rate=0.1)
    updates, _ = optimizer.update(WEIGHTS, optimizer.init(WEIGHTS), WEIGHTS)
    assert jax.tree.structure(updates) == jax.tree.structure(WEIGHTS)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"l1_regularizer_weight": -1.0}, "regularized.*l1_regularizer_weight.*-1.0"),
        ({"ewc_regularizer_weight": -1.0}, "regularized.*ewc_regularizer_weight.*-1.0"),
        ({"l1_regularizer_weight": 1.0, "decoupled_weight_decay": 1.0}, "l1_reg.*decoupled_"),
        ({"skip_lp_regularization": "*norm"}, r"'\*norm'"),
    ],
)
def test_settings_that_pax_refuses_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        regularized(0.1, optimizer=SGD, **settings)
