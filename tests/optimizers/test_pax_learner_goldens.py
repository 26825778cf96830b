"""The learner and its optimizers against five steps of the real Pax's: weights, rates, slots.

Each case runs with the tolerance and the hyperparameters that cases.json states; the optimizers
are what `pax_learners.COUNTERPARTS` says. Adafactor's cases are in test_adafactor_pax.py.
"""

import numpy as np
import pytest

from tests.optimizers.pax_learners import (
    Run,
    assert_within,
    pax_learner,
    pax_rate,
    run,
)
from tests.support.goldens import golden_arrays, pax_cases
from tests.support.marks import every

CASES = {
    name: case
    for name, case in pax_cases().items()
    if case["kind"] == "learner" and case["optimizer"] != "ShardedAdafactor"
}


@pytest.mark.parametrize("name", every(3, CASES))
def test_five_steps_equal_pax(name):
    case = CASES[name]
    arrays = golden_arrays(f"pax/learner/{name}.npz")
    wanted = {kind: under(arrays, f"out/{kind}/params/") for kind in ("w0", "w1", "w2", "w3", "w4")}
    actual = run(
        pax_learner(case["hparams"]),
        under(arrays, "w/params/"),
        [under(arrays, f"in/grad{i}/params/") for i in range(5)],
        stacked=case["repeat_prefix_dims"],
    )
    tolerance = case["tolerance"]
    for i in range(5):
        for path, weight in wanted[f"w{i}"].items():
            assert_within(actual.weights[path][i], weight, f"step {i}: {path}", **tolerance)
        # What Pax reports is the rate at the step; what it and we apply is the rate at the count of
        # updates, and that is what we report.
        rate = pax_rate(case["hparams"]["optimizer"])
        assert_within(rate(i), arrays[f"out/lr{i}"], f"rate {i}", **tolerance)
        num_skipped = case["nan_at"] is not None and i > case["nan_at"]
        assert actual.learning_rates[i] == rate(i - num_skipped)
    assert set(actual.weights) == set(wanted["w4"])
    assert_slots_equal(actual, under(arrays, "out/state/"), tolerance)


def assert_slots_equal(actual: Run, state: dict[str, np.ndarray], tolerance: dict) -> None:
    compared = set()
    for path, slot in state.items():
        transformation, _, weight = path.partition("/params/")
        field = transformation.split("/")[-1]
        if field == "count":
            assert actual.counts == {int(count) for count in np.ravel(slot)}
        else:
            assert_within(actual.slots[field][weight], slot, path, **tolerance)
            compared.add((field, weight))
    assert compared == {(field, weight) for field in actual.slots for weight in actual.slots[field]}


def under(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {
        path.removeprefix(prefix): array
        for path, array in arrays.items()
        if path.startswith(prefix)
    }
