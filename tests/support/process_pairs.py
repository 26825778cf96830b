"""Jobs of several processes on this machine, connected over the loopback interface."""

import contextlib
import dataclasses
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.job_runs import start_process
from tests.support.log_lines import terminal_text

# Keep the compilation cache for the next pair.
KEPT = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended: fields as in `subprocess`, and the time (time.monotonic)."""

    code: int
    out: str
    err: str
    at: float


def free_port() -> int:
    """Returns an unused port of this machine.

    It is below the ports that Linux gives to connections, so that no connection takes it before the
    test listens on it.
    """
    while True:
        # Unlike the module's functions, this is not seeded: two tests at a time need two ports.
        port = random.SystemRandom().randint(10_000, 32_767)
        with socket.socket() as item, contextlib.suppress(OSError):
            item.bind(("127.0.0.1", port))
            return port


def start_processes(
    *argv: str,
    cwd: Path,
    count: int = 2,
    host: str = "127.0.0.1",
    env: Sequence[dict[str, str]] = (),
    more: Sequence[Sequence[str]] = (),
) -> list[subprocess.Popen]:
    """Starts `main` in `count` processes of one job.

    Args:
      host: Host of the coordinator. Processes with the host 0.0.0.0 connect like those on several
        hosts.
      env: Additional environment variables of each process, or () for none.
      more: Additional flags of each process, or () for none.
    """
    coordinator = f"--coordinator={host}:{free_port()}"
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
    """Waits for all processes and returns how each ended; kills them on a timeout."""
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
        texts = [tuple(map(terminal_text, process.communicate())) for process in processes]
    assert len(actual) == len(processes), ("a process did not end in time", actual, texts)
    return [Ended(process.returncode, *texts[k], actual[k]) for k, process in enumerate(processes)]


def run(*argv: str, cwd: Path, **settings) -> list[Ended]:
    """Runs the processes of a job until they end."""
    return ended(start_processes(*argv, cwd=cwd, **settings))


def wait_until(is_so: Callable[[], bool], processes: Sequence[subprocess.Popen]) -> None:
    """Waits until a condition is true, and checks that all processes are running."""
    while not is_so():
        assert all(process.poll() is None for process in processes), ended(processes)
        time.sleep(0.02)


def kill(process: subprocess.Popen, signum: int = signal.SIGKILL) -> float:
    """Sends a signal to a process, and returns the time in seconds of time.monotonic."""
    process.send_signal(signum)
    return time.monotonic()
