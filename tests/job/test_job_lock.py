"""One training at a time in a directory, and whose it is."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from praxis_lite import ConfigError
from praxis_lite.job.job_lock import JobLock
from tests.support.job_runs import CHECKOUT, home, launch

HOLD = """
import os, sys, time
from pathlib import Path
from praxis_lite.job.job_lock import JobLock

with JobLock(Path(sys.argv[1]), print):
    # The worker speaks itself: it has let go by then.
    if sys.argv[2] == "holds" or os.fork() == 0:
        print(os.getpid(), flush=True)
    time.sleep(100)
"""


def holder(folder, what="holds"):
    """Returns a process that holds the directory, and what it said."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), what],
        cwd=CHECKOUT,
        text=True,
        stdout=subprocess.PIPE,
    )
    return process, int(process.stdout.readline())


def forbidden(_):
    raise AssertionError


def test_a_second_training_is_refused_and_told_of_the_first_until_that_dies(tmp_path):
    process, _ = holder(tmp_path)
    with pytest.raises(ConfigError) as refused, JobLock(tmp_path, forbidden):
        pass
    assert f"process {process.pid} on {socket.gethostname()}." in str(refused.value)
    assert str(tmp_path) in str(refused.value)
    process.kill()
    process.communicate()
    with JobLock(tmp_path, forbidden):
        assert Path(tmp_path, ".training").read_text().startswith(f"process {os.getpid()} on ")
    with JobLock(tmp_path, forbidden):
        pass


def test_a_worker_that_outlives_the_training_holds_nothing(tmp_path):
    process, worker = holder(tmp_path, "forks")
    process.kill()
    process.wait()
    try:
        with JobLock(tmp_path, forbidden):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
        process.stdout.close()


def test_a_file_system_without_locks_is_noted(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    notes = []
    with JobLock(tmp_path, notes.append):
        pass
    (note,) = notes
    assert note.startswith(f"note: {tmp_path} could not be locked (No locks available)")


def test_a_full_disk_leaves_the_lock_without_a_name(tmp_path, monkeypatch):
    def pwrite(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", pwrite)
    with (
        JobLock(tmp_path, forbidden),
        pytest.raises(ConfigError, match="job_log_dir=.*PID"),
        JobLock(tmp_path, forbidden),
    ):
        pass


@pytest.mark.slow
def test_main_refuses_a_directory_that_another_process_trains_in(tmp_path):
    home()
    process, _ = holder(tmp_path)
    done = launch("--exp=jobzoo.experiments.Tiny", f"--job_log_dir={tmp_path}")
    process.kill()
    process.communicate()
    assert done.code == 2
    assert f"process {process.pid} on {socket.gethostname()}." in " ".join(done.err.split())
    assert os.listdir(tmp_path) == [".training"]
