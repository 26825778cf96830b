"""Every block of docs/trackers.md runs, and so do its settings and the recipe of how_to_add.md."""

import http.server
import json
import threading

import fiddle as fdl
import pytest

from praxis_lite import ConfigError, RunConfig, SampleSettings, TensorBoard, WeightsAndBiases
from praxis_lite.config.overrides import apply_overrides
from praxis_lite.trackers.tracker_thread import TrackerThread
from tests.support.doc_pages import page
from tests.support.tracked_runs import run_in

BLOCKS = page("trackers").blocks()
RECIPE = page("how_to_add").files()["your_package/trackers.py"]


def classes(block):
    return block.run(
        {
            "fdl": fdl,
            "RunConfig": RunConfig,
            "TensorBoard": TensorBoard,
            "WeightsAndBiases": WeightsAndBiases,
        }
    )


def record(tracker, folder):
    """Gives a tracker three steps of a run, as a launch does; returns its notes."""
    tracker.check()
    thread = TrackerThread("own", tracker, run_in(folder), lambda step: step % 2 == 1)
    thread.resume_from(0, 0, 0)
    thread.start()
    for step in (1, 2, 3):
        thread.log_step(step, {"loss": 1 / step})
    thread.end("finished")
    thread.join(30)
    assert not thread.is_alive()
    return list(thread.notes)


def test_the_experiments_run_has_both_trackers():
    built = fdl.build(classes(BLOCKS[0])["run"](None))
    assert built.trackers == {
        "tensorboard": TensorBoard(),
        "wandb": WeightsAndBiases(project="small-models", tags=("baseline",)),
    }


def test_the_settings_of_the_command_line_are_taken():
    words, sampled = page("trackers").commands("praxis train")
    settings = [word for word in words if word.startswith("run.trackers.")]
    config = fdl.Config(RunConfig, num_train_steps=7)
    apply_overrides(fdl.Config(dict, run=config), settings)
    trackers = fdl.build(config).trackers
    assert trackers["tensorboard"] is None and trackers["wandb"].project == "small-models"
    assert trackers["mlflow"].tracking_uri == "sqlite:////tmp/mlflow.db"
    apply_overrides(fdl.Config(dict, run=config), [word for word in sampled if "samples." in word])
    expected = SampleSettings(every_steps=200, prompts=("The import statement", "A class"))
    assert fdl.build(config).samples == expected


def test_a_tracker_in_ten_lines_logs_each_step(tmp_path):
    log = classes(BLOCKS[1])["JsonLog"](str(tmp_path / "all.jsonl"))
    body = BLOCKS[1].text.partition("def __init__")[2].splitlines()
    assert len([line for line in body if line.strip()]) <= 10
    assert record(log, tmp_path) == []
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    run = run_in(tmp_path).id
    assert lines == [{"run": run, "step": 1, "loss": 1.0}, {"run": run, "step": 3, "loss": 1 / 3}]


def test_the_recipes_tracker_posts_to_a_service(tmp_path):
    posted = []

    class Service(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words):
            pass

    webhook = classes(RECIPE)["Webhook"]
    with pytest.raises(ConfigError, match="Webhook.url is ftp"):
        webhook("ftp://x").check()
    with http.server.HTTPServer(("localhost", 0), Service) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            assert record(webhook(f"http://localhost:{server.server_port}"), tmp_path) == []
        finally:
            server.shutdown()
    run = run_in(tmp_path)
    assert posted[0] == {"run": run.id, "name": "job", "config": dict(run.config)}
    assert [values.get("step") for values in posted[1:-1]] == [1, 3]
    assert posted[-1] == {"run": run.id, "ending": "finished"}
