"""Pretend hosts: a supervisor each, with its workers, which are killed, stopped and taken away."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from praxis_lite.trainer.metrics.json_lines import lines_if_any
from tests.support.process_pairs import free_port

CHECKOUT = Path(__file__).parents[2]
EXPERIMENT = "elasticzoo.Mixed"


@dataclasses.dataclass(frozen=True)
class Settings:
    """A job and its hosts.

    Attributes:
      job: its directory.
      num_hosts: one supervisor each.
      num_devices: simulated, of each host.
      cache: the folder of compiled programs and of data.
      least: `--min_processes`.
      settings: of `--set`.
    """

    job: Path
    num_hosts: int
    num_devices: int
    cache: Path
    least: int = 1
    settings: tuple[str, ...] = ()

    def argv(self, *more: str) -> list[str]:
        """Returns the command line of any process of the job, with `more` settings."""
        named = dict(item.split("=", 1) for item in (*self.settings, *more))
        return [
            f"--exp={EXPERIMENT}",
            "--packages=elasticzoo",
            f"--job_log_dir={self.job}",
            "--set",
            *(f"{name}={value}" for name, value in named.items()),
        ]

    def env(self, num_devices: int) -> dict[str, str]:
        """Returns the environment of a process with so many devices."""
        return {
            **os.environ,
            "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'tests/elastic'}",
            "XDG_CACHE_HOME": str(self.cache),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(num_devices),
            # The programs are small, and each is to come from the cache when it is seen again.
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }


class Host:
    """A supervisor in a process group of its own, and all processes below it."""

    def __init__(self, settings: Settings, number: int, port: int, log: Path):
        self.number, self.log = number, log
        self._settings, self._port = settings, port
        self._process: subprocess.Popen | None = None
        self._replaced: subprocess.Popen | None = None

    def start(self, *more: str) -> float:
        """Starts the supervisor, with `more` settings; returns when, in Unix seconds."""
        argv = [
            sys.executable,
            "-m",
            "praxis_lite.main",
            *self._settings.argv(*more),
            "--elastic",
            f"--min_processes={self._settings.least}",
            f"--coordinator=127.0.0.1:{self._port}",
            f"--num_processes={self._settings.num_hosts}",
            f"--process_id={self.number}",
        ]
        now = time.time()
        with self.log.open("ab") as log:
            log.write(f"--- started at {now:.3f}\n".encode())
            self._process = subprocess.Popen(
                argv,
                cwd=CHECKOUT,
                env=self._settings.env(self._settings.num_devices),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return now

    @property
    def status(self) -> int | None:
        """The exit status of the supervisor; None while it runs, or before its start."""
        return self._process.poll() if self._process else None

    @property
    def runs(self) -> bool:
        """True while there is a supervisor."""
        return self._process is not None and self._process.poll() is None

    def workers(self) -> list[int]:
        """Returns the PIDs of the workers, the one at work before the spare one."""
        return _children(self._process.pid) if self.runs else []

    def kill(self) -> float:
        """Kills all processes at once, as a loss of power does; returns when."""
        every = _tree(self._process.pid)
        now = time.time()
        self._send(signal.SIGKILL, every)
        self._process.wait()
        return now

    def kill_worker(self, which: int = 0) -> float:
        """Kills the worker, or with 1 the spare one; returns when."""
        return self._send(signal.SIGKILL, self.workers()[which : which + 1])

    def stop_worker(self) -> float:
        """Stops the worker, which then hangs; returns when."""
        return self._send(signal.SIGSTOP, self.workers()[:1])

    def stop(self) -> float:
        """Stops all processes: a host that hangs; returns when."""
        return self._send(signal.SIGSTOP, _tree(self._process.pid))

    def go_on(self) -> float:
        """Lets stopped processes go on; returns when."""
        return self._send(signal.SIGCONT, _tree(self._process.pid))

    def replace(self) -> None:
        """Gives the number of a stopped host to another, which is to be started."""
        self._process, self._replaced = None, self._process

    def wake_replaced(self) -> None:
        """Lets the host that was replaced go on, too late."""
        self._send(signal.SIGCONT, _tree(self._replaced.pid))

    def status_of_replaced(self) -> int | None:
        """Returns the exit status of a host that was replaced; None while it runs."""
        return self._replaced.poll()

    def ask_to_leave(self) -> float:
        """Sends SIGTERM to the supervisor; returns when."""
        return self._send(signal.SIGTERM, [self._process.pid])

    def end(self) -> None:
        """Ends what is left, at the end of a test."""
        for process in filter(None, (self._process, self._replaced)):
            if process.poll() is None:
                self._send(signal.SIGKILL, _tree(process.pid))
                process.wait()

    def _send(self, signum: int, pids: Iterable[int]) -> float:
        now = time.time()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        return now


def _tree(pid: int) -> list[int]:
    """Returns the PIDs of a process and of all below it."""
    pids, k = [pid], 0
    while k < len(pids):
        pids += _children(pids[k])
        k += 1
    return pids


def _children(pid: int) -> list[int]:
    """Returns the PIDs of a process's children, the oldest first."""
    found = set()
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found |= set(map(int, (thread / "children").read_text().split()))
    return sorted(found, key=_start_time)


def _start_time(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


class Hosts(contextlib.AbstractContextManager):
    """All hosts of a job, and what its files say of them.

    Args:
      settings: of the job; the hosts' output goes to JOB.logs/HOST.log.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        logs = settings.job.with_name(f"{settings.job.name}.logs")
        logs.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.hosts = [Host(settings, k, port, logs / f"{k}.log") for k in range(settings.num_hosts)]

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.end()

    def running(self) -> set[int]:
        """Returns the numbers of the hosts whose supervisors run."""
        return {host.number for host in self.hosts if host.runs}

    def member(self, number: int) -> dict[str, Any]:
        """Returns what a member says of itself; {} if it says nothing."""
        return _read(self.settings.job / f"elastic/members/{number}.json")

    def generation(self) -> dict[str, Any]:
        """Returns the newest generation; {"number": 0, "members": []} before the first."""
        files = (self.settings.job / "elastic/generations").glob("*.json")
        newest = max((int(file.stem) for file in files if file.stem.isdecimal()), default=0)
        nothing = {"number": 0, "members": []}
        if not newest:
            return nothing
        return _read(self.settings.job / f"elastic/generations/{newest}.json") or nothing

    def doing(self, number: int) -> str:
        """Returns what a host's worker does: "compile", "restore", ..., or ""."""
        member = self.member(number)
        is_new = member.get("generation") == self.generation()["number"]
        return member.get("worker", {}).get("doing", "") if is_new else ""

    def saves(self) -> bool:
        """Returns True while a checkpoint is being written."""
        return any((self.settings.job / "checkpoints").glob("*.saving*"))

    def step(self) -> int:
        """Returns the step of the last line of metrics.jsonl, or 0."""
        lines = lines_if_any(self.settings.job / "metrics.jsonl")
        return lines[-1]["step"] if lines else 0

    def first_step_at(
        self, after: int, needed: Iterable[int], allowed: Iterable[int]
    ) -> float | None:
        """Returns when the first step of the newest generation was made, in Unix seconds.

        None: not yet, or the generation is not newer than the number `after`, or lacks one of the
        hosts `needed`, or has one that is not `allowed`.
        """
        generation = self.generation()
        members = set(generation["members"])
        if generation["number"] <= after or not set(needed) <= members <= set(allowed):
            return None
        times = [
            member["first_step_time"]
            for member in map(self.member, generation["members"])
            if member.get("generation") == generation["number"] and member.get("first_step_time")
        ]
        if not times:
            return None
        # They are noted in seconds of the machine's time.monotonic.
        return time.time() - (time.monotonic() - min(times))


def wait_for(is_so: Callable[[], Any], seconds: float, poll: float = 0.1) -> Any:
    """Returns the first value that is not false, or the last one once the time is up."""
    deadline = time.monotonic() + seconds
    while not (value := is_so()) and time.monotonic() < deadline:
        time.sleep(poll)
    return value


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
