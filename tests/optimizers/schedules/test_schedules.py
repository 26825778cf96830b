"""Schedules against Pax's numbers, hand-written NumPy, and what a user gets wrong."""

import json
import math
import re

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite import ConfigError
from praxis_lite.config.config_json import dump_config, load_config
from praxis_lite.optimizers import schedules
from praxis_lite.optimizers.schedules import (
    constant,
    linear,
    linear_rampup_cosine_decay,
    piecewise_schedule,
    scaled,
    warmup_stable_decay,
)
from tests.support.goldens import golden_arrays, pax_cases


def snake_case(name):
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def schedule_of(settings):
    """Returns our schedule for a Pax class and its settings."""
    settings = dict(settings)
    function = getattr(schedules, snake_case(settings.pop("class")))
    if "schedules" in settings:
        settings["schedules"] = [schedule_of(setting) for setting in settings["schedules"]]
    return function(**settings)


def values(schedule, steps):
    """Returns a schedule's values, by one compiled program for all steps."""
    return np.asarray(jax.jit(jax.vmap(schedule))(jnp.asarray(steps, jnp.int32)))


def assert_as_pax(cases, numbers, atol, rtol):
    steps = numbers["in/steps"]
    ours = {name: schedule_of(settings) for name, settings in cases.items()}
    all_values = jax.jit(jax.vmap(lambda step: {name: s(step) for name, s in ours.items()}))
    actual = all_values(jnp.asarray(steps, jnp.int32))
    assert {f"out/{name}" for name in actual} == {n for n in numbers if n.startswith("out/")}
    for name, rates in actual.items():
        np.testing.assert_allclose(
            rates, numbers[f"out/{name}"], atol=atol, rtol=rtol, err_msg=name
        )
        assert rates.dtype == jnp.float32


def test_schedules_have_the_values_of_pax_goldens():
    case, numbers = pax_cases()["schedules_"], golden_arrays("pax/learner/schedules_.npz")
    assert_as_pax(case["schedules"], numbers, **case["tolerance"])


def test_schedules_have_paxs_values_for_other_options():
    numbers = golden_arrays("pax_options/optimizers/schedules.npz")
    cases = json.loads(str(numbers.pop("settings")))
    assert_as_pax(cases, numbers, atol=1e-7, rtol=1e-5)
    # Pax's 18 classes but for the abstract one.
    assert len({settings["class"] for settings in cases.values()}) == 17


@pytest.mark.parametrize("count", [7, np.int64(7), np.uint32(7), np.int32(7), jnp.uint32(7)])
def test_a_count_may_be_any_integer(count):
    for schedule in (
        linear_rampup_cosine_decay(warmup_steps=3, decay_start=5, decay_end=11, max=2.0),
        piecewise_schedule(boundaries=[5], schedules=[constant(1.0), linear(limit=(4, 0.1))]),
        schedules.cycle_schedule(steps=[3, 5], schedules=[constant(1.0), linear(limit=(9, 0.1))]),
    ):
        assert schedule(count) == schedule(jnp.int32(7))
        assert jnp.asarray(schedule(count)).dtype == jnp.float32


def test_scaled_multiplies_by_the_learning_rate_as_pax_does():
    schedule = scaled(3e-4, optax.linear_schedule(0.0, 2.0, 4))
    np.testing.assert_allclose(values(schedule, [0, 1, 4, 9]), [0, 1.5e-4, 6e-4, 6e-4], rtol=1e-6)


@pytest.mark.parametrize("shape", ["linear", "1-sqrt", "cosine"])
def test_warmup_stable_decay_rises_stays_and_decays_in_its_shape(shape):
    schedule = warmup_stable_decay(
        warmup_steps=5, decay_start=13, decay_end=20, max=2.0, min_ratio=0.25, shape=shape
    )
    r = (np.arange(13, 20) - 13) / 7
    left = {"linear": 1 - r, "1-sqrt": 1 - np.sqrt(r), "cosine": 0.5 + 0.5 * np.cos(np.pi * r)}
    expected = [*(2.0 * np.arange(5) / 5), *[2.0] * 8, *(0.5 + 1.5 * left[shape]), 0.5, 0.5, 0.5]
    np.testing.assert_allclose(values(schedule, range(23)), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "name, options",
    [
        ("linear_rampup_polynomial_decay", {}),
        ("linear_rampup_cosine_decay", {}),
        ("linear_rampup_exponential_decay", {}),
        ("warmup_stable_decay", {"shape": "1-sqrt"}),
    ],
)
def test_equal_steps_are_a_jump_and_no_division_by_zero(name, options):
    schedule = getattr(schedules, name)(
        warmup_steps=0, decay_start=3, decay_end=3, max=2.0, min_ratio=0.5, **options
    )
    np.testing.assert_array_equal(values(schedule, range(5)), [2.0, 2.0, 2.0, 1.0, 1.0])
    at_once = getattr(schedules, name)(decay_start=0, decay_end=0, max=2.0, min_ratio=0.5)
    np.testing.assert_array_equal(values(at_once, range(2)), [1.0, 1.0])


def test_a_value_of_0_is_kept_in_a_piecewise_constant():
    # Pax takes the next value instead.
    schedule = schedules.piecewise_constant(boundaries=[2, 4, 4], values=[0.0, 0.5, 9.0, 0.0])
    np.testing.assert_array_equal(values(schedule, range(6)), [0.0, 0.0, 0.5, 0.5, 0.0, 0.0])


def test_optax_has_cosine_with_restarts():
    """SGDR, Loshchilov and Hutter 2017: cycles of 4, 8, 16 steps, each peak half the last."""
    cycles = [
        dict(init_value=0.0, peak_value=0.5**i, warmup_steps=1, decay_steps=4 * 2**i)
        for i in range(3)
    ]
    expected = []
    for i in range(3):
        r = np.arange(4 * 2**i - 1) / (4 * 2**i - 1)
        expected += [0.0, *(0.5**i * 0.5 * (1 + np.cos(math.pi * r)))]
    actual = values(optax.sgdr_schedule(cycles), range(30))
    np.testing.assert_allclose(actual, [*expected, 0.0, 0.0], atol=1e-7)


def test_a_schedule_of_schedules_is_built_from_json_and_piecewise_joins_count_anew():
    config = fdl.Config(
        scaled,
        learning_rate=3.0,
        schedule=fdl.Config(
            piecewise_schedule,
            boundaries=[2],
            schedules=[fdl.Config(constant, 0.5), fdl.Config(linear, start=(0, 1), limit=(2, 0))],
        ),
    )
    written = dump_config(config, "praxis_lite.experiments.lm.PyDocs")
    schedule = fdl.build(load_config(written).config)
    np.testing.assert_allclose(values(schedule, range(6)), [1.5, 1.5, 3.0, 1.5, 0.0, 0.0])


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"class": "LinearRampupCosineDecay", "decay_start": 9, "decay_end": 5, "max": 1.0},
         r"decay_end.*\(0, 9, 5\)"),
        ({"class": "LinearRampupPolynomialDecay", "warmup_steps": 3, "decay_end": 5, "max": 1.0},
         r"warmup_steps.*decay_start.*decay_end.*\(3, 0, 5\)"),
        ({"class": "LinearRampupPolynomialDecay", "decay_end": 5, "max": 0.0}, "max.*0.0"),
        ({"class": "LinearRampupCosineDecay", "decay_end": 5, "max": 1.0, "min_ratio": 1.5},
         "min_ratio.*1.5"),
        ({"class": "LinearRampupExponentialDecay", "decay_end": 5, "max": 1.0, "min_ratio": 0.0},
         r"5.* 0\.0;"),
        ({"class": "Linear", "start": [3, 1.0], "limit": [2, 0.0]}, "linear.* 3, .* step 2"),
        ({"class": "Linear", "start": [3, 1.0, 2], "limit": [2, 0.0]}, r"start.*\[3, 1\.0, 2\]"),
        ({"class": "Polynomial", "power": 0}, "power.* 0;"),
        ({"class": "Polynomial", "origin": "end"}, "origin.*'end'.*start, limit"),
        ({"class": "Exponential", "start": [0, -1.0]},
         r"0.* -1\.0;"),
        ({"class": "Cosine", "total_steps": -5}, "cosine.* 0, .*-5"),
        ({"class": "PiecewiseConstant", "boundaries": [2, 5], "values": [1.0, 2.0]},
         r"values.* 2;.*3.*\[2, 5\]"),
        ({"class": "PiecewiseConstant", "boundaries": [5, 2], "values": [1.0, 2.0, 3.0]},
         r"boundaries.*\[5, 2\]"),
        ({"class": "PiecewiseSchedule", "boundaries": [], "schedules": []},
         "schedules.* 0;.*1"),
        ({"class": "LinearRampupPiecewiseConstant", "boundaries": [], "values": []},
         r"linear_rampup_piecewise_constant.*boundaries.*\[\]"),
        ({"class": "LinearRampupPiecewiseConstant", "boundaries": [2], "values": [1.0, 2.0]},
         "values.* 2;.*1"),
        ({"class": "CycleSchedule", "steps": [2], "schedules": []},
         r"steps.*\[2\].*\(0\)"),
        ({"class": "CycleSchedule", "steps": [0], "schedules": [{"class": "Constant"}]},
         r"steps\[0\].*0"),
        ({"class": "SqrtDecay", "decay_start": 0}, "decay_start.* 0;"),
        ({"class": "LinearRampupSqrtDecay", "warmup_steps": 0}, "warmup_steps.* 0;"),
        ({"class": "Transformer", "model_dim": 0}, "model_dim.*0"),
        ({"class": "ContinuousSchedule", "min": 1.0}, "0 < min < 1"),
    ],
)  # fmt: skip
def test_ill_formed_settings_are_named_with_what_was_wanted(settings, message):
    with pytest.raises(ConfigError, match=message):
        schedule_of(settings)


def test_an_unknown_shape_of_decay_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"'sqrt'.*1-sqrt.*1-sqrt"):
        warmup_stable_decay(decay_start=1, decay_end=2, max=1.0, shape="sqrt")
