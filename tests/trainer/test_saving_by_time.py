"""Checkpoints by time, and the lines of steps that a killed job had made."""

import pytest

from praxis_lite import ConfigError, RunConfig, SaveSettings
from praxis_lite.job.processes.stop_consensus import StopConsensus
from praxis_lite.trainer.job_history import when_checkpoints_come
from praxis_lite.trainer.metrics.json_lines import JsonLinesWriter, read_json_lines
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
def test_a_job_that_says_nothing_saves_by_time(settings, seconds, words):
    run = RunConfig(num_train_steps=100, checkpoints=SaveSettings(**settings))
    assert run.checkpoints.seconds_between == seconds
    assert words in when_checkpoints_come(run, 37)


def test_seconds_are_none_or_a_number():
    with pytest.raises(ConfigError, match="run.checkpoints.every_seconds.*-1"):
        SaveSettings(every_seconds=-1)


def test_a_save_is_due_until_one_is_begun(mesh_of):
    consensus = StopConsensus(mesh_of(1, 4, 2))
    consensus.reached(False, True)
    assert consensus.save_is_due
    consensus.saved()
    assert not consensus.save_is_due
    consensus.reached(False, False)
    assert not consensus.save_is_due


def test_lines_of_steps_that_are_made_again_are_kept_in_a_file_of_their_own(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for first, last in ((0, 9), (5, 8), (0, 2)):
        with JsonLinesWriter(path, first) as writer:
            for step in range(first + 1, last + 1):
                writer.write({"step": step, "loss": float(10 * last + step)})
    assert [line["step"] for line in read_json_lines(path)] == [1, 2]
    lost = read_json_lines(tmp_path / "metrics.lost.jsonl")
    assert [line["step"] for line in lost] == [6, 7, 8, 9, *range(1, 9)]
    # Of the run that made them.
    assert [line["loss"] for line in lost[:4]] == [96.0, 97.0, 98.0, 99.0]
    assert lost[-1]["loss"] == 88.0 and lost[4]["loss"] == 91.0


@pytest.mark.slow
def test_a_job_saves_by_the_clock_and_says_what_it_makes_again(tmp_path):
    job = copy_of_trained(tmp_path / "job")
    again = launch(
        "--exp=jobzoo.experiments.Tiny", f"--job_log_dir={job.path}", "--set",
        "run.num_train_steps=12", "run.checkpoints.every_steps=None",
        "run.checkpoints.every_seconds=1", "run.checkpoints.max_to_keep=9",
    )
    assert again.code == 0, again.err
    assert "checkpoints: the first after 1 s" in again.out
    for step in job.checkpoints.iterdir():
        if step.name.isdigit() and int(step.name) > 6:
            step.rename(job.checkpoints / f"{step.name}.gone")
    again = launch(
        "--exp=jobzoo.experiments.Tiny", f"--job_log_dir={job.path}", "--set",
        "run.num_train_steps=12",
    )
    assert "steps 7 to 12 were made before, but not saved" in again.out
    lost = read_json_lines(job.path / "metrics.lost.jsonl")
    assert [line["step"] for line in lost] == [*range(7, 13)]
