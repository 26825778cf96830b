"""Tests that the comparison with an undisturbed run detects each kind of fault."""

import json

import numpy as np
import pytest

from tests.elastic import verdict
from tests.elastic.report import seconds_by_part, table
from tests.faults.outcome import Row

NUM_STEPS = 7


def line(step, **fields):
    """Returns a line of metrics.jsonl."""
    return {
        "step": step,
        "loss": 5.0 / step,
        "learning_rate": 1e-3,
        "num_skipped_steps": 0,
        "num_skipped_in_a_row": 0,
        **fields,
    }


def lines():
    return [line(step) for step in range(1, NUM_STEPS + 1)]


def evaluation(step, dataset="heldout", loss=3.0):
    return {"step": step, "dataset": dataset, "loss": loss}


def change(**fields):
    """Returns a line of elastic.jsonl."""
    return {
        "generation": 3,
        "kind": "died",
        "why": "process 1 was killed by SIGKILL",
        "who": [1],
        "members": [0, 2],
        "from_step": 20,
        "source": "disk",
        "lost_steps": 4,
        "reached": True,
        "seconds": {"notice": 1.0, "restore": 2.0, "total": 3.0},
        **fields,
    }


def test_a_job_that_is_the_same_passes():
    assert verdict.each_step_once(lines()).failures == []
    row = verdict.same_losses([line(1, loss=5.000009), *lines()[1:]], lines())
    assert row.failures == [] and row.tried == NUM_STEPS
    assert row.figures["largest difference"] == pytest.approx(9e-6)
    both = [evaluation(3), evaluation(6)]
    assert verdict.same_evaluations(both, both).failures == []


@pytest.mark.parametrize(
    "change_of, words",
    [
        (lambda given: given.insert(3, given[3]), "step 4 occurs 2 times"),
        (lambda given: given.pop(4), "1 steps are missing; the first is 5"),
        (lambda given: given.pop(0), "1 steps are missing; the first is 1"),
        (lambda given: given.reverse(), "out of order"),
    ],
)
def test_a_step_twice_or_never_is_caught(change_of, words):
    given = lines()
    change_of(given)
    assert any(words in failure for failure in verdict.each_step_once(given).failures)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"loss": 5.0 / 4 + 2e-5}, "step 4: loss"),
        ({"loss": float("nan")}, "step 4: loss nan"),
        ({"num_skipped_steps": 1}, "num_skipped_steps 1"),
        ({"learning_rate": 2e-3}, "learning_rate"),
    ],
)
def test_another_number_of_a_step_is_caught(fields, words):
    given = lines()
    given[3] = line(4, **fields)
    (failure,) = verdict.same_losses(given, lines()).failures
    assert words in failure


def test_a_job_that_ends_early_is_caught():
    assert "6 steps" in verdict.same_losses(lines()[:-1], lines()).failures[0]


@pytest.mark.parametrize(
    "given, words",
    [
        ([evaluation(3), evaluation(3), evaluation(6)], "(3, 'heldout')"),
        ([evaluation(3)], "(6, 'heldout')"),
        ([evaluation(3), evaluation(6, loss=3.00002)], "step 6, heldout: loss 3.00002"),
    ],
)
def test_an_evaluation_twice_never_or_with_another_loss_is_caught(given, words):
    failures = verdict.same_evaluations(given, [evaluation(3), evaluation(6)]).failures
    assert words in failures[0]


@pytest.mark.parametrize(
    "fields, fails",
    [
        ({}, False),
        ({"lost_steps": 5}, False),
        ({"lost_steps": 6}, True),
        ({"who": [1, 2], "lost_steps": 20}, False),
        ({"who": [1, 2], "lost_steps": 21}, True),
        ({"kind": "came", "lost_steps": 0}, False),
        ({"kind": "left", "lost_steps": 1}, True),
        ({"lost_steps": 99, "reached": False}, False),
        # Too soon for a save in memory.
        ({"from_step": 7, "lost_steps": 7}, False),
        ({"from_step": 7, "lost_steps": 8}, True),
    ],
)
def test_more_than_an_interval_lost_is_caught(fields, fails):
    before = change(from_step=10, lost_steps=0, kind="came")
    row = verdict.little_lost([before, change(**fields)], peer_steps=5, disk_steps=20)
    assert bool(row.failures) == fails


def test_after_a_generation_without_a_step_the_disk_counts():
    before = change(from_step=10, lost_steps=0, kind="came")
    lines = [before, change(reached=False), change(lost_steps=19)]
    assert verdict.little_lost(lines, peer_steps=5, disk_steps=20).failures == []


@pytest.mark.parametrize(
    "given, fails",
    [
        ({"w": [1.0, 2.0001]}, False),
        ({"w": [1.0, 2.001]}, True),
        ({"w": [1.0, np.nan]}, True),
        ({"w": [1.0, 2.0], "v": [1.0]}, True),
        ({"w": [1.0, 2.0, 0.0]}, True),
        ({"w": [1, 2]}, True),
    ],
)
def test_other_weights_are_caught(given, fails):
    row = Row("arrays")
    arrays = {name: np.array(value) for name, value in given.items()}
    verdict.compare_arrays(row, arrays, {"w": np.array([1.0, 2.0])})
    assert bool(row.failures) == fails


def test_another_count_is_caught():
    row = Row("arrays")
    verdict.compare_arrays(row, {"step": np.array(7)}, {"step": np.array(8)})
    assert row.failures == ["step: 7, undisturbed 8"]


def test_a_lost_step_with_another_loss_is_caught():
    assert verdict.same_lost_steps([line(3), line(3), line(5)], lines()).failures == []
    given = [line(3, loss=5.0 / 3 + 2e-5), line(8)]
    assert len(verdict.same_lost_steps(given, lines()).failures) == 2


def test_the_table_has_medians_and_the_worst_of_each_part():
    given = [
        change(seconds={"notice": seconds, "restore": 2.0, "total": seconds + 2.0})
        for seconds in (1.0, 2.0, 9.0)
    ]
    seconds = seconds_by_part([*given, change(reached=False), change(kind="start")])
    assert seconds["died"]["notice"] == {"median": 2.0, "worst": 9.0}
    assert seconds["all"]["total"] == {"median": 4.0, "worst": 11.0, "count": 3}
    assert "| total | 4.00 / 11.00 | 4.00 / 11.00 |" in table(seconds)


def test_the_record_of_changes_is_read(tmp_path):
    assert verdict.changes(tmp_path) == []
    (tmp_path / "elastic.jsonl").write_text(json.dumps(change()) + "\n")
    assert verdict.changes(tmp_path) == [change()]
