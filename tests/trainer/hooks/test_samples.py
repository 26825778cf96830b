"""Continuations of prompts while a job trains, compared with --mode=decode of its checkpoints."""

import json

import pytest

from praxis_lite import ConfigError, SampleSettings
from praxis_lite.job.job_dir import JobDir
from tests.support.job_runs import launch, lines_of, succeed
from tests.support.line_jobs import LINE
from tests.trackers.test_tensorboard import events_in

TINY = "--exp=jobzoo.experiments.Tiny"


def records_in(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_samples_are_those_of_mode_decode_and_change_no_loss(tmp_path):
    jobs = {name: JobDir(tmp_path / name) for name in ("on", "off")}
    steps = ["run.num_train_steps=5", "run.checkpoints.every_steps=2"]
    samples = ["run.samples.every_steps=2", "run.samples.prompts=the,a"]
    out = succeed(TINY, f"--job_log_dir={jobs['on'].path}", "--set", *steps, *samples).out
    succeed(TINY, f"--job_log_dir={jobs['off'].path}", "--set", *steps)
    assert lines_of(jobs["on"].metrics_jsonl) == lines_of(jobs["off"].metrics_jsonl)
    prompts = ("--prompt", "the", "--prompt", "a")
    succeed("--mode=decode", f"--job_log_dir={jobs['off'].path}", "--step=4", *prompts)
    actual = {step: records_in(jobs["on"].decode_jsonl("samples", step)) for step in (2, 4)}
    assert actual[4] == records_in(jobs["off"].decode_jsonl("command_line", 4))
    assert [record["prompt"] for record in actual[2]] == ["the", "a"] and actual[2] != actual[4]
    texts = [
        (event.step, value.tag)
        for event in events_in(jobs["on"].path / "tensorboard")
        for value in event.summary.value
        if value.tag.startswith("decode/samples")
    ]
    assert [step for step, _ in texts] == [2, 4]  # Each once, although the launch ends with 4.
    assert "Continuations (samples, step 2)" in out and "Continuations (samples, step 4)" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((LINE, "run.samples.prompts=a,"), "run.samples.prompts requires a language model task"),
        ((TINY, "run.samples.prompts="), "run.samples.prompts"),
    ],
)
def test_invalid_samples_fail_before_anything_compiles(tmp_path, argv, message):
    exp, setting = argv
    done = launch(
        exp, f"--job_log_dir={tmp_path}/job", "--set", "run.samples.every_steps=2", setting
    )
    assert done.code == 2 and message in " ".join(done.err.split())
    assert "compiling" not in done.out


@pytest.mark.parametrize("settings", [{"every_steps": 2}, {"prompts": "the"}, {"every_steps": 0}])
def test_wrong_settings_name_themselves(settings):
    with pytest.raises(ConfigError, match="run.samples.(prompts|every_steps)"):
        SampleSettings(**settings)
