"""Jobs of several real processes on this machine, which meet over loopback."""

import dataclasses
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.job_runs import start_process

# The compiled programs are kept, for the next pair.
KEPT = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


@dataclasses.dataclass(frozen=True)
class Ended:
    """How one process ended: as `subprocess` has it, and when, in seconds of time.monotonic."""

    code: int
    out: str
    err: str
    at: float


def free_port() -> int:
    """Returns a port of this machine that was free just now."""
    with socket.socket() as item:
        item.bind(("127.0.0.1", 0))
        return item.getsockname()[1]


def start_processes(
    *argv: str,
    cwd: Path,
    count: int = 2,
    env: Sequence[dict[str, str]] = (),
    more: Sequence[Sequence[str]] = (),
) -> list[subprocess.Popen]:
    """Starts `main` in `count` processes of one job.

    Args:
      env: for each process, what its environment has besides; () for none.
      more: for each process, flags besides those that all have; () for none.
    """
    coordinator = f"--coordinator=127.0.0.1:{free_port()}"
    return [
        start_process(
            *argv,
            coordinator,
            f"--num_processes={count}",
            f"--process_id={k}",
            *(more[k] if more else ()),
            cwd=cwd,
            env=KEPT | (env[k] if env else {}),
        )
        for k in range(count)
    ]


def ended(processes: Sequence[subprocess.Popen], timeout: float = 240) -> list[Ended]:
    """Waits for all and returns how each ended; kills them if one does not."""
    deadline, actual = time.monotonic() + timeout, {}
    try:
        while len(actual) < len(processes) and time.monotonic() < deadline:
            for k, process in enumerate(processes):
                if k not in actual and process.poll() is not None:
                    actual[k] = time.monotonic()
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
        texts = [process.communicate() for process in processes]
    assert len(actual) == len(processes), ("a process does not end", actual, texts)
    return [Ended(process.returncode, *texts[k], actual[k]) for k, process in enumerate(processes)]


def run(*argv: str, cwd: Path, **settings) -> list[Ended]:
    """Starts the processes of a job and waits for their end."""
    return ended(start_processes(*argv, cwd=cwd, **settings))


def wait_until(is_so: Callable[[], bool], processes: Sequence[subprocess.Popen]) -> None:
    """Waits until something is so, while all processes run."""
    while not is_so():
        assert all(process.poll() is None for process in processes), ended(processes)
        time.sleep(0.02)


def kill(process: subprocess.Popen, signum: int = signal.SIGKILL) -> float:
    """Sends a signal; returns when, in seconds of time.monotonic."""
    process.send_signal(signum)
    return time.monotonic()
