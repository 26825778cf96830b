"""A process that has imported everything, and forks a child for each launch.

A launch thus skips the imports. JAX is imported but not initialized, and no threads are running, so
a child behaves like a new process; the process checks this. `python -m tests.faults.zygote` runs
the process, and `Zygote` communicates with it through pipes.
"""

import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.faults.zoo import CHECKOUT, home
from tests.support.log_lines import terminal_text


@dataclasses.dataclass(frozen=True)
class Launch:
    """The result of a launch.

    Attributes:
      code: Exit status; -9 if the launch was killed by SIGKILL, None if it was killed for hanging.
      out: Standard output.
      err: Standard error.
      seconds: Duration.
    """

    code: int | None
    out: str
    err: str
    seconds: float


class Zygote:
    """Context manager that launches jobs one at a time, and ends the process on exit."""

    def __init__(self, timeout_seconds: float = 300.0):
        self._timeout_seconds = timeout_seconds
        env = {
            **os.environ,
            "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{home()}",
            "JAX_PLATFORMS": "cpu",
            "XDG_CACHE_HOME": str(home() / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            # NumPy would start OpenBLAS's threads. No other library starts threads on import.
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zygote"],
            cwd=CHECKOUT,
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def launch(
        self,
        argv: Sequence[str],
        faults: Sequence[Mapping[str, Any]] = (),
        *,
        env: Mapping[str, str] | None = None,
        meanwhile: Callable[[int, Path], None] | None = None,
    ) -> Launch:
        """Runs `main(argv)` in a child that behaves like a new process.

        Args:
          argv: Command-line arguments.
          faults: Faults to install in the child first; see tests.faults.hooks.
          env: Additional environment variables.
          meanwhile: Function called with the child's process id and output file while it runs.
        """
        out, err = home() / "launch.out", home() / "launch.err"
        for file in (out, err):
            file.write_text("")
        request = {
            "argv": list(argv),
            "faults": list(faults),
            "env": dict(env or {}),
            "out": str(out),
            "err": str(err),
        }
        start = time.monotonic()
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        pid = self._answer()
        if meanwhile is not None:
            meanwhile(pid, out)
        code = self._answer(start + self._timeout_seconds)
        if code is None:
            os.kill(pid, signal.SIGKILL)
            self._answer()
        seconds = time.monotonic() - start
        texts = (terminal_text(file.read_text(errors="replace")) for file in (out, err))
        return Launch(code, *texts, seconds)

    def _answer(self, until: float | None = None) -> int | None:
        """Returns the next number from the process, or None if none arrives by the time `until`."""
        left = None if until is None else max(0.0, until - time.monotonic())
        if not select.select([self._process.stdout], [], [], left)[0]:
            return None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the zygote exited; see its error above")
        return int(line)


def _serve() -> dict[str, Any]:
    """Forks a child for each request. Returns only in the child, with its request."""
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            return json.loads(line)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    sys.exit(0)


def _import_all() -> None:
    import faultzoo.experiments  # noqa: F401
    import jax
    import matplotlib.pyplot  # noqa: F401
    import tensorboardX  # noqa: F401

    import praxis_lite.main  # noqa: F401

    assert threading.active_count() == 1, threading.enumerate()
    assert len(os.listdir("/proc/self/task")) == 1, "a library has started threads"
    assert not jax._src.xla_bridge.backends_are_initialized()


def _run(request: Mapping[str, Any]) -> None:
    """Runs the job in this process, which exits normally when the job ends."""
    for number, file in ((1, request["out"]), (2, request["err"])):
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.environ.update(request["env"])

    from praxis_lite.main import main
    from tests.faults import hooks

    hooks.install(request["faults"])
    main(request["argv"])


if __name__ == "__main__":
    import warnings

    # JAX warns about every fork, because it cannot know that no threads are running.
    warnings.filterwarnings("ignore", message=r"os\.fork\(\)", category=RuntimeWarning)
    try:
        _import_all()
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    _run(_serve())
