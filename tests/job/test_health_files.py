"""The files that a cluster's probes look at, and the warning of a save that takes too long."""

import os
import re
import threading
import time
from types import SimpleNamespace

import pytest

from praxis_lite.job import health_files
from praxis_lite.job.health_files import HealthBeat, HealthFiles
from praxis_lite.job.processes import watchdog
from praxis_lite.job.processes.watchdog import SAVING, Watchdog
from praxis_lite.modes.on_clusters import Grace, Health
from tests.support.job_runs import launch
from tests.support.line_jobs import LINE


def age(path):
    return time.time() - path.stat().st_mtime


def test_the_files_are_there_while_it_is_entered_and_not_those_of_a_killed_process(tmp_path):
    folder = tmp_path / "not/made/yet"
    folder.mkdir(parents=True)
    (folder / "ready").touch()  # Left by a container that was killed.
    with HealthFiles(folder) as files:
        assert [path.name for path in folder.iterdir()] == ["alive"]
        os.utime(folder / "alive", (0, 0))
        files.alive()
        assert age(folder / "alive") < 30
        files.ready(True)
        assert (folder / "ready").exists()
        files.ready(False)
        assert not (folder / "ready").exists()
        files.ready(True)
    assert list(folder.iterdir()) == []


def test_alive_grows_old_while_the_loop_is_silent_and_is_renewed_after(tmp_path, monkeypatch):
    monkeypatch.setattr(health_files, "BEAT_SECONDS", 0.01)
    renewed = threading.Event()
    files = HealthFiles(tmp_path)
    monkeypatch.setattr(files, "alive", renewed.set)

    def is_renewed(seconds=5.0):
        renewed.clear()
        return renewed.wait(seconds)

    monkeypatch.setattr(watchdog, "write_now", lambda text: None)
    with Watchdog(0.1, exits=False) as dog, HealthBeat(files) as beat:
        assert is_renewed()
        health = Health(beat)
        health.before_training(SimpleNamespace(watchdog=dog), None)
        time.sleep(0.15)
        assert is_renewed()  # The first step compiles.
        dog.step_ended(7)
        time.sleep(0.15)
        assert not is_renewed(0.1)
        with dog.during(SAVING):
            time.sleep(0.15)
            assert is_renewed()
        dog.alive()
        assert is_renewed()
        time.sleep(0.15)
        health.__exit__(None, None, None)
        assert is_renewed()  # What follows the loop is not the watchdog's.


def test_a_job_is_ready_from_its_first_step_to_its_last(tmp_path, monkeypatch):
    folder, seen = tmp_path / "health", []
    ready = HealthFiles.ready

    def record(files, is_ready):
        seen.append((is_ready, (folder / "alive").exists()))
        ready(files, is_ready)

    monkeypatch.setattr(HealthFiles, "ready", record)
    done = launch(
        LINE,
        f"--job_log_dir={tmp_path / 'job'}",
        f"--health_dir={folder}",
        "--grace_seconds=60",
        "--set",
        "run.num_train_steps=3",
    )
    assert done.code == 0, done.err
    assert "WARNING" not in done.out
    assert seen == [(True, True)] * 3 + [(False, True)]
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--health_dir=JOB/health"], "--health_dir.*outside --job_log_dir"),
        (["--health_dir=FILE/health"], "--health_dir=.*cannot be written.*local directory"),
        (["--grace_seconds=0"], "--grace_seconds is 0; expected a number of seconds, 1 or more"),
    ],
)
def test_what_is_wrong_is_said_before_anything_compiles(tmp_path, flags, words):
    (tmp_path / "file").touch()
    flags = [
        flag.replace("JOB", f"{tmp_path / 'job'}").replace("FILE", f"{tmp_path / 'file'}")
        for flag in flags
    ]
    done = launch(LINE, f"--job_log_dir={tmp_path / 'job'}", *flags)
    assert done.code == 2
    assert re.search(words, " ".join(done.err.split()))
    assert not (tmp_path / "job").exists()


class Loop:
    """A loop whose save begins at `saved_at` and goes on for as long as a test says."""

    def __init__(self):
        self.saved_at, self.saves = 0.0, False
        self.checkpoints = SimpleNamespace(is_saving=lambda: self.saves)


def test_a_grace_that_is_shorter_than_two_steps_and_two_saves_is_warned_of_once(
    monkeypatch, caplog
):
    loop, grace = Loop(), Grace(60)
    grace.before_training(loop, None)
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("praxis_lite.modes.on_clusters.time", clock)
    now = 100.0
    grace.after_metrics(SimpleNamespace(line={"step_time": 10.5}))
    grace.after_metrics(SimpleNamespace(line={"step_time": 0.5}))
    grace.after_step(None)
    loop.saved_at, loop.saves, now = 101.0, True, 102.0
    grace.after_step(None)
    assert not caplog.messages
    loop.saves, now = False, 120.0  # 19 s; 2 * (10.5 + 19) = 59.
    grace.after_step(None)
    assert not caplog.messages
    loop.saved_at, now = 130.0, 150.0  # 20 s: 61.
    grace.after_step(None)
    loop.saved_at, now = 160.0, 190.0
    grace.after_step(None)
    (line,) = caplog.messages
    assert "may need 61 s" in line and "two steps of 10.5 s and two saves of 20.0 s" in line
    assert "--grace_seconds=60" in line
    # The job that goes on from the checkpoint warns when it begins.
    again = Grace(60)
    again.restore(grace.to_save())
    again.before_training(Loop(), None)
    assert "may need 81 s" in caplog.messages[1]
