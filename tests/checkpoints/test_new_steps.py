"""New steps of a job, as a process beside its training sees them come and go."""

import os

import pytest

from praxis_lite import ConfigError
from praxis_lite.checkpoints.steps import new_steps
from praxis_lite.checkpoints.steps.new_steps import NewSteps
from praxis_lite.host import object_stores
from praxis_lite.job.job_dir import JobDir, job_dir_at
from praxis_lite.job.job_lock import JobLock, is_locked


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(new_steps, "_POLL_SECONDS", 0.01)
    (tmp_path / "config.json").touch()
    return JobDir(tmp_path)


def save(job, step):
    """Makes the folder of a step, whole by its name and its commit."""
    folder = job.checkpoints / f"{step}.saving"
    folder.mkdir(parents=True)
    (folder / "commit.json").touch()
    os.rename(folder, job.checkpoints / str(step))


def delete(job, step):
    (job.checkpoints / str(step) / "commit.json").unlink()
    (job.checkpoints / str(step)).rmdir()


def never(step):
    return False


def test_the_newest_step_is_taken_and_older_ones_are_said(job):
    notes = []
    for step in (3, 20, 100):
        save(job, step)
    with JobLock(job.path, notes.append):
        taken = NewSteps(job, 0.1, notes.append).until(never)
        assert next(taken) == 100
        for step in (110, 120):
            save(job, step)
        delete(job, 3)
        assert next(taken) == 120
        # While the next one is written it is none.
        (job.checkpoints / "130.saving").mkdir()
        save(job, 125)
        assert next(taken) == 125
    assert [line for line in notes if "skipped" in line] == [
        "skipped the checkpoints of steps 3, 20: 100 is newer",
        "skipped the checkpoints of steps 110: 120 is newer",
    ]


def test_a_step_that_a_job_makes_again_is_new(job):
    save(job, 10)
    save(job, 20)
    with JobLock(job.path, print):
        taken = NewSteps(job, 0.1, print).until(never)
        assert next(taken) == 20
        delete(job, 20)  # Rolled back, or killed and launched again.
        save(job, 15)
        assert next(taken) == 15
        save(job, 20)
        assert next(taken) == 20
        delete(job, 20)  # Both between two looks.
        save(job, 20)
        assert next(taken) == 20


def test_it_ends_with_the_job_once_the_last_step_was_taken(job):
    notes = []
    save(job, 10)
    with JobLock(job.path, notes.append):
        taken = NewSteps(job, 100.0, notes.append).until(lambda step: step == 20)
        assert next(taken) == 10
        save(job, 20)
    assert list(taken) == [20]
    assert notes == ["the job has ended with step 20"]


def test_it_waits_for_a_job_that_was_killed_and_then_ends(job):
    notes = []
    save(job, 10)
    taken = NewSteps(job, 0.2, notes.append).until(lambda step: step == 20)
    assert next(taken) == 10
    with JobLock(job.path, notes.append):  # Launched again.
        save(job, 15)
        assert next(taken) == 15
    assert list(taken) == []
    assert f"no process trains in {job.path}" in notes[-1] and "step 15" in notes[-1]


def test_it_waits_for_the_first_step_and_no_longer_than_it_is_told(job):
    notes = []
    with pytest.raises(ConfigError, match="--follow_seconds"):
        NewSteps(job, 0.1, notes.append).wait_for_first()
    assert notes == [f"waiting for the first checkpoint of {job.path}"]
    save(job, 1)
    NewSteps(job, 0.1, notes.append).wait_for_first()


def test_a_look_at_the_lock_keeps_no_training_out(tmp_path):
    assert not is_locked(tmp_path)
    with JobLock(tmp_path, print):
        assert is_locked(tmp_path)
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
    with JobLock(tmp_path, print):
        pass


def test_the_steps_of_a_job_in_a_store_are_followed():
    pytest.importorskip("obstore")
    object_stores._bucket.cache_clear()
    job, notes = job_dir_at("memory://bucket/job"), []
    steps = NewSteps(job, 9, notes.append)
    (job.location / "checkpoints" / "3" / "commit.json").write_bytes(b"3")
    (job.location / "config.json").write_bytes(b"{}")  # Written after the mirror was created.
    steps.wait_for_first()
    followed = steps.until(lambda step: step == 5)
    assert next(followed) == 3
    (job.location / "checkpoints" / "5" / "commit.json").write_bytes(b"5")
    assert list(followed) == [5] and notes[-1] == "the job has ended with step 5"
