"""TensorBoard files, read back record by record, and by TensorBoard itself."""

import io
import json
import struct
import subprocess
import sys

import numpy as np
import pytest
from matplotlib import figure
from tensorboardX.proto import event_pb2

from praxis_lite.trackers.tensorboard import TensorBoard
from tests.support.tracked_runs import run_in


def events_in(log_dir):
    """Returns the events of all files: a record is its length, a checksum, the bytes, another."""
    events = []
    for path in sorted(log_dir.iterdir()):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack_from("<Q", data)
            events.append(event_pb2.Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return events


def scalars_in(log_dir):
    return [
        (event.step, value.tag, value.simple_value)
        for event in events_in(log_dir)
        for value in event.summary.value
    ]


def test_scalars_come_back_at_their_steps_before_the_file_is_closed(tmp_path):
    expected = []
    for loss in (2.5, 3.5):  # A launch right after another overwrites nothing.
        tracker = TensorBoard()
        tracker.start(run_in(tmp_path))
        tracker.scalars(7, {"train/loss": loss, "train/grad_norm": 0.1})
        expected += [(7, "train/loss", loss), (7, "train/grad_norm", np.float32(0.1))]
        points = scalars_in(tmp_path / "tensorboard")
        tracker.end("finished")
        assert [point for point in points if point[0]] == expected


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What TensorBoard reads of a run of two launches, of which the second goes on after step 7."""
    folder = tmp_path_factory.mktemp("job")
    picture = io.BytesIO()
    figure.Figure(figsize=(0.7, 0.3), dpi=100).savefig(picture, format="png")
    for first_step, offset in ((0, 100.0), (7, 0.0)):
        tracker = TensorBoard()
        tracker.start(run_in(folder, first_step=first_step))
        tracker.resume_from(first_step)
        for step in range(first_step + 1, first_step + 14):
            tracker.scalars(step, {"loss": offset + step})
        tracker.text(step, "samples", "one\ntwo")
        tracker.image(step, "loss_curve", picture.getvalue())
        tracker.end("finished")
    # TensorBoard prefers tensorflow where it is installed; the test need not wait for that.
    code = f"""
import json, sys; sys.modules["tensorflow"] = None
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
events = EventAccumulator({str(folder / "tensorboard")!r}).Reload()
texts = {{tag: [(item.step, item.tensor_proto.string_val[0].decode())
               for item in events.Tensors(tag)]
         for tag in events.PluginTagToContent("text")}}
(image,) = [item for item in events.Images("loss_curve") if item.step == 20]
hparams = {{tag: plugin_data_pb2.HParamsPluginData.FromString(content)
           for tag, content in events.PluginTagToContent("hparams").items()}}
start = hparams["_hparams_/session_start_info"].session_start_info.hparams
metrics = hparams["_hparams_/experiment"].experiment.metric_infos
print(json.dumps({{
    "loss": [(point.step, point.value) for point in events.Scalars("loss")],
    "texts": texts,
    "image": (image.width, image.height),
    "rate": start["task.rate"].number_value, "on": start["run.on"].bool_value,
    "metrics": [info.name.tag for info in metrics],
}}))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_tensorboard_shows_each_step_once_after_a_resume(shown):
    first = [[step, 100.0 + step] for step in range(1, 8)]
    assert shown["loss"] == first + [[step, float(step)] for step in range(8, 21)]


def test_tensorboard_shows_texts_pictures_and_hyperparameters(shown):
    assert shown["texts"]["samples/text_summary"][-1] == [20, "    one\n    two\n"]
    assert "    task.rate=0.5\n" in shown["texts"]["config/text_summary"][0][1]
    assert shown["image"] == [70, 30]
    assert (shown["rate"], shown["on"]) == (0.5, True)
    assert shown["metrics"] == ["loss", "heldout/loss"]


def test_trackers_load_neither_jax_nor_tensorflow(tmp_path):
    code = f"""
import pathlib, sys
from praxis_lite.trackers import metrics_endpoint, mlflow, prometheus, weights_and_biases
from praxis_lite.trackers.tensorboard import TensorBoard
from tests.support.tracked_runs import run_in
heavy = ("jax", "flax", "tensorflow", "matplotlib", "tensorboardX", "wandb", "mlflow")
assert not [name for name in heavy if name in sys.modules], "at import"
tracker = TensorBoard()
tracker.start(run_in(pathlib.Path({str(tmp_path)!r})))
tracker.scalars(1, {{"loss": 1.0}})
tracker.end("finished")
assert not [name for name in heavy[:3] if name in sys.modules], "at use"
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
