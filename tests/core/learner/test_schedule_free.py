"""Schedule-free AdamW against NumPy by hand, and the weights that are evaluated."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite.core import Learner, WeightSpec
from praxis_lite.optimizers import evaluation_params

B1, B2, EPS, DECAY = 0.8, 0.95, 1e-8, 0.1
SPECS = {
    "blocks": {"w": WeightSpec((3, 5, 2), jnp.float32, None, (None,))},
    "head": {"w": WeightSpec((7,), jnp.float32)},
}
CONFIG = fdl.Partial(optax.contrib.schedule_free_adamw, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY)


def tree(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda spec: rng.normal(size=spec.shape).astype(np.float32),
        SPECS,
        is_leaf=lambda x: isinstance(x, WeightSpec),
    )


def warmup(count):
    return 0.1 * jnp.minimum(1.0, (count + 1.0) / 3.0)


def numpy_schedule_free_adamw(params, grads, rate):
    """Returns (y, x): Defazio et al. 2024, algorithm 1; y has the gradients, x is the result.

    The weight of step t in the average is the square of the largest rate so far. optax, alone,
    takes for it the rate of the next update, not of this one.
    """
    x = z = y = jax.tree.map(np.float64, params)
    v = jax.tree.map(np.zeros_like, y)
    total, largest = 0.0, 0.0
    for t, grad in enumerate(grads, start=1):
        v = jax.tree.map(lambda v, g: B2 * v + (1 - B2) * g**2, v, grad)

        def step(z, g, v, y, t=t):
            return z - rate(t - 1) * (g / (np.sqrt(v / (1 - B2**t)) + EPS) + DECAY * y)

        z = jax.tree.map(step, z, grad, v, y)
        largest = max(largest, rate(t))
        total += largest**2
        c = largest**2 / total
        x = jax.tree.map(lambda x, z, c=c: (1 - c) * x + c * z, x, z)
        y = jax.tree.map(lambda z, x: (1 - B1) * z + B1 * x, z, x)
    return y, x


def assert_trees_close(actual, expected, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), actual, expected)


@pytest.mark.parametrize("rate", [0.05, warmup], ids=["constant", "warmup"])
def test_five_steps_and_their_average_equal_numpy(rate):
    learner = Learner(fdl.build(CONFIG), rate)
    params = jax.tree.map(jnp.asarray, tree(0))
    bound = learner.bind(SPECS)
    opt_states = bound.init(params)
    # At y = z = x, bit for bit.
    evaluated = bound.eval_params(params, opt_states, use_ema=False)
    jax.tree.map(np.testing.assert_array_equal, evaluated, params)
    update = jax.jit(lambda g, o, p: bound.update(g, o, p, jnp.float32(1))[:2])
    grads = [tree(10 + i) for i in range(5)]
    for grad in grads:
        params, opt_states = update(grad, opt_states, params)
    y, x = numpy_schedule_free_adamw(
        tree(0), grads, lambda t: float(rate(t)) if callable(rate) else rate
    )
    assert_trees_close(params, y, rtol=2e-5, atol=2e-6)
    evaluated = bound.eval_params(params, opt_states, use_ema=False)
    assert_trees_close(evaluated, x, rtol=2e-5, atol=5e-6)
    # A skipped step leaves both.
    spoilt = jax.tree.map(lambda g: g * np.float32(np.nan), grads[0])
    params, opt_states = update(spoilt, opt_states, params)
    after = bound.eval_params(params, opt_states, use_ema=False)
    jax.tree.map(np.testing.assert_array_equal, after, evaluated)


def both(w):
    return {"body": {"w": w}, "head": {"w": 2.0 * w}}


def schedule_free():
    return optax.contrib.schedule_free_sgd(0.1, b1=0.5)


PLACES = {
    "chain": lambda: optax.chain(optax.clip(10.0), schedule_free(), optax.scale(1.0)),
    "skipping": lambda: optax.apply_if_finite(schedule_free(), 3),
    "masked": lambda: optax.masked(schedule_free(), {"body": True, "head": False}),
    "partition": lambda: optax.partition(
        {"a": schedule_free(), "b": optax.sgd(0.1)}, {"body": "a", "head": "b"}
    ),
    "two": lambda: optax.partition(
        {"a": schedule_free(), "b": optax.contrib.schedule_free_sgd(0.1, b1=0.8)},
        {"body": "a", "head": "b"},
    ),
}
# b1 of each weight; 1: what it is trained at is what it is evaluated at.
B1_OF = {"masked": (0.5, 1.0), "partition": (0.5, 1.0), "two": (0.5, 0.8)}


@pytest.mark.parametrize("place", PLACES)
def test_the_average_is_found_wherever_the_state_is(place):
    """Two updates from 1 with gradient 1, rate r: z = 1 - r, 1 - 2r; x = 1 - r, 1 - 1.5r.

    The head's numbers are all twice as large.
    """
    optimizer, params = PLACES[place](), both(jnp.ones(3))
    state = optimizer.init(params)
    for _ in range(2):
        updates, state = optimizer.update(both(jnp.ones(3)), state, params)
        params = optax.apply_updates(params, updates)
    actual = evaluation_params(state, params)
    for (name, scale), b1 in zip(
        (("body", 1), ("head", 2)), B1_OF.get(place, (0.5, 0.5)), strict=True
    ):
        if b1 == 1.0:
            assert actual[name]["w"] is params[name]["w"]
            continue
        z, x = 1 - 0.1 * 2, 1 - 0.1 * 1.5
        np.testing.assert_allclose(actual[name]["w"], scale * x, rtol=1e-6)
        np.testing.assert_allclose(params[name]["w"], scale * (b1 * x + (1 - b1) * z), rtol=1e-6)


def test_other_optimizers_are_evaluated_where_they_train():
    params = both(jnp.ones(3))
    for optimizer in (optax.adamw(0.1), optax.sgd(0.1), optax.contrib.muon(0.1)):
        assert evaluation_params(optimizer.init(params), params) is params


def test_bfloat16_weights_and_zero_gradients_stay_finite_and_keep_their_dtype():
    optimizer = optax.contrib.schedule_free_adamw(0.1)
    params = both(jnp.arange(3, dtype=jnp.bfloat16))
    state = optimizer.init(params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    for _ in range(2):
        updates, state = optimizer.update(zeros, state, params)
        params = optax.apply_updates(params, updates)
    evaluated = evaluation_params(state, params)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves((params, evaluated)))
    # Nothing moves but by rounding: y is computed again from x and z.
    assert_trees_close(evaluated, both(np.arange(3.0)), rtol=0.02)
