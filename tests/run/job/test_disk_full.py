"""A disk that is full while something else than a checkpoint is written."""

import contextlib
import errno
import os
import resource
import textwrap
from unittest import mock

import pytest

from praxis_lite import ConfigError
from praxis_lite.run.experiment import registry
from praxis_lite.run.job.job_dir import JobDir
from praxis_lite.run.trainer.metrics.json_lines import JsonLinesWriter, read_json_lines
from praxis_lite.run.trainer.metrics.loss_curve import plot_loss_curve
from praxis_lite.run.trainer.metrics.tensorboard import TensorBoardWriter
from tests.support.job_runs import launch


@contextlib.contextmanager
def files_of_at_most(size):
    """Lets no file grow beyond `size` bytes: what is written is cut there, then an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_that_does_not_fit_leaves_the_lines_before_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonLinesWriter(path, None) as writer:
        writer.write({"step": 1, "loss": 2.5})
        before = path.read_bytes()
        with files_of_at_most(len(before) + 7), pytest.raises(ConfigError) as full:
            writer.write({"step": 2, "loss": 1.5})
        assert path.read_bytes() == before
    assert str(path) in str(full.value) and "File too large" in str(full.value)
    with JsonLinesWriter(path, 1) as writer:
        writer.write({"step": 2, "loss": 1.5})
    assert [line["step"] for line in read_json_lines(path)] == [1, 2]


def test_lines_that_cannot_be_mended_stay(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonLinesWriter(path, None) as writer:
        for step in range(1, 5):
            writer.write({"step": step})
    before = path.read_bytes()
    with files_of_at_most(10), pytest.raises(ConfigError, match=r"\.lost\.jsonl.*too large"):
        JsonLinesWriter(path, 2)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["metrics.jsonl"]


def test_tensorboard_says_so_once_and_training_goes_on(tmp_path):
    notes = []
    writer = TensorBoardWriter(tmp_path, note=notes.append)
    writer.scalars(1, {"loss": 2.5})
    with files_of_at_most(100):
        for step in range(2, 5):
            writer.scalars(step, {"loss": 2.5})
        writer.close()
    (note,) = notes
    assert note == f"note: no more is written for TensorBoard: {tmp_path}: File too large"
    (tmp_path / "file").touch()
    TensorBoardWriter(tmp_path / "file", note=notes.append).scalars(1, {"loss": 2.5})
    assert len(notes) == 2 and notes[1].endswith("File exists")


def test_a_picture_that_cannot_be_drawn_leaves_the_old_one(tmp_path):
    lines, picture = tmp_path / "m.jsonl", tmp_path / "loss.png"
    with JsonLinesWriter(lines, None) as writer:
        writer.write({"step": 1, "loss": 2.5})
        writer.write({"step": 2, "loss": 1.5})
    plot_loss_curve(lines, picture)
    before = picture.read_bytes()
    with files_of_at_most(1000), pytest.raises(ConfigError, match=r"loss\.png"):
        plot_loss_curve(lines, picture)
    assert picture.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["loss.png", "m.jsonl"]


def test_a_config_that_cannot_be_written_leaves_the_old_one(tmp_path):
    job = JobDir(tmp_path)
    job.write_config("{}", ["a=1"])
    with files_of_at_most(10), pytest.raises(ConfigError, match=r"config\.json"):
        job.write_config("{" + " " * 100 + "}", ["a=1"])
    assert job.config_json.read_text() == "{}"
    assert sorted(os.listdir(tmp_path)) == ["config.json", "config.txt"]


def test_any_other_file_is_one_paragraph_and_errors_of_ours_keep_their_traceback():
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/layout.txt")
    with mock.patch.object(registry, "get_experiment", side_effect=full):
        done = launch("--exp=lm.PyDocs")
    assert done.code == 2
    assert done.err == "\n".join(textwrap.wrap(
        "error: /data/layout.txt could not be written: No space left on device. Make room, or "
        "mend the file system, and launch the same command again: training goes on from its "
        "newest checkpoint.", 100
    )) + "\n"
    gone = FileNotFoundError(2, "gone", "/x")
    with mock.patch.object(registry, "get_experiment", side_effect=gone):
        done = launch("--exp=lm.PyDocs")
    assert done.code == 2 and done.err.startswith("error: /x: gone. The whole traceback is in ")
    with (
        mock.patch.object(registry, "get_experiment", side_effect=KeyError("a defect of ours")),
        pytest.raises(KeyError),
    ):
        launch("--exp=lm.PyDocs")
