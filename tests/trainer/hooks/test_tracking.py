"""Trackers of a real job: set on the command line, and whatever they do, it trains."""

import logging
import re
import sys

import fiddle as fdl
import numpy as np
import pytest

from praxis_lite import ConfigError, MLflow, RunConfig, TensorBoard, WeightsAndBiases
from praxis_lite.config.config_json import config_lines, dump_config, load_config
from praxis_lite.config.overrides import apply_overrides
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trackers.tracker import Histogram
from praxis_lite.trackers.tracker_thread import TrackerThread
from praxis_lite.trainer.hooks import tracking
from praxis_lite.trainer.metrics.json_lines import JsonLinesWriter, read_json_lines
from tests.support.job_runs import launch, lines_of, succeed
from tests.support.line_jobs import LINE
from tests.support.tracked_runs import Hangs, Remembers, run_in
from tests.trackers.test_tensorboard import events_in


def test_a_tracker_is_set_by_name_and_taken_away_and_the_config_keeps_it():
    config = fdl.Config(RunConfig, num_train_steps=7)
    root = fdl.Config(dict, run=config)
    # The default beside it, an instance, becomes a part of the config that JSON can hold.
    apply_overrides(root, ["run.trackers.mlflow=MLflow()"])
    assert load_config(dump_config(root, "zoo.Tiny"), packages=["zoo"]).config == root
    assert fdl.build(config).trackers == {"tensorboard": TensorBoard(), "mlflow": MLflow()}
    apply_overrides(
        root,
        [
            "run.trackers.wandb=WeightsAndBiases()",
            "run.trackers.wandb.tags=a,b",
            "run.trackers.tensorboard.every=3",
            "run.trackers.text=PrometheusTextfile()",
        ],
    )
    built = fdl.build(config)
    assert built.trackers["wandb"] == WeightsAndBiases(tags=("a", "b"))
    assert built.trackers["tensorboard"] == TensorBoard(every=3)
    assert "run.trackers.wandb.project=None" in config_lines(root)
    text = dump_config(root, "zoo.Tiny")
    assert load_config(text, packages=["zoo"]).config == root
    apply_overrides(root, ["run.trackers.tensorboard=None", "run.trackers.wandb=none"])
    assert fdl.build(config).trackers["tensorboard"] is None
    assert RunConfig(num_train_steps=7).trackers == {"tensorboard": TensorBoard()}


@pytest.mark.parametrize("setting, words", {
    "run.trackers.wandb=WeightAndBiases()": "WeightsAndBiases",
    "run.trackers.wandb=SaveSettings()": "run.trackers.wandb is SaveSettings.*a Tracker",
    "run.trackers.tensorboard.every=0": "run.trackers.tensorboard.every is 0",
    "run.trackers.wandb.project=x": "run.trackers.wandb.project: the config has no such field",
    "run.checkpoint.every_steps=3": "the config has no such field",
}.items())  # fmt: skip
def test_a_wrong_tracker_is_refused_with_its_path(setting, words):
    config = fdl.Config(RunConfig, num_train_steps=7)
    with pytest.raises(ConfigError) as error:
        apply_overrides(fdl.Config(dict, run=config), [setting])
        fdl.build(config)
    assert re.search(words, " ".join(str(error.value).split()))


@pytest.mark.slow
def test_histograms_reach_the_trackers_and_change_no_loss(tmp_path):
    jobs = {name: JobDir(tmp_path / name) for name in ("on", "off")}
    for name, job in jobs.items():
        histograms = ["run.histograms_every_steps=3"] if name == "on" else []
        succeed(LINE, f"--job_log_dir={job.path}", "--set", "run.num_train_steps=7", *histograms)
    found = {
        name: {
            (event.step, value.tag): value.histo
            for event in events_in(job.path / "tensorboard")
            for value in event.summary.value
            if value.HasField("histo")
        }
        for name, job in jobs.items()
    }
    names = ("weights/w", "gradients/w")
    assert found == {"on": found["on"], "off": {}}
    assert set(found["on"]) == {(step, name) for step in (3, 6) for name in names}
    for histogram in found["on"].values():
        assert sum(histogram.bucket) == histogram.num == 5
        assert len(histogram.bucket) == len(histogram.bucket_limit) == 65
    assert lines_of(jobs["on"].metrics_jsonl) == lines_of(jobs["off"].metrics_jsonl)


def test_a_tracker_without_histograms_receives_statistics(tmp_path):
    tracker = Remembers()
    thread = TrackerThread("t", tracker, run_in(tmp_path), lambda step: True)
    thread.resume_from(0, 4, 0)  # An earlier launch has sent the steps up to 4.
    thread.start()
    edges, counts = np.linspace(-2.0, 3.0, 65), np.ones(64)
    for step in (4, 8):
        thread.log_histograms(step, {"weights/w": Histogram(edges, counts, 0.5, 1.5, 0.0)})
    thread.end("finished")
    thread.join()
    expected = {"min": -2.0, "max": 3.0, "mean": 0.5, "std": 1.5, "num_not_finite": 0.0}
    assert tracker.points == [(8, {f"weights/w/{name}": x for name, x in expected.items()})]


def test_decoded_samples_and_the_loss_curve_come_at_the_end(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    job = JobDir(tmp_path)
    for dataset, step in (("prompts", 3), ("prompts", 7), ("old", 2)):
        path = job.decode_jsonl(dataset, step)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{{"prompt": "at {step}", "continuation": "on"}}\n')
    job.loss_curve_png.write_bytes(b"png")
    tracker = Remembers()
    thread = TrackerThread("t", tracker, run_in(tmp_path), lambda step: True)
    with tracking.Trackers([thread], job) as trackers:
        trackers.resume_from(7)
        trackers.finish(3, 7, stopped=True)
    (decoded, curve), ending = tracker.calls, tracker.ending
    assert decoded[:2] == (7, "decode/prompts") and "| at 7" in decoded[2]
    assert curve == (7, "loss_curve", b"png") and ending == ["stopped"] and not caplog.records
    job.decode_jsonl("prompts", 7).write_text("no json")
    with tracking.Trackers([], job) as trackers:
        trackers.finish(3, 7, stopped=False)  # Nobody asks.
    assert not caplog.records


def test_trackers_get_no_step_again_that_an_earlier_launch_made(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    job, tracker = JobDir(tmp_path), Remembers()
    for last_step in (7, 5):  # Two launches were killed, and each went on from step 3.
        with JsonLinesWriter(job.metrics_jsonl, 3) as writer:
            for step in range(writer.newest_kept + 1, last_step + 1):
                writer.write({"step": step, "loss": 1.0})
    with JsonLinesWriter(job.metrics_jsonl, 3):
        thread = TrackerThread("t", tracker, run_in(tmp_path), lambda step: True)
        with tracking.Trackers([thread], job) as trackers:
            trackers.resume_from(3)
            for step in range(4, 10):
                trackers.log_step(step, {"step": step, "loss": 2.0})
    assert [step for step, _ in tracker.points] == [8, 9] and not caplog.records


def test_the_id_of_a_run_is_made_once(tmp_path):
    first = tracking.run_id(tmp_path / "trackers")
    assert len(first) == 32 and int(first, 16)
    assert tracking.run_id(tmp_path / "trackers") == first
    (tmp_path / "trackers" / "run_id.json").write_text("[]")
    with pytest.raises(ConfigError, match="run_id.json contains no run id"):
        tracking.run_id(tmp_path / "trackers")


@pytest.mark.slow
def test_a_job_trains_as_ever_though_one_tracker_hangs_and_one_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "END_SECONDS", 0.5)
    zoo = "tests.support.tracked_runs"
    done = launch(
        "--packages=jobzoo,tests",
        "--exp=jobzoo.experiments.Tiny",
        f"--job_log_dir={tmp_path}/job",
        "--metrics_port=0",
        "--set",
        "run.num_train_steps=4",
        f"run.trackers.hangs={zoo}.Hangs()",
        f"run.trackers.raises={zoo}.Raises()",
    )
    Hangs.let_go.set()
    assert done.code == 0 and done.err == ""
    lines = done.out.splitlines()
    (failed,) = (line for line in lines if "the tracker raises failed" in line)
    assert "ConnectionError: no service at 127.0.0.1:9; training continues without it" in failed
    assert any("the tracker hangs did not finish within 0.5 s" in line for line in lines)
    assert any(line.startswith("metrics for Prometheus: http://127.0.0.1:") for line in lines)
    job = JobDir(tmp_path / "job")
    assert [line["step"] for line in read_json_lines(job.metrics_jsonl)] == [1, 2, 3, 4]
    assert [path.name for path in job.trackers.iterdir()] == ["run_id.json"]
    Hangs.let_go.clear()


def test_a_missing_package_and_a_wrong_port_are_said_before_anything_compiles(tmp_path):
    def refused(*argv):
        done = launch("--exp=jobzoo.experiments.Tiny", f"--job_log_dir={tmp_path}/job", *argv)
        assert done.code == 2 and done.num_compiled == 0
        return " ".join(done.err.split())

    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("praxis_lite.host.optional_packages.is_installed", lambda name: False)
        error = refused("--set", "run.trackers.w=WeightsAndBiases()")
    assert "WeightsAndBiases needs wandb" in error
    assert "pip install 'praxis_lite[wandb]'" in error
    assert not {"wandb", "mlflow"} & (set(sys.modules) - before)
    assert "70000 is not a port" in refused("--metrics_port=70000")
    assert "--metrics_host requires --metrics_port" in refused("--metrics_host=0.0.0.0")
