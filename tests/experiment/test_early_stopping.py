"""When a metric stops training: hand-counted histories, and settings that are refused."""

import math

import pytest

from praxis_lite import ConfigError, EarlyStopping

NAN = math.nan


@pytest.mark.parametrize(
    ("values", "settings", "stops"),
    [
        ([], {}, False),
        ([3.0], {"patience": 1}, False),
        ([3.0, 3.0], {"patience": 1}, True),
        ([3.0, 2.9], {"patience": 1}, False),
        ([3.0, 2.9], {"patience": 1, "min_delta": 0.2}, True),
        ([3.0, 2.9, 2.8], {"patience": 2, "min_delta": 0.15}, False),  # 0.2 below the first.
        ([3.0, 2.0, 2.5, 2.4], {"patience": 2}, True),
        ([3.0, 2.0, 2.5, 1.9], {"patience": 2}, False),
        ([0.1, 0.5, 0.4, 0.3], {"patience": 2, "mode": "max"}, True),
        ([0.1, 0.5, 0.4, 0.6], {"patience": 2, "mode": "max"}, False),
        ([NAN, NAN], {"patience": 2}, True),
        ([NAN, 3.0, NAN], {"patience": 2}, False),
        ([3.0, NAN, NAN], {"patience": 2}, True),
    ],
)
def test_stops_after_evaluations_without_an_improvement(values, settings, stops):
    history = {7 * i: value for i, value in enumerate(values)}
    reason = EarlyStopping(metric="heldout/loss", **settings).reason_to_stop(history)
    assert (reason is not None) == stops


def test_the_reason_names_the_metric_the_best_step_and_the_number_of_evaluations():
    stopping = EarlyStopping(metric="heldout/accuracy", mode="max", patience=2)
    history = {30: 0.6, 10: 0.5, 20: 0.7}  # In any order.
    assert stopping.reason_to_stop(history) is None
    assert stopping.reason_to_stop(history | {40: 0.7}) == (
        "heldout/accuracy was best at step 20 (0.7000) and has not improved in 2 evaluations"
    )
    assert "was never a number" in stopping.reason_to_stop({1: NAN, 2: NAN})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"metric": "loss"}, "early_stopping.metric.*'loss'.*'heldout/loss'"),
        ({"mode": "least"}, "early_stopping.mode.*'least'.*'min'.*'max'"),
        ({"patience": 0}, "early_stopping.patience.*0"),
        ({"min_delta": -0.1}, "early_stopping.min_delta.*-0.1.*0"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        EarlyStopping(**{"metric": "heldout/loss", **settings})
