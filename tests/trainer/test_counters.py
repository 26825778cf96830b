"""Counts of steps: schedules tell them apart, and more than an int32 holds are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite import ConfigError, RunConfig
from praxis_lite.core import Learner, WeightSpec
from praxis_lite.optimizers.schedules import delayed_cosine, linear, polynomial

LAST = 2**31 - 1


def test_more_steps_than_the_state_counts_are_refused():
    assert RunConfig(num_train_steps=LAST).num_train_steps == LAST
    with pytest.raises(ConfigError, match="1.*2147483647"):
        RunConfig(num_train_steps=LAST + 1)


@pytest.mark.parametrize("first", [1000, 2**24 + 1])
def test_schedules_tell_steps_apart_however_many_were_made(first):
    start, limit = (first, 2.0), (first + 4, 1.0)
    for schedule, shape in (
        (linear(start=start, limit=limit), lambda r: 2 - r),
        (polynomial(start=start, limit=limit, power=2), lambda r: 2 - r**2),
        (delayed_cosine(start=start, limit=limit), lambda r: 1.5 + 0.5 * np.cos(np.pi * r)),
    ):
        counts = [first - 1, first, first + 1, first + 3, first + 4, first + 5]
        rates = [float(jax.jit(schedule)(jnp.int32(count))) for count in counts]
        assert rates == pytest.approx([shape(r) for r in (0, 0, 0.25, 0.75, 1, 1)], abs=1e-6)


def test_a_rate_that_is_not_finite_changes_no_weight():
    rates = jnp.array([0.5, np.nan, np.inf])
    params = {"w": jnp.ones(3)}
    specs = {"w": WeightSpec((3,), jnp.float32)}
    learner = Learner(optax.adam, lambda count: rates[count])
    bound = learner.bind(specs)
    state = bound.init(params)
    for step in range(3):
        before = params, state["slots"]
        params, state, scalars, is_skipped = bound.update(
            {"w": jnp.full(3, 0.1)}, state, params, jnp.zeros(())
        )
        after = params, state["slots"]
        is_same = jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), before, after))
        assert is_same == (step > 0)
        assert int(scalars["num_skipped_steps"]) == step
        assert bool(is_skipped) == (step > 0)
