"""TensorBoard files, read back record by record, and by TensorBoard itself."""

import struct
import subprocess
import sys

import numpy as np
from tensorboardX.proto import event_pb2

from praxis_lite.run.trainer.metrics.tensorboard import TensorBoardWriter


def events_in(log_dir):
    """Returns the events of all files: a record is its length, a checksum, the bytes, another."""
    events = []
    for path in sorted(log_dir.iterdir()):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack_from("<Q", data)
            events.append(event_pb2.Event.FromString(data[12:12 + size]))
            data = data[16 + size:]
    return events


def scalars_in(log_dir):
    return [(event.step, value.tag, value.simple_value)
            for event in events_in(log_dir) for value in event.summary.value]


def test_scalars_come_back_at_their_steps_before_the_file_is_closed(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.scalars(7, {"train/loss": np.float32(2.5), "train/grad_norm": 0.1})
    writer.scalars(13, {"train/loss": 1.25})
    assert scalars_in(tmp_path) == [(7, "train/loss", 2.5), (7, "train/grad_norm", np.float32(0.1)),
                                    (13, "train/loss", 1.25)]
    writer.close()
    writer.close()


def test_a_run_that_resumes_at_once_overwrites_nothing(tmp_path):
    for resume_step, loss in ((None, 2.0), (7, 3.0)):
        with TensorBoardWriter(tmp_path, resume_step) as writer:
            writer.scalars(8, {"loss": loss})
    assert scalars_in(tmp_path) == [(8, "loss", 2.0), (8, "loss", 3.0)]


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
    with TensorBoardWriter(tmp_path) as writer:
        for step in range(1, 14):
            writer.scalars(step, {"loss": 100.0 + step})
    with TensorBoardWriter(tmp_path, resume_step=7) as writer:
        for step in range(8, 18):
            writer.scalars(step, {"loss": float(step)})
    # TensorBoard prefers tensorflow where it is installed; the test need not wait for that.
    code = f"""
import sys; sys.modules["tensorflow"] = None
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator({str(tmp_path)!r}).Reload()
print([(point.step, point.value) for point in events.Scalars("loss")])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    want = [(step, 100.0 + step) for step in range(1, 8)] + [(s, float(s)) for s in range(8, 18)]
    assert result.stdout.strip() == str(want)


def test_metrics_load_neither_jax_nor_tensorflow(tmp_path):
    code = f"""
import sys
from praxis_lite.run.trainer.metrics import json_lines, loss_curve, progress, tensorboard
heavy = ("jax", "flax", "tensorflow", "matplotlib", "tensorboardX")
assert not [name for name in heavy if name in sys.modules], "at import"
with tensorboard.TensorBoardWriter({str(tmp_path)!r}) as writer:
    writer.scalars(1, {{"loss": 1.0}})
assert not [name for name in heavy[:3] if name in sys.modules], "at use"
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
