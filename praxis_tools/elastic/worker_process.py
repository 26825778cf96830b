"""A worker as its supervisor sees it: started ahead of time, given an order, heard, ended."""

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
from praxis_tools.elastic.worker_order import LOST_PEER_STATUS, WORKER, Order
from praxis_tools.stuck import Progress
from praxis_tools.stuck.on_host import seen_by_host

_MOST_BYTES = 2**20  # Of a report.
# Of a worker that was asked to stop before it could hear that, or had anything to save.
_STOPPED_STATUSES = (128 + signals.STOPS_WORKER, -signals.STOPS_WORKER)
_FOLDERS = "praxis_lite_worker_of_"  # Followed by the supervisor's PID.


def remove_old_folders() -> None:
    """Removes the folders of workers whose supervisors were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*_*"):
        pid = folder.name.removeprefix(_FOLDERS).partition("_")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


class WorkerProcess:
    """A process that imports what training needs, and waits for an order.

    It has a separate folder for temporary files, which is removed after any end of the process, and
    a separate session, so that a signal to the supervisor's group does not reach it.

    Args:
      argv: of the command line.

    Attributes:
      reports: by name, the newest values that it reported.
      phases: what it did up to its first step, each with the time when it began.
      first_step_time: when it reported its first step, or None.
      told_at: when it last reported its progress, or was given its order. All times are in seconds
        of time.monotonic, which is the same clock in all processes of a host.
    """

    def __init__(self, argv: Sequence[str]):
        self.reports: dict[str, Any] = {}
        self.phases: list[tuple[str, float]] = []
        self.first_step_time: float | None = None
        self.told_at = time.monotonic()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDERS}{os.getpid()}_"))
        self._pipe, child = os.pipe()
        os.set_blocking(self._pipe, False)
        self._bytes = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "praxis_lite.main", *argv], stdin=subprocess.PIPE,
            pass_fds=(child,), start_new_session=True,
            env={**os.environ, WORKER: f"{child}:{os.getpid()}", "TMPDIR": str(self._folder)},
        )
        os.close(child)

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def give(self, order: Order) -> None:
        """Lets the worker begin."""
        self.phases.append(("start", time.monotonic()))
        self.told_at = time.monotonic()
        with contextlib.suppress(OSError):  # It has ended: `status` tells.
            self._process.stdin.write(order.line().encode())
            self._process.stdin.flush()

    def hear(self) -> None:
        """Takes the reports that have come; waits for none."""
        with contextlib.suppress(OSError):
            while data := os.read(self._pipe, 2**16):
                self._bytes += data
        *lines, self._bytes = self._bytes.split(b"\n")
        self._bytes = self._bytes[-_MOST_BYTES:]
        for line in lines:
            with contextlib.suppress(ValueError, AttributeError):
                fields = json.loads(line)
                phase, at = fields.pop("phase", None), fields.pop("at", time.monotonic())
                if phase is not None and self.first_step_time is None:
                    self.phases.append((phase, at))
                self.reports.update(fields)
                if "progress" in fields:
                    self.told_at = time.monotonic()
                if "made" in fields and self.first_step_time is None:
                    self.first_step_time = time.monotonic()

    def progress(self, index: int) -> Progress:
        """Returns the progress of this process, whose index in the generation is given."""
        told = self.reports.get("progress", {})
        return seen_by_host(self.pid, told, index, time.monotonic() - self.told_at)

    def status(self) -> int | None:
        """Returns the exit status, negative for a signal, or None while the process lives."""
        status = self._process.poll()
        if status is not None:
            self.hear()
            shutil.rmtree(self._folder, ignore_errors=True)
        return status

    def ask_to_stop(self) -> None:
        """Lets the worker stop after a step, and save."""
        if self._process.poll() is None:
            self._process.send_signal(STOPS_WORKER)

    def kill(self) -> None:
        """Kills the worker; returns when it has ended."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self.status()
        with contextlib.suppress(OSError):
            os.close(self._pipe)
            self._pipe = -1
            self._process.stdin.close()


def end_of(status: int, reports: Mapping[str, Any], *, was_asked: bool) -> WorkerEnd:
    """Returns how a worker ended, from its status and its reports."""
    kind, why, now = FAILED, str(reports.get("why", "")), time.monotonic()
    if "ended" in reports and status in (0, LOST_PEER_STATUS, -signal.SIGABRT):
        # Its work was done and saved, so a process that was lost after that does not matter.
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
