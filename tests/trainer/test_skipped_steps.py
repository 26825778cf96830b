"""Steps that are skipped: few lines for many of them, and what to do in the first."""

import types

import numpy as np
import pytest

from praxis_lite import ConfigError, RunConfig
from praxis_lite.inputs import InMemory
from praxis_lite.trainer.hooks.hook import StepMetrics
from praxis_lite.trainer.hooks.skipped_steps_report import SkippedSteps


def lines_of(in_a_row, *, debug_nans=False, bad_value=0.0, most=100):
    """Returns the lines of a training whose steps are skipped, by the counts of each step."""
    lines, data = [], InMemory({"x": np.arange(7.0)}, 3, shuffle=True)
    job = types.SimpleNamespace(
        run=RunConfig(num_train_steps=999, debug_nans=debug_nans),
        datasets={"train": data},
        files=types.SimpleNamespace(non_finite_txt="non_finite.txt"),
    )
    checkpoints = types.SimpleNamespace(all_steps=lambda: [], directory="c")
    hook = SkippedSteps(job)
    hook.before_training(types.SimpleNamespace(note=lines.append, checkpoints=checkpoints), None)
    for step, count in enumerate(in_a_row, start=1):
        line = {"num_skipped_in_a_row": count, "num_skipped_steps": step}
        inputs = {"x": np.array([1.0, bad_value, 2.0]), "weights": np.ones(3)}
        hook.after_metrics(StepMetrics(step, line, 3.0, step - 1, inputs, 0))
    return lines


def test_a_hundred_steps_in_a_row_are_few_lines_and_the_first_names_debug_nans():
    with pytest.raises(ConfigError, match="last 100 steps"):
        lines_of(range(1, 101))
    lines = lines_of(range(1, 100))
    assert [int(line.split()[1]) for line in lines] == [1, 2, 4, 8, 16, 32, 64]
    assert ["run.debug_nans" in line for line in lines] == [True] + [False] * 6
    assert "64 in a row" in lines[-1]


def test_each_stretch_begins_anew_and_advice_that_was_taken_is_not_repeated():
    assert len(lines_of([1, 0, 1, 2, 3, 0, 1])) == 4
    assert "debug_nans" not in lines_of([1], debug_nans=True)[0]
    (line,) = lines_of([1], bad_value=np.nan)
    assert "(example " in line and "row 1" in line and "debug_nans" not in line
