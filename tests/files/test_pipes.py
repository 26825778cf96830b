"""A pipe in the place of a file that a job writes: nobody waits for its other end."""

import contextlib
import os
import stat
import threading
import time

import pytest

from praxis_lite import ConfigError
from praxis_lite.files.json_text import content_of, opened_to_append
from praxis_lite.files.whole_files import write_whole
from praxis_lite.host.user_errors import explained
from praxis_lite.run.job.job_dir import JobDir
from praxis_lite.run.job.processes.watchdog import Watchdog
from praxis_lite.tools.foreign_checkpoints.begin_job import beginning
from tests.support.job_runs import succeed
from tests.support.line_jobs import LINE


@contextlib.contextmanager
def within_seconds(path, seconds=60):
    """Fails if the other end of the pipe at `path` has to be opened for the body to go on."""
    ends = []
    timer = threading.Timer(
        seconds, lambda: ends.append(os.open(path, os.O_RDWR | os.O_NONBLOCK))
    )
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        for end in ends:
            os.close(end)
    assert not ends


@pytest.mark.parametrize("is_read", [False, True])
def test_only_a_plain_file_is_added_to(tmp_path, is_read):
    path = tmp_path / "log"
    for word in ("one ", "two"):
        with opened_to_append(path) as file:
            file.write(word)
    assert content_of(path) == b"one two"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK) if is_read else None
    with within_seconds(tmp_path / "pipe", 5), pytest.raises(OSError):
        opened_to_append(tmp_path / "pipe")
    if reader is not None:
        os.close(reader)


def test_a_whole_file_goes_into_no_pipe_and_through_no_link(tmp_path):
    (tmp_path / "secret").write_text("mine")
    for name in ("pipe", "link"):
        path, beside = tmp_path / name, tmp_path / f".{name}.new"
        if name == "pipe":
            os.mkfifo(path)
            os.mkfifo(beside)
        else:
            beside.symlink_to(tmp_path / "secret")
        with within_seconds(beside, 5):
            write_whole(path, b"whole")
        assert stat.S_ISREG(path.lstat().st_mode) and path.read_bytes() == b"whole"
    assert (tmp_path / "secret").read_text() == "mine"


def test_a_traceback_takes_the_place_of_a_pipe(tmp_path):
    path = tmp_path / "traceback.txt"
    os.mkfifo(path)
    with within_seconds(path, 5):
        answer = explained(OSError(5, "Input/output error", "weights.bin"), path)
    assert str(path) in answer.words and "Input/output error" in path.read_text()


def test_a_job_is_not_begun_over_a_pipe(tmp_path):
    pipe = JobDir(tmp_path / "job").beginning
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    begins = beginning(pipe.parent, LINE.removeprefix("--exp="), packages=("jobzoo",))
    with within_seconds(pipe, 20), pytest.raises(ConfigError, match=pipe.name), begins:
        pass


def test_the_watchdog_reports_where_stacks_txt_is_a_pipe(tmp_path):
    pipe, reports = tmp_path / "stacks.txt", []
    os.mkfifo(pipe)
    dog = Watchdog(0.05, exits=False, stacks_txt=pipe, write=reports.append)
    with within_seconds(pipe, 20), dog:
        while len(reports) < 2 and threading.active_count() > 1:
            time.sleep(0.01)
    assert len(reports) >= 2


@pytest.mark.slow
def test_a_job_trains_where_its_files_are_pipes(tmp_path):
    job, argv = JobDir(tmp_path), (LINE, f"--job_log_dir={tmp_path}", "--set")
    succeed(*argv, "run.num_train_steps=1")
    job.layout_txt.unlink()
    for path in (job.layout_txt, job.non_finite_txt):
        os.mkfifo(path)
    settings = (
        "run.num_train_steps=3", "datasets.train.nan_at=1,", "run.debug_nans=true",
        "run.loss_spikes.action=report",
    )
    with within_seconds(job.layout_txt), within_seconds(job.non_finite_txt):
        done = succeed(*argv, *settings)
    assert f"(not written to {job.non_finite_txt}: " in done.out
    assert stat.S_ISREG(job.layout_txt.stat().st_mode)
