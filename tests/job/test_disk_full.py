"""A disk that is full while something else than a checkpoint is written."""

import contextlib
import errno
import os
import resource
import textwrap
import time
from unittest import mock

import pytest

from praxis_lite import ConfigError
from praxis_lite.experiment import registry
from praxis_lite.host.file_reading import descriptor
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trackers.tensorboard import TensorBoard
from praxis_lite.trackers.tracker_thread import TrackerThread
from praxis_lite.trainer.metrics import retrying_line_writer
from praxis_lite.trainer.metrics.json_lines import JsonLinesWriter, read_json_lines
from praxis_lite.trainer.metrics.loss_curve import plot_loss_curve
from tests.support.job_runs import launch, lines_of, succeed
from tests.support.line_jobs import LINE
from tests.support.marks import slow_but
from tests.support.tracked_runs import run_in
from tests.support.written_jobs import written_job


@contextlib.contextmanager
def files_of_at_most(size):
    """Lets no file grow beyond `size` bytes: what is written is cut there, then an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def steps_in(path):
    return [line["step"] for line in read_json_lines(path)]


@pytest.fixture
def at_once(monkeypatch):
    """Lets each line try again to write those that are kept."""
    monkeypatch.setattr(retrying_line_writer, "_RETRY_SECONDS", 0.0)


def test_lines_that_do_not_fit_are_kept_and_written_once_there_is_room(tmp_path, at_once, caplog):
    path = tmp_path / "metrics.jsonl"
    with JsonLinesWriter(path, -1) as writer:
        writer.write({"step": 1, "loss": 2.5})
        before = path.read_bytes()
        with files_of_at_most(len(before) + 7):
            for step in (2, 3, 4):
                writer.write({"step": step, "loss": 1.5})
                assert path.read_bytes() == before  # No part of a line either.
        (said,) = caplog.messages
        assert str(path) in said and "File too large" in said
        writer.write({"step": 5, "loss": 1.5})
        assert steps_in(path) == [1, 2, 3, 4, 5]
        writer.write({"step": 6, "loss": 1.5})
    assert caplog.messages[1:] == [f"{path} can be written again; wrote 4 lines for steps 2 to 5"]
    assert steps_in(path) == [1, 2, 3, 4, 5, 6]


def test_lines_lost_at_the_end_are_an_error_or_a_note_beside_another(tmp_path, at_once, caplog):
    path = tmp_path / "metrics.jsonl"
    for raises in (ConfigError, KeyError):
        with (
            files_of_at_most(0),
            pytest.raises(raises) as error,
            JsonLinesWriter(path, 1) as writer,
        ):
            writer.write({"step": 2, "loss": 1.5})
            writer.write({"step": 3, "loss": 1.5})
            if raises is KeyError:
                raise KeyError
    words = str(error.value) if raises is ConfigError else caplog.messages[-1]
    assert str(path) in words and "2 lines for steps 2 to 3 are lost" in words
    assert "File too large" in words and len(caplog.messages) == 3


def test_a_disk_that_stays_full_is_tried_once_a_second(tmp_path, monkeypatch):
    path, now = tmp_path / "metrics.jsonl", [100.0]
    monkeypatch.setattr(retrying_line_writer.time, "monotonic", lambda: now[0])
    opens = mock.Mock(side_effect=descriptor)
    with JsonLinesWriter(path, -1) as writer:
        monkeypatch.setattr(retrying_line_writer, "descriptor", opens)
        with files_of_at_most(0):
            for step in range(1, 101):
                writer.write({"step": step})
                now[0] += 0.1
        assert opens.call_count == 9  # The first try had the file open.
    assert steps_in(path) == list(range(1, 101))


@contextlib.contextmanager
def failing(job, fails, number):
    """Lets the files of lines of a job fail at some steps, by an error of that number."""
    fstat_of, add = os.fstat, retrying_line_writer.RetryingLineWriter.add

    def fstat(file):
        name = os.readlink(f"/proc/self/fd/{file}")
        if fstat.step in fails and name.startswith(str(job.path)) and name.endswith(".jsonl"):
            raise OSError(number, os.strerror(number))
        return fstat_of(file)

    def noting(self, step, text):
        fstat.step = step
        add(self, step, text)

    fstat.step = 0
    with (
        mock.patch.object(os, "fstat", fstat),
        mock.patch.object(retrying_line_writer.RetryingLineWriter, "add", noting),
        mock.patch.object(retrying_line_writer, "_RETRY_SECONDS", 0.0),
    ):
        yield


@pytest.mark.slow
def test_a_job_whose_disk_fails_for_some_steps_goes_on_and_misses_no_line(tmp_path):
    whole, job = JobDir(tmp_path / "whole"), JobDir(tmp_path / "job")
    argv = (LINE, "--set", "run.num_train_steps=14")
    succeed(*argv, f"--job_log_dir={whole.path}")
    with failing(job, range(3, 9), errno.EIO):
        done = succeed(*argv, f"--job_log_dir={job.path}")
    assert lines_of(job.metrics_jsonl) == lines_of(whole.metrics_jsonl)
    assert done.out.count("metrics.jsonl cannot be written: Input/output error") == 1
    assert done.out.count("metrics.jsonl can be written again; wrote 7 lines for steps 3 to 9") == 1


@pytest.mark.slow
def test_a_job_whose_lines_are_lost_says_so_and_ends_with_status_2_all_else_saved(tmp_path):
    job = JobDir(tmp_path)
    with failing(job, range(1, 8), errno.ENOSPC):
        done = launch(LINE, f"--job_log_dir={job.path}", "--set", "run.num_train_steps=7")
    message = " ".join(done.err.split())
    assert done.code == 2 and "7 lines for steps 1 to 7 are lost" in message
    assert f"{job.metrics_jsonl} could not be written: No space left on device" in message
    assert (job.checkpoints / "7" / "commit.json").exists()
    assert job.timeline_jsonl.exists()


def test_lines_that_cannot_be_moved_stay(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonLinesWriter(path, -1) as writer:
        for step in range(1, 5):
            writer.write({"step": step})
    before = path.read_bytes()
    with files_of_at_most(10), pytest.raises(ConfigError, match=r"\.lost\.jsonl.*too large"):
        JsonLinesWriter(path, 2)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["metrics.jsonl"]


def test_tensorboard_says_so_once_and_training_goes_on(tmp_path):
    thread = TrackerThread("tensorboard", TensorBoard(), run_in(tmp_path), lambda step: True)
    with files_of_at_most(1500):
        thread.resume_from(0, 0, 0)
        thread.start()
        for step in range(1, 50):
            thread.log_step(step, {"loss": 2.5})
        while not thread.notes:
            time.sleep(0.01)
    thread.end("finished")
    thread.join(10)
    assert not thread.is_alive()
    (note,) = thread.notes
    assert note.startswith("note: the tracker tensorboard failed: OSError: ")
    assert "File too large" in note


def test_a_picture_that_cannot_be_drawn_leaves_the_old_one(tmp_path):
    job = JobDir(tmp_path)
    with JsonLinesWriter(job.metrics_jsonl, -1) as writer:
        writer.write({"step": 1, "loss": 2.5})
        writer.write({"step": 2, "loss": 1.5})
    plot_loss_curve(job, "")
    before = job.loss_curve_png.read_bytes()
    with files_of_at_most(1000), pytest.raises(ConfigError, match=r"loss_curve\.png"):
        plot_loss_curve(job, "")
    assert job.loss_curve_png.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["loss_curve.png", "metrics.jsonl"]


def test_a_config_that_cannot_be_written_leaves_the_old_one(tmp_path):
    job = JobDir(tmp_path)
    job.write_config("{}", ["a=1"])
    with files_of_at_most(10), pytest.raises(ConfigError, match=r"config\.json"):
        job.write_config("{" + " " * 100 + "}", ["a=1"])
    assert job.config_json.read_text() == "{}"
    assert sorted(os.listdir(tmp_path)) == ["config.json", "config.txt"]


@pytest.mark.parametrize(
    "name", slow_but({"config.json"}, ["config.json", "layout.json", "run_id.json"])
)
def test_a_first_start_on_a_full_disk_leaves_what_the_same_command_takes(tmp_path, name):
    replace = os.replace

    def full(source, target):
        if os.path.basename(target) == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        replace(source, target)

    argv = (LINE, f"--job_log_dir={tmp_path}", "--set", "run.num_train_steps=3")
    with mock.patch.object(os, "replace", full):
        done = launch(*argv)
    message = " ".join((done.out + done.err).split())
    assert name in message and "No space left on device" in message
    succeed(*argv)
    assert (JobDir(tmp_path).checkpoints / "3" / "commit.json").exists()


def test_a_report_that_cannot_be_written_leaves_no_file(tmp_path):
    job = written_job(tmp_path / "job", [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 1.5}])
    with files_of_at_most(1000):
        done = launch("--mode=report", str(job.path), f"--html={tmp_path}/report.html")
    assert done.code == 2 and "report.html could not be written: File too large" in " ".join(
        done.err.split()
    )
    assert sorted(os.listdir(tmp_path)) == ["job"]


def test_any_other_file_is_one_paragraph_and_errors_of_ours_keep_their_traceback():
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/layout.txt")
    with mock.patch.object(registry, "get_experiment", side_effect=full):
        done = launch("--exp=lm.PyDocs")
    assert done.code == 2
    assert (
        done.err
        == "\n".join(
            textwrap.wrap(
                "error: /data/layout.txt could not be written: No space left on device. Free disk "
                "space or fix the file system, and run the same command again.",
                100,
            )
        )
        + "\n"
    )
    gone = FileNotFoundError(2, "gone", "/x")
    with mock.patch.object(registry, "get_experiment", side_effect=gone):
        done = launch("--exp=lm.PyDocs")
    assert done.code == 2 and done.err.startswith("error: /x: gone. The full traceback is in ")
    with (
        mock.patch.object(registry, "get_experiment", side_effect=KeyError("a defect of ours")),
        pytest.raises(KeyError),
    ):
        launch("--exp=lm.PyDocs")
