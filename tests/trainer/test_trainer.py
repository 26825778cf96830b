"""Training that is killed, ends, moves or changes: what goes on, and what is refused.

That what goes on is the same bit for bit, with all that a step carries: test_resume.py.
"""

import dataclasses
import os
import shutil

import pytest

from praxis_lite import ConfigError, EvaluationSettings, RunConfig
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.checks.job_checks import check_num_batches
from praxis_lite.trainer.checks.resume import check_resumable
from praxis_lite.trainer.metrics.json_lines import read_json_lines
from tests.support.job_runs import copy_of_trained, home, launch, lines_of, succeed, trained
from tests.support.line_jobs import LINE

TINY = "--exp=jobzoo.experiments.Tiny"


def steps_of(job):
    return lines_of(job.metrics_jsonl)


def assert_as_if_never_interrupted(job):
    """Asserts the same losses, norms, rates and evaluations as of the job trained in one go."""
    whole = trained()[0]
    steps = steps_of(job)
    assert [line["step"] for line in steps] == list(range(1, 8))
    assert steps == steps_of(whole)
    evaluations = read_json_lines(job.eval_metrics_jsonl)
    assert [line["step"] for line in evaluations] == [3, 6, 7]
    assert evaluations == read_json_lines(whole.eval_metrics_jsonl)


@pytest.mark.slow
def test_a_launch_that_was_stopped_in_the_middle_of_init_begins_anew(tmp_path, monkeypatch):
    job, whole = JobDir(tmp_path / "job"), JobDir(tmp_path / "whole")
    argv = (LINE, f"--job_log_dir={job.path}")

    def stop(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("praxis_lite.core.partitioner.partitioner.Partitioner.key", stop)
        assert launch(*argv).code == 130
    # It is the job's directory already, and not "no job of praxis_lite".
    assert "config.json" in os.listdir(job.path)
    assert "initializing the state" in succeed(*argv).out
    succeed(LINE, f"--job_log_dir={whole.path}")
    assert lines_of(job.metrics_jsonl) == lines_of(whole.metrics_jsonl) != []


@pytest.mark.slow
def test_a_finished_job_has_nothing_to_do_and_more_steps_go_on(tmp_path):
    job = copy_of_trained(tmp_path / "job")
    argv, drawn = (TINY, f"--job_log_dir={job.path}"), job.loss_curve_png.stat().st_mtime_ns
    done = succeed(*argv)
    assert job.loss_curve_png.stat().st_mtime_ns == drawn  # Nothing new is in it.
    assert "has already completed its 7 steps" in done.out
    assert "raise run.num_train_steps" in done.out
    assert_as_if_never_interrupted(job)
    done = succeed(*argv, "--set", "run.num_train_steps=8")
    assert "changed since the job was last run: run.num_train_steps: 7 -> 8" in done.out
    assert [line["step"] for line in steps_of(job)] == list(range(1, 9))
    assert steps_of(job)[:7] == steps_of(trained()[0])


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("datasets.train.seed=7", "seed was 0, is 7"),
        pytest.param(
            "datasets.train.corpus.files={}/texts/t[0-6].txt",
            "corpus.sha256 was ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_other_training_data_is_refused_before_anything_is_read(tmp_path, setting, words):
    job = copy_of_trained(tmp_path / "job")
    before = steps_of(job), job.config_json.read_text()
    argv = (TINY, f"--job_log_dir={job.path}", "--set", "run.num_train_steps=8")
    done = launch(*argv, setting.format(home()))
    assert (done.code, done.num_compiled) == (2, 0)
    message = " ".join(done.err.split())
    assert "datasets.train " in message and "step 7 " in message and words in message
    assert (steps_of(job), job.config_json.read_text()) == before


def test_another_model_is_refused_before_anything_compiles(tmp_path):
    job = copy_of_trained(tmp_path / "job")
    config = job.config_json.read_text()
    for argv in ((TINY, "--set", "run.num_train_steps=8"), ("--mode=decode", "--set")):
        done = launch(*argv, "task.model.model_dims=8", f"--job_log_dir={job.path}")
        assert (done.code, done.num_compiled) == (2, 0)
        message = " ".join(done.err.split())
        assert " mdl_vars/params/final_ln/scale has shape [7] " in message
    assert job.config_json.read_text() == config


@dataclasses.dataclass
class Pipeline:
    num_batches: int | None
    settings: dict = dataclasses.field(default_factory=dict)

    def fingerprint(self):
        return self.settings


def test_training_data_that_ends_too_early_is_refused():
    run = RunConfig(num_train_steps=7)
    check_num_batches({"train": Pipeline(7), "heldout": Pipeline(1)}, run)
    check_num_batches({"train": Pipeline(None)}, run)
    with pytest.raises(ConfigError, match="datasets.train.*5.*7"):
        check_num_batches({"train": Pipeline(5)}, run)


def test_an_evaluation_without_end_is_refused():
    datasets = {"train": Pipeline(None), "heldout": Pipeline(None)}
    with pytest.raises(ConfigError, match="datasets.heldout.*evaluation.max_batches"):
        check_num_batches(datasets, RunConfig(num_train_steps=7))
    two = EvaluationSettings(max_batches=2)
    check_num_batches(datasets, RunConfig(num_train_steps=7, evaluation=two))


def test_a_fingerprint_is_compared_as_json_keeps_it():
    data = {"next_batch": 3, "fingerprint": {"shape": [7, 13], "corpus": {"files": ["a"]}}}
    check_resumable(data, Pipeline(None, {"shape": (7, 13), "corpus": {"files": ("a",)}}))
    with pytest.raises(ConfigError, match=r"3.*corpus.files.*\['a'\].*\['b'\]"):
        check_resumable(data, Pipeline(None, {"shape": (7, 13), "corpus": {"files": ["b"]}}))


CHANGED = {
    "next_batch": 7,
    "skipped": [2, 5, 9],
    "fingerprint": {"seed": 3, "batch_size": 13, "corpus": {"sha256": "ab", "heldout_percent": 10}},
}
NOW = Pipeline(
    None,
    {
        "seed": 4,
        "batch_size": 13,
        "corpus": {"sha256": "cd", "heldout_percent": 20},
        "stride": None,
    },
)


def test_changed_data_is_accepted_by_name_alone():
    with pytest.raises(ConfigError) as refused:
        check_resumable(CHANGED, NOW, ("corpus.sha256",))
    # Two batches of seven were left out before.
    assert " corpus.heldout_percent was 10, is 20; " in (str(refused.value))
    assert "seed was 3, is 4. " in str(refused.value) and "sha256 was" not in str(refused.value)
    assert "'run.accept_changed_data=corpus.heldout_percent,seed'" in str(refused.value)
    message = check_resumable(CHANGED, NOW, ("corpus", "seed", "batch_size"))
    assert message == [
        f"datasets.train: {difference} (run.accept_changed_data)"
        for difference in (
            "corpus.heldout_percent was 10, is 20",
            "corpus.sha256 was 'ab', is 'cd'",
            "seed was 3, is 4",
        )
    ]


@pytest.mark.parametrize(
    ("name", "words"), [("sed", r"'sed'.*seed\?"), ("corp", "'corp'"), ("", "''")]
)
def test_a_name_that_the_data_has_not_is_refused(name, words):
    with pytest.raises(ConfigError, match=f"run.accept_changed_data.*{words}"):
        check_resumable(CHANGED, NOW, ("seed", name))


@pytest.mark.slow
def test_accepted_data_is_trained_on_and_said_and_not_asked_for_again(tmp_path):
    argv = (LINE, f"--job_log_dir={tmp_path}", "--set")
    succeed(*argv, "run.num_train_steps=7")
    argv += ("datasets.train.batch_size=17",)
    done = succeed(*argv, "run.num_train_steps=8", "run.accept_changed_data=batch_size,")
    assert "datasets.train: batch_size was 13, is 17 (run.accept_changed_data)" in done.out
    assert [line["step"] for line in lines_of(JobDir(tmp_path).metrics_jsonl)] == [*range(1, 9)]
    # The new checkpoint is of the new data.
    done = launch(*argv, "run.num_train_steps=9", "datasets.train.batch_size=13")
    assert done.code == 2 and "checkpoint of step 8 was trained with: batch_size was 17, is 13" in (
        " ".join(done.err.split())
    )


@pytest.mark.slow
def test_moved_files_are_the_same_data(tmp_path):
    job = copy_of_trained(tmp_path / "job")
    shutil.copytree(home() / "texts", tmp_path / "elsewhere")
    done = succeed(
        TINY,
        f"--job_log_dir={job.path}",
        "--set",
        f"datasets.train.corpus.files={tmp_path}/elsewhere/*.txt",
    )
    assert "has already completed its 7 steps" in done.out
