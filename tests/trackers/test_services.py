"""One run in W&B, MLflow and TensorBoard, though its job was killed: read by each library."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from unittest import mock

import pytest

from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.hooks.tracking import run_id
from praxis_lite.trainer.metrics.json_lines import read_json_lines
from tests.support.job_runs import start_process

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """The job, what each library has of it, the number of steps, and what the launches printed."""
    folder = tmp_path_factory.mktemp("tracked")
    job, uri = JobDir(folder / "job"), f"sqlite:///{folder}/mlflow.db"

    def launch(num_steps):
        environment = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
        with mock.patch.dict(os.environ, environment):
            return start_process(
                "--exp=jobzoo.experiments.Tiny",
                "--job_log_dir=job",
                "--set",
                f"run.num_train_steps={num_steps}",
                "run.log_every_steps=1",
                "run.histograms_every_steps=5",
                "run.checkpoints.every_steps=5",
                "run.evaluation.every_steps=5",
                "run.trackers.wandb=WeightsAndBiases()",
                "run.trackers.mlflow=MLflow()",
                f"run.trackers.mlflow.tracking_uri={uri}",
                "run.trackers.mlflow.experiment=tiny",
                cwd=folder,
            )

    process, deadline = launch(5000), time.monotonic() + 240
    # MLflow, which begins last, has some steps, and W&B has them on disk.
    while num_in_mlflow(folder / "mlflow.db") < 120:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.1)
    time.sleep(2)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    made = read_json_lines(job.metrics_jsonl)[-1]["step"]
    process = launch(made + 4)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    read = subprocess.run(
        [sys.executable, "-m", "tests.support.read_trackers", str(job.path), uri],
        capture_output=True,
        text=True,
    )
    assert read.returncode == 0, read.stderr
    return job, json.loads(read.stdout), made + 4, out


def num_in_mlflow(database):
    """Returns how many numbers a database of MLflow has."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as opened:
            return opened.execute("select count(*) from metrics").fetchone()[0]
    except sqlite3.OperationalError:  # There is no file, or no table yet.
        return 0


def check_points(job, library, last):
    """Checks that no step is there twice, and that all are but the last ones before the kill."""
    points = library["points"]["loss"]
    steps = [step for step, _ in points]
    assert len(steps) == len(set(steps))
    lacking = sorted(set(range(1, last + 1)) - set(steps))
    assert lacking == [] or lacking == list(range(max(5, lacking[0]), last - 3)), lacking
    losses = {line["step"]: line["loss"] for line in read_json_lines(job.metrics_jsonl)}
    assert all(losses[step] == pytest.approx(loss, rel=1e-6) for step, loss in points)
    evaluated = [step for step, _ in library["points"]["heldout/loss"]]
    assert evaluated[-1] == last and len(evaluated) == len(set(evaluated))


@pytest.mark.parametrize("library", ["tensorboard", "mlflow", "wandb"])
def test_each_step_and_each_evaluation_is_there_once(tracked, library):
    job, read, last, _ = tracked
    check_points(job, read[library], last)


def test_histograms_are_there_or_their_statistics(tracked):
    _, read, _, _ = tracked
    points, statistics = read["wandb"]["points"], read["mlflow"]["points"]
    kinds = {name: x[0] for name, x in points.items() if name.endswith("/_type")}
    name = next(name for name in kinds if name.startswith("weights/")).removesuffix("/_type")
    assert kinds[f"{name}/_type"] == [5, "histogram"]
    counts, edges = (points[f"{name}/{part}"][0][1] for part in ("values", "bins"))
    assert len(counts) == 64 and len(edges) == 65 and sum(counts) == int(sum(counts)) > 0
    (std,) = [value for step, value in statistics[f"{name}/std"] if step == 5]
    (least,) = [value for step, value in statistics[f"{name}/min"] if step == 5]
    assert least == pytest.approx(edges[0], rel=1e-5) and std > 0


def test_wandb_has_one_run_of_two_launches_with_the_config_and_the_picture(tracked):
    job, read, last, out = tracked
    wandb = read["wandb"]
    assert wandb["launches"] == 2
    assert wandb["ids"] == [run_id(job.trackers)]
    assert wandb["config"]["task.model.num_heads"] == 3
    assert wandb["config"]["facts.mesh"] == "replica 1, data 4, mdl 2"
    assert any(name.startswith("loss_curve") for name in wandb["pictures"])


def test_mlflow_has_the_config_the_changed_setting_and_the_picture(tracked):
    job, read, last, out = tracked
    mlflow = read["mlflow"]
    assert mlflow["params"]["task.model.num_heads"] == "3"
    assert mlflow["params"]["run.num_train_steps"] == "5000"
    assert mlflow["tags"]["changed.run.num_train_steps"] == str(last)
    assert mlflow["tags"]["praxis_lite.run_id"] == run_id(job.trackers)
    assert mlflow["status"] == "FINISHED"
    assert mlflow["pictures"] == [f"loss_curve/{last}.png"]
    # They are beside the database, and not in the current directory.
    there = {path.name for path in job.path.parent.iterdir()}
    assert "mlartifacts" in there and "mlruns" not in there
    assert read["tensorboard"]["pictures"] == [last]
    assert "note:" not in out.replace("note: mdl_vars", ""), out


@pytest.fixture(scope="module")
def twice_in_mlflow(tracked):
    """Two launches of a run by hand: the notes, and what MLflow has of it.

    They are in the database of the job, for to make another takes MLflow many seconds.
    """
    folder = tracked[0].path.parent
    code = f"""
import dataclasses, json, pathlib
from mlflow import MlflowClient
from praxis_lite import MLflow
from tests.support.tracked_runs import run_in
notes, uri = [], "sqlite:///{folder}/mlflow.db"
config = {{"task['a/b']": "x" * 7000, "run.seed": 7}}
for first_step in (0, 3):
    tracker = MLflow(uri)
    run = run_in(pathlib.Path({str(folder)!r}), config=config, note=notes.append)
    tracker.start(run)
    tracker.scalars(first_step + 6, {{"heldout/loss": first_step + 0.25}})
    tracker.text(3, "decode/prompts", "words")
    tracker.end("failed")
    config["run.seed"] = 8
client = MlflowClient(uri)
(item,) = client.search_runs([client.get_experiment_by_name("zoo.Tiny").experiment_id])
history = client.get_metric_history(item.info.run_id, "heldout/loss")
points = [(point.step, point.value) for point in history]
print(json.dumps([notes, item.data.params, item.data.tags, item.info.status, points]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_two_launches_are_one_run_of_mlflow_and_a_long_param_is_cut(twice_in_mlflow):
    notes, params, tags, status, points = twice_in_mlflow
    assert params == {"task__a/b__": "x" * 6000, "run.seed": "7"}
    assert tags["changed.run.seed"] == "8" and "changed.task__a/b__" not in tags
    assert notes == [] and status == "FAILED"
    assert sorted(points) == [[6, 0.25], [9, 3.25]]
