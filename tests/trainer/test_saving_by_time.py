"""Checkpoints by time, and the lines of steps that a killed job did not save."""

import pytest

from praxis_lite import ConfigError, RunConfig, SaveSettings
from praxis_lite.job.processes.stop_consensus import StopConsensus
from praxis_lite.trainer.job_history import checkpoint_schedule
from praxis_lite.trainer.metrics.json_lines import read_json_lines
from tests.support.job_runs import copy_of_trained, launch


@pytest.mark.parametrize(
    ("settings", "seconds", "words"),
    [
        ({}, 600, "the first after 600 s"),
        ({"every_steps": 7}, None, "the first at step 42, and every 7 steps; and"),
        ({"every_steps": 7, "every_seconds": 60}, 60, "; or after 60 s"),
        ({"every_seconds": 0}, None, "all its steps are lost"),
    ],
)
def test_a_job_without_settings_saves_by_time(settings, seconds, words):
    run = RunConfig(num_train_steps=100, checkpoints=SaveSettings(**settings))
    assert run.checkpoints.seconds_between == seconds
    assert words in checkpoint_schedule(run, 37)


def test_seconds_are_none_or_a_number():
    with pytest.raises(ConfigError, match="run.checkpoints.every_seconds.*-1"):
        SaveSettings(every_seconds=-1)


def test_a_save_is_due_until_one_is_begun(mesh_of):
    consensus = StopConsensus(mesh_of(1, 4, 2))
    consensus.should_stop(False, True)
    assert consensus.save_is_due
    consensus.saved()
    assert not consensus.save_is_due
    consensus.should_stop(False, False)
    assert not consensus.save_is_due


@pytest.mark.slow
def test_a_job_saves_by_the_clock_and_reports_the_steps_that_it_recomputes(tmp_path):
    job = copy_of_trained(tmp_path / "job")
    again = launch(
        "--exp=jobzoo.experiments.Tiny",
        f"--job_log_dir={job.path}",
        "--set",
        "run.num_train_steps=12",
        "run.checkpoints.every_steps=None",
        "run.checkpoints.every_seconds=1",
        "run.checkpoints.max_to_keep=9",
    )
    assert again.code == 0, again.err
    assert "checkpoints: the first after 1 s" in again.out
    for step in job.checkpoints.iterdir():
        if step.name.isdigit() and int(step.name) > 6:
            step.rename(job.checkpoints / f"{step.name}.gone")
    again = launch(
        "--exp=jobzoo.experiments.Tiny",
        f"--job_log_dir={job.path}",
        "--set",
        "run.num_train_steps=12",
    )
    assert "steps 7 to 12 were not saved" in again.out
    lost = read_json_lines(job.path / "metrics.lost.jsonl")
    assert [line["step"] for line in lost] == [*range(7, 13)]
