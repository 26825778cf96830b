"""A tracker's thread: each step once, whatever fails, hangs or is made again."""

import math
import time
import types

import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trackers import tracker_thread
from praxis_lite.trackers.tracker import Tracker
from praxis_lite.trackers.tracker_thread import TrackerThread, numbers_of
from praxis_lite.trainer.hooks import tracking
from praxis_lite.trainer.metrics.json_lines import lost_path
from tests.support.tracked_runs import Hangs, Raises, Remembers, Replaces, run_in


def launch(tracker, first_step, last_step, *, offset=0.0, evaluates=(), made=0, evaluated=0):
    """Makes steps as a launch of a job does, and returns the tracker's notes.

    `made` and `evaluated` are the newest steps of an earlier launch that was killed.
    """
    thread = TrackerThread("t", tracker, run_in("/nowhere"), lambda step: step % 2 == 1)
    thread.resume_from(first_step, made, evaluated)
    thread.start()
    for step in range(first_step + 1, last_step + 1):
        thread.log_step(step, {"loss": offset + step})
        if step in evaluates:
            loss = {"loss": offset - step}
            thread.log_evaluation(step, {"heldout": loss, "other": loss})
    thread.end("finished")
    thread.join(10)
    assert not thread.is_alive()
    return list(thread.notes)


def losses(tracker):
    return {step: values["loss"] for step, values in tracker.points if "loss" in values}


def test_a_tracker_gets_each_step_once_over_launches_of_which_one_was_killed():
    tracker = Remembers()
    assert launch(tracker, 0, 5, evaluates=[4]) == []
    # Steps 4 and 5 are made again, and the evaluation, and come out otherwise.
    assert launch(tracker, 3, 9, offset=0.5, evaluates=[4, 8], made=5, evaluated=4) == []
    assert losses(tracker) == {1: 1, 3: 3, 5: 5, 7: 7.5, 9: 9.5}
    assert tracker.points == [
        (1, {"loss": 1}),
        (3, {"loss": 3}),
        (4, {"heldout/loss": -4, "other/loss": -4}),
        (5, {"loss": 5}),
        (7, {"loss": 7.5}),
        (8, {"heldout/loss": -7.5, "other/loss": -7.5}),
        (9, {"loss": 9.5}),
    ]
    assert [run.id for run in tracker.starts] == [run_in("/nowhere").id] * 2
    assert tracker.ending == ["finished"] * 2


@pytest.mark.parametrize(
    "num_steps, log_every, every, expected",
    [
        (7, None, None, [1, 2, 3, 4, 5, 6, 7]),
        (605, None, None, [*range(3, 605, 3), 605]),  # About 200.
        (9, 4, None, [4, 8, 9]),
        (9, 4, 5, [5, 9]),
    ],
)
def test_steps_are_sent_at_an_interval_and_at_the_end(num_steps, log_every, every, expected):
    run = types.SimpleNamespace(num_train_steps=num_steps, log_every_steps=log_every)
    tracker = types.SimpleNamespace(every=every)
    is_due = tracking._due_steps(types.SimpleNamespace(run=run), tracker)
    assert [step for step in range(1, num_steps + 1) if is_due(step)] == expected


@pytest.mark.parametrize("text, newest", [('{"step": 7}\n{"step": 9}\n', 9), ("{\n{}\n", 0)])
def test_a_resumed_tracker_is_told_the_newest_step_that_was_lost(tmp_path, text, newest):
    resumed = []
    thread = types.SimpleNamespace(resume_from=lambda *steps: resumed.append(steps), ident=1)
    files = JobDir(tmp_path)
    lost_path(files.metrics_jsonl).write_text(text)
    tracking.Trackers([thread], files).resume_from(5)
    assert resumed == [(5, newest, 0)]


def test_one_that_hides_later_steps_gets_them_again():
    tracker = Replaces()
    launch(tracker, 0, 5, evaluates=[4])
    launch(tracker, 3, 7, offset=0.5, evaluates=[4], made=5, evaluated=4)
    assert losses(tracker) == {1: 1, 3: 3, 5: 5.5, 7: 7.5}
    assert [step for step, values in tracker.points if "loss" not in values] == [4]


def test_a_failure_is_said_once_and_later_steps_come():
    tracker = Remembers(fails_at=3)
    (note,) = launch(tracker, 0, 5)
    assert "the tracker t failed: RuntimeError: no step 3" in note
    assert list(losses(tracker)) == [1, 5] and tracker.ending == ["finished"]


def test_one_that_fails_at_its_start_is_off():
    (note,) = launch(Raises(), 0, 5)
    assert "ConnectionError: no service at 127.0.0.1:9" in note

    class Lacks(Remembers):
        def start(self, run):
            raise ConfigError("t needs a package. Install it.")

    tracker = Lacks()
    assert launch(tracker, 0, 3) == ["note: t needs a package. Install it."]
    assert tracker.points == []


def test_one_that_hangs_costs_the_loop_nothing_and_holds_bounded_memory(monkeypatch):
    monkeypatch.setattr(tracker_thread, "MAX_QUEUED_CALLS", 50)
    thread = TrackerThread("t", Hangs(), run_in("/nowhere"), lambda step: True)
    began = time.monotonic()
    thread.resume_from(0, 0, 0)
    thread.start()
    for step in range(1, 200):
        thread.log_step(step, {"loss": 1.0})
    thread.end("finished")
    assert time.monotonic() - began < 5 and thread.is_alive()
    (note,) = thread.notes
    assert "50 calls behind" in note
    Hangs.let_go.set()
    thread.join(10)
    assert not thread.is_alive()
    Hangs.let_go.clear()


def test_a_latest_only_tracker_receives_only_the_latest_metrics():
    tracker = Remembers()
    tracker.latest_only = True
    launch(tracker, 0, 500, evaluates=[300])
    assert (300, {"heldout/loss": -300, "other/loss": -300}) in tracker.points
    assert 1 <= len(losses(tracker)) < 20


@pytest.mark.parametrize("value, expected", [
    (math.nan, math.nan), (True, 1.0), (np.float32(0.5), 0.5), (np.ones(()), 1.0),
    ("3", None), ([1.0], None), ({"a": 1.0}, None), (None, None),
])  # fmt: skip
def test_numbers_alone_are_given(value, expected):
    numbers = numbers_of({"step": 1, "x": value})
    assert numbers == ({} if expected is None else {"x": pytest.approx(expected, nan_ok=True)})


def test_the_settings_stay_as_they_are():
    class Opens(Tracker):
        def start(self, run):
            self.opened = run

    tracker = Opens()
    launch(tracker, 0, 1)
    assert not hasattr(tracker, "opened")
