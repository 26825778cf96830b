"""The supervisor's handle for a worker process: assigns work and reads reports."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from praxis_lite.job.processes import signals
from praxis_lite.job.processes.signals import STOPS_WORKER
from praxis_tools.elastic.members import (
    DIED,
    FAILED,
    LOST_PEER,
    REFUSED,
    STOPPED,
    TRAINED,
    WorkerEnd,
)
from praxis_tools.elastic.worker_assignment import LOST_PEER_STATUS, WORKER, Assignment
from praxis_tools.stuck.on_host import progress_of_pid
from praxis_tools.stuck.progress import Progress

_MAX_REPORT_BYTES = 2**20
# Exit statuses of a worker that was asked to stop before it was able to handle the signal.
_STOPPED_STATUSES = (128 + signals.STOPS_WORKER, -signals.STOPS_WORKER)
_FOLDERS = "praxis_lite_worker_of_"  # Followed by the supervisor's PID.


def remove_old_folders() -> None:
    """Removes the temporary folders of workers whose supervisors were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*_*"):
        pid = folder.name.removeprefix(_FOLDERS).partition("_")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


class WorkerProcess:
    """A worker process, which imports the modules for training and waits for its assignment.

    The process has a separate folder for temporary files, which is removed when the process exits.
    It runs in a separate session, so that it does not receive signals sent to the supervisor's
    process group.

    All times are in seconds of time.monotonic, which is the same in all processes on a host.

    Args:
      argv: Command line of the worker.

    Attributes:
      reports: Latest reported values, keyed by name.
      phases: The phases up to the first step, as (name, time at which it began) pairs.
      first_step_time: Time at which the first step was reported, or None before it.
      progress_time: Time of the last progress report, or of the assignment.
    """

    def __init__(self, argv: Sequence[str]):
        self.reports: dict[str, Any] = {}
        self.phases: list[tuple[str, float]] = []
        self.first_step_time: float | None = None
        self.progress_time = time.monotonic()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDERS}{os.getpid()}_"))
        self._pipe, child = os.pipe()
        os.set_blocking(self._pipe, False)
        self._bytes = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "praxis_lite", *argv],
            stdin=subprocess.PIPE,
            pass_fds=(child,),
            start_new_session=True,
            env={**os.environ, WORKER: f"{child}:{os.getpid()}", "TMPDIR": str(self._folder)},
        )
        os.close(child)
        assert self._process.stdin is not None
        self._stdin = self._process.stdin

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def assign(self, assignment: Assignment) -> None:
        """Sends the worker its assignment, so that the worker starts training."""
        self.phases.append(("start", time.monotonic()))
        self.progress_time = time.monotonic()
        with contextlib.suppress(OSError):  # The process has exited; `status` detects this.
            self._stdin.write(assignment.line().encode())
            self._stdin.flush()

    def read_reports(self) -> None:
        """Reads the reports that have arrived, without blocking."""
        with contextlib.suppress(OSError):
            while data := os.read(self._pipe, 2**16):
                self._bytes += data
        *lines, self._bytes = self._bytes.split(b"\n")
        self._bytes = self._bytes[-_MAX_REPORT_BYTES:]
        for line in lines:
            with contextlib.suppress(ValueError, AttributeError):
                fields = json.loads(line)
                phase, at = fields.pop("phase", None), fields.pop("at", time.monotonic())
                if phase is not None and self.first_step_time is None:
                    self.phases.append((phase, at))
                self.reports.update(fields)
                if "progress" in fields:
                    self.progress_time = time.monotonic()
                if "made" in fields and self.first_step_time is None:
                    self.first_step_time = time.monotonic()

    def progress(self, index: int) -> Progress:
        """Returns the progress of the worker, given its process index in the generation."""
        reported = self.reports.get("progress", {})
        return progress_of_pid(self.pid, reported, index, time.monotonic() - self.progress_time)

    def status(self) -> int | None:
        """Returns the exit status, negative for a signal, or None while the process is running."""
        status = self._process.poll()
        if status is not None:
            self.read_reports()
            shutil.rmtree(self._folder, ignore_errors=True)
        return status

    def ask_to_stop(self) -> None:
        """Asks the worker to save and stop after the current step."""
        if self._process.poll() is None:
            self._process.send_signal(STOPS_WORKER)

    def kill(self) -> None:
        """Kills the worker and waits for it to exit."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self.status()
        with contextlib.suppress(OSError):
            os.close(self._pipe)
            self._pipe = -1
            self._stdin.close()


def classify_end(status: int, reports: Mapping[str, Any], *, was_asked: bool) -> WorkerEnd:
    """Classifies how a worker exited.

    Args:
      status: Exit status of the process, negative for a signal.
      reports: Values that the worker reported.
      was_asked: Whether the worker was asked to stop.
    """
    kind, why, now = FAILED, str(reports.get("why", "")), time.monotonic()
    if "ended" in reports and status in (0, LOST_PEER_STATUS, -signal.SIGABRT):
        # The worker had finished and saved its state before another process was lost.
        kind, status = reports["ended"], 0
    elif status == 3:
        kind = TRAINED
    elif status == 0 or (was_asked and status in _STOPPED_STATUSES):
        kind, why = STOPPED, "stopped"
    elif status in (LOST_PEER_STATUS, -signal.SIGABRT):
        kind, why = LOST_PEER, why or "has lost another process"
    elif status < 0:
        kind, why = DIED, f"was killed by {signals.name(-status)}"
    elif status == 2:
        kind, why = REFUSED, why or "ended with status 2"
    return WorkerEnd(kind=kind, status=status, why=why or f"ended with status {status}", time=now)
