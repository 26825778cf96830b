"""Simulated hosts, each a supervisor with its workers, whose processes can be killed or stopped."""

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

from praxis_lite.trainer.metrics.json_lines import read_json_lines
from tests.support.process_pairs import free_port

CHECKOUT = Path(__file__).parents[2]
EXPERIMENT = "elasticzoo.Mixed"


@dataclasses.dataclass(frozen=True)
class Settings:
    """A job and its hosts.

    Attributes:
      job: Job directory.
      num_hosts: Number of hosts, each with one supervisor.
      num_devices: Number of simulated devices per host.
      cache: Folder for compiled programs and data.
      least: Value of `--min_processes`.
      settings: Values of `--set`.
      url: URL of the job directory, if it is in an object store. The logs are still next to `job`.
    """

    job: Path
    num_hosts: int
    num_devices: int
    cache: Path
    least: int = 1
    settings: tuple[str, ...] = ()
    url: str | None = None

    def argv(self, *more: str) -> list[str]:
        """Returns the command line of the job's processes, with `more` settings."""
        named = dict(item.split("=", 1) for item in (*self.settings, *more))
        return [
            f"--exp={EXPERIMENT}",
            "--packages=elasticzoo",
            f"--job_log_dir={self.url or self.job}",
            "--set",
            *(f"{name}={value}" for name, value in named.items()),
        ]

    def env(self, num_devices: int) -> dict[str, str]:
        """Returns the environment of a process with `num_devices` devices."""
        return {
            **os.environ,
            "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'tests/elastic'}",
            "XDG_CACHE_HOME": str(self.cache),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(num_devices),
            # Cache all programs, although they are small and compile quickly.
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }


class Host:
    """A supervisor in a separate process group, with all its descendant processes."""

    def __init__(self, settings: Settings, number: int, port: int, log: Path):
        self.number, self.log = number, log
        self._settings, self._port = settings, port
        self._process: subprocess.Popen | None = None
        self._replaced: subprocess.Popen | None = None

    def start(self, *more: str) -> float:
        """Starts the supervisor with `more` settings. Returns the time in Unix seconds."""
        argv = [
            sys.executable,
            "-m",
            "praxis_lite",
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
        """The exit status of the supervisor; None while it is running or before it was started."""
        return self._process.poll() if self._process else None

    @property
    def runs(self) -> bool:
        """Whether the supervisor is running."""
        return self._process is not None and self._process.poll() is None

    def workers(self) -> list[int]:
        """Returns the PIDs of the workers: the active worker, then the spare worker."""
        return _children(self._process.pid) if self.runs else []

    def kill(self) -> float:
        """Kills all processes at once, like a power failure. Returns the time."""
        every = _tree(self._process.pid)
        now = time.time()
        self._send(signal.SIGKILL, every)
        self._process.wait()
        return now

    def kill_worker(self, which: int = 0) -> float:
        """Kills the active worker, or the spare worker if `which` is 1. Returns the time."""
        return self._send(signal.SIGKILL, self.workers()[which : which + 1])

    def stop_worker(self) -> float:
        """Stops the active worker, which then hangs. Returns the time."""
        return self._send(signal.SIGSTOP, self.workers()[:1])

    def stop(self) -> float:
        """Stops all processes, like a host that hangs. Returns the time."""
        return self._send(signal.SIGSTOP, _tree(self._process.pid))

    def go_on(self) -> float:
        """Resumes stopped processes. Returns the time."""
        return self._send(signal.SIGCONT, _tree(self._process.pid))

    def replace(self) -> None:
        """Frees the number of a stopped host for a replacement, which the caller must start."""
        self._process, self._replaced = None, self._process

    def wake_replaced(self) -> None:
        """Resumes the replaced host after its replacement has started."""
        self._send(signal.SIGCONT, _tree(self._replaced.pid))

    def status_of_replaced(self) -> int | None:
        """Returns the exit status of the replaced host; None while it is running."""
        return self._replaced.poll()

    def ask_to_leave(self) -> float:
        """Sends SIGTERM to the supervisor. Returns the time."""
        return self._send(signal.SIGTERM, [self._process.pid])

    def end(self) -> None:
        """Kills all remaining processes at the end of a test."""
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
    """Returns the PIDs of a process and all its descendants."""
    pids, k = [pid], 0
    while k < len(pids):
        pids += _children(pids[k])
        k += 1
    return pids


def _children(pid: int) -> list[int]:
    """Returns the PIDs of a process's children, oldest first."""
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
    """All hosts of a job, and their state according to the job's files.

    Args:
      settings: Settings of the job. The output of each host is written to JOB.logs/HOST.log.
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
        """Returns the numbers of the hosts whose supervisors are running."""
        return {host.number for host in self.hosts if host.runs}

    def member(self, number: int) -> dict[str, Any]:
        """Returns the content of a member's file, or {} if it cannot be read."""
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
        """Returns the activity of a host's worker, such as "compile"; "" if it is unknown."""
        member = self.member(number)
        is_new = member.get("generation") == self.generation()["number"]
        return member.get("worker", {}).get("doing", "") if is_new else ""

    def saves(self) -> bool:
        """Returns whether a checkpoint is being written."""
        return any((self.settings.job / "checkpoints").glob("*.saving*"))

    def step(self) -> int:
        """Returns the step of the last line of metrics.jsonl, or 0."""
        lines = read_json_lines(self.settings.job / "metrics.jsonl")
        return lines[-1]["step"] if lines else 0

    def first_step_at(
        self, after: int, needed: Iterable[int], allowed: Iterable[int]
    ) -> float | None:
        """Returns the time of the newest generation's first step, in Unix seconds.

        The result is None if there was no step yet, if the generation's number is at most `after`,
        if a host in `needed` is not a member, or if a member is not in `allowed`.
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
        # Workers report times in seconds of the machine's time.monotonic.
        return time.time() - (time.monotonic() - min(times))


def wait_for(is_so: Callable[[], Any], seconds: float, poll: float = 0.1) -> Any:
    """Calls `is_so` until the result is true or the time is up. Returns the last result."""
    deadline = time.monotonic() + seconds
    while not (value := is_so()) and time.monotonic() < deadline:
        time.sleep(poll)
    return value


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
