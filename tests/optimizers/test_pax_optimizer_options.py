"""Settings of Pax's optimizers and learner that the goldens lack, against the real Pax's numbers.

pax_options/optimizers/pax_optimizers_FAMILY.npz: "in/w", "in/grads" and, per case, what is
not Pax's default ("CASE/hparams", JSON), and after five steps the weights ("CASE/w"), the slots of
each name ("CASE/m" ...) and the count of updates. All leaves of a kind are one vector, in the order
of the weights' paths. A gradient of the fourth step is 30 times the others.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite import ConfigError
from tests.optimizers.pax_learners import Flat, assert_within, pax_learner, run
from tests.support.goldens import by_kind, golden_arrays

SHAPES = {"dense/b": (7,), "dense/w": (5, 7), "norm/scale": (8,)}
STACKED_SHAPES = {"dense/b": (3, 7), "dense/w": (3, 5, 7), "norm/scale": (8,)}
TOLERANCE = {"atol": 2e-6, "rtol": 2e-6, "atol_of_max": 1e-6}
# Pax squared bfloat16 gradients operation by operation; compiled, XLA squares them in float32.
BFLOAT16_TOLERANCE = {"atol": 2e-6, "rtol": 2.0**-8}


# By case, and "in", the arrays of each file.
FAMILIES = {
    family: by_kind(golden_arrays(f"pax_options/optimizers/pax_optimizers_{family}.npz"))
    for family in ("adam", "bfloat16", "learner", "others", "regularized", "stacked")
}


def unraveled(vector: np.ndarray, shapes: dict[str, tuple[int, ...]]) -> Flat:
    ends = np.cumsum([np.prod(shapes[path]) for path in sorted(shapes)])
    parts = np.split(vector, ends[:-1])
    return {
        path: part.reshape(shapes[path]) for path, part in zip(sorted(shapes), parts, strict=True)
    }


def raveled(arrays: Flat) -> np.ndarray:
    return np.concatenate([np.ravel(np.float32(arrays[path])) for path in sorted(arrays)])


@pytest.mark.parametrize(
    "family, name",
    [
        pytest.param(family, name, marks=[pytest.mark.slow] * (number % 3 > 0))
        for family, cases in FAMILIES.items()
        for number, name in enumerate(name for name in cases if name != "in")
    ],
)
def test_five_steps_equal_pax(family, name):
    inputs, expected = FAMILIES[family]["in"], dict(FAMILIES[family][name])
    shapes = STACKED_SHAPES if family == "stacked" else SHAPES
    actual = run(
        pax_learner(json.loads(expected.pop("hparams").tobytes())),
        unraveled(inputs["w"], shapes),
        [unraveled(grads, shapes) for grads in inputs["grads"]],
        stacked=("dense",) if family == "stacked" else (),
        dtype=jnp.bfloat16 if family == "bfloat16" else jnp.float32,
    )
    tolerance = BFLOAT16_TOLERANCE if family == "bfloat16" else TOLERANCE
    assert actual.counts == {int(expected.pop("count"))}
    if "w" in expected:
        last = {path: weight[-1] for path, weight in actual.weights.items()}
        assert_within(raveled(last), expected.pop("w"), "weights", **tolerance)
    assert set(actual.slots) == set(expected)
    for field, slots in expected.items():
        assert_within(raveled(actual.slots[field]), slots, field, **tolerance)


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"l1_regularizer_weight": 0.3, "l2_regularizer_weight": 0.3}, "l1_.*l2_"),
        ({"l2_regularizer_weight": 0.3, "decoupled_weight_decay": 0.3}, "l2_.*decoupled_"),
        (
            {"clip_gradient_norm_to_value": 1.5, "clip_gradient_single_norm_to_value": 1.0},
            "clip_gradient_norm_to_value.*clip_gradient_single_norm_to_value",
        ),
    ],
)
def test_what_pax_refuses_is_refused_here(settings, named):
    with pytest.raises(ConfigError, match=named):
        pax_learner({"optimizer": {"class": "Adam", **settings}})
