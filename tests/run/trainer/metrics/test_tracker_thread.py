"""A tracker's thread: each step once, whatever fails, hangs or is made again."""

import math
import time

import pytest

from praxis_lite import ConfigError
from praxis_lite.run.job.job_dir import JobDir
from praxis_lite.run.trackers.tracker import Tracker
from praxis_lite.run.trainer.metrics import tracker_thread
from praxis_lite.run.trainer.metrics.json_lines import JsonLinesWriter
from praxis_lite.run.trainer.metrics.tracker_thread import TrackerThread
from tests.support.tracked_runs import Hangs, Remembers, Replaces, run_in


@pytest.fixture
def files(tmp_path):
    (tmp_path / "trackers").mkdir()
    return JobDir(tmp_path)


@pytest.fixture(autouse=True)
def tries_again_at_once(monkeypatch):
    monkeypatch.setattr(tracker_thread, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(tracker_thread, "_NEWEST_SECONDS", 0.05)


def thread_of(tracker, files, every=1):
    thread = TrackerThread("t", tracker, run_in(files.path), files, lambda step: step % every == 0)
    thread.start()
    return thread


def launch(tracker, files, first_step, last_step, *, offset=0.0, evaluates=(), num_points=0):
    """Makes steps as a launch of a job does, and returns the tracker's notes.

    It ends once the tracker has `num_points`.
    """
    thread = thread_of(tracker, files)
    with (
        JsonLinesWriter(files.metrics_jsonl, first_step) as steps,
        JsonLinesWriter(files.eval_metrics_jsonl, first_step) as evaluations,
    ):
        thread.go_on_from(first_step)
        for step in range(first_step + 1, last_step + 1):
            steps.write({"step": step, "loss": offset + step})
            thread.made(step)
            if step in evaluates:
                for dataset in ("heldout", "other"):
                    evaluations.write({"step": step, "dataset": dataset, "loss": offset - step})
                thread.evaluated(step)
    deadline = time.monotonic() + 10
    while len(getattr(tracker, "points", ())) < num_points and time.monotonic() < deadline:
        time.sleep(0.002)
    thread.end("finished")
    thread.join(10)
    assert not thread.is_alive()
    return list(thread.notes)


def losses(tracker):
    return {step: values["loss"] for step, values in tracker.points if "loss" in values}


def test_a_tracker_gets_each_step_once_over_launches_of_which_one_was_killed(files):
    tracker = Remembers()
    assert launch(tracker, files, 0, 5, evaluates=[3, 5]) == []
    # Steps 4 and 5 are made again, and their evaluation, and come out otherwise.
    assert launch(tracker, files, 3, 7, offset=0.5, evaluates=[5, 6]) == []
    assert [step for step, values in tracker.points if "loss" in values] == list(range(1, 8))
    assert losses(tracker) == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6.5, 7: 7.5}
    evaluations = [(step, values) for step, values in tracker.points if "loss" not in values]
    assert evaluations == [
        (3, {"heldout/loss": -3, "other/loss": -3}), (5, {"heldout/loss": -5, "other/loss": -5}),
        (6, {"heldout/loss": -5.5, "other/loss": -5.5}),
    ]
    assert [run.id for run in tracker.starts] == [run_in(files.path).id] * 2
    assert tracker.ending == ["finished"] * 2


def test_one_that_hides_later_steps_gets_them_again(files):
    tracker = Replaces()
    launch(tracker, files, 0, 5, evaluates=[3, 5])
    launch(tracker, files, 3, 7, offset=0.5, evaluates=[5])
    assert losses(tracker) == {1: 1, 2: 2, 3: 3, 4: 4.5, 5: 5.5, 6: 6.5, 7: 7.5}
    assert [step for step, values in tracker.points if "loss" not in values] == [3, 5]


def test_one_that_comes_later_gets_the_steps_before(files):
    launch(Remembers(), files, 0, 5, evaluates=[2])
    (files.trackers / "t.json").unlink()
    tracker = Remembers()
    launch(tracker, files, 5, 6)
    assert list(losses(tracker)) == [1, 2, 3, 4, 5, 6]
    assert (2, {"heldout/loss": -2, "other/loss": -2}) in tracker.points


def test_a_failure_is_said_once_and_nothing_is_lost(files):
    tracker = Remembers(fails_at=3, num_failures=2)
    (note,) = launch(tracker, files, 0, 5, evaluates=[4], num_points=6)
    assert "the tracker t failed, and training goes on: RuntimeError: no step 3" in note
    assert sorted(step for step, _ in tracker.points) == [1, 2, 3, 4, 4, 5]
    assert len(tracker.starts) == 3 and tracker.ending == ["finished"]


def test_what_it_lacks_at_the_end_comes_with_the_next_launch(files):
    tracker = Remembers(fails_at=3, num_failures=1000)
    notes = launch(tracker, files, 0, 4)
    assert "the next launch of the job gives it what it lacks" in notes[-1]
    assert tracker.ending == ["finished"]  # So that it closes its files.
    tracker.failures.clear()
    assert launch(tracker, files, 4, 5) == []
    assert [step for step, _ in tracker.points] == [1, 2, 3, 4, 5]


def test_what_only_the_user_can_mend_is_said_and_not_tried_again(files):
    class Lacks(Remembers):
        def start(self, run):
            super().start(run)
            raise ConfigError("t needs a package. Install it.")

    tracker = Lacks()
    assert launch(tracker, files, 0, 3) == ["note: t needs a package. Install it."]
    assert len(tracker.starts) == 1 and tracker.points == []


def test_one_that_hangs_costs_the_loop_nothing(files):
    thread = thread_of(Hangs(), files)
    began = time.monotonic()
    with JsonLinesWriter(files.metrics_jsonl, None) as writer:
        thread.go_on_from(0)
        for step in range(1, 200):
            writer.write({"step": step, "loss": 1.0})
            thread.made(step)
    thread.end("finished")
    assert time.monotonic() - began < 5 and thread.is_alive()
    Hangs.let_go.set()
    thread.join(10)
    assert not thread.is_alive()
    Hangs.let_go.clear()


def test_the_newest_alone_comes_to_one_that_wants_no_other(files):
    tracker = Remembers()
    tracker.newest_alone = True
    launch(tracker, files, 0, 500, evaluates=[300])
    assert tracker.points.count((300, {"heldout/loss": -300, "other/loss": -300})) == 1
    assert list(losses(tracker))[-1] == 500 and len(losses(tracker)) < 100
    assert not (files.trackers / "t.json").exists()


def test_numbers_alone_are_given_nan_among_them(files):
    tracker = Remembers()
    thread = thread_of(tracker, files)
    with JsonLinesWriter(files.metrics_jsonl, None) as writer:
        thread.go_on_from(0)
        writer.write({"step": 1, "loss": math.nan, "is_spike": True, "words": "x", "list": [1]})
        thread.made(1)
    thread.text(1, "sample", "words")
    thread.image(1, "curve", b"png")
    thread.end("failed")
    thread.join(10)
    ((step, values),) = tracker.points
    assert step == 1 and values.keys() == {"loss", "is_spike"} and math.isnan(values["loss"])
    assert tracker.calls == [(1, "sample", "words"), (1, "curve", b"png")]
    assert tracker.ending == ["failed"]


def test_the_settings_stay_as_they_are(files):
    class Opens(Tracker):
        def start(self, run):
            self.opened = run

    tracker = Opens()
    launch(tracker, files, 0, 1)
    assert not hasattr(tracker, "opened")
