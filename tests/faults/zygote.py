"""A process that has imported everything, and forks a child for each launch.

So a launch costs what `praxis_lite.main` does, and not the imports: JAX is imported, but has no
devices yet and no thread runs, so that what is forked is as good as new (the process checks that).
`python -m tests.faults.zygote` is the process, `Zygote` the other end of its pipes.
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


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a launch ended.

    Attributes:
      code: the exit status, -9 if SIGKILL ended it, or None if it hung and was killed for it.
      out, err: what it printed.
      seconds: how long it took.
    """

    code: int | None
    out: str
    err: str
    seconds: float


class Zygote:
    """Launches jobs, one at a time; a context that ends the process."""

    def __init__(self, timeout_seconds: float = 300.0):
        self._timeout_seconds = timeout_seconds
        env = {
            **os.environ,
            "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{home()}",
            "JAX_PLATFORMS": "cpu",
            "XDG_CACHE_HOME": str(home() / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            # Its threads would start with NumPy; it is the only library that starts any.
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
        """Runs `main(argv)` in a child that is as a new process.

        Args:
          faults: installed in the child before; see tests.faults.hooks.
          meanwhile: called with the process id and the file of its output while it runs.
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
        return Launch(code, *(file.read_text(errors="replace") for file in (out, err)), seconds)

    def _answer(self, until: float | None = None) -> int | None:
        """Returns the next number that the process says, or None if it says nothing by then."""
        left = None if until is None else max(0.0, until - time.monotonic())
        if not select.select([self._process.stdout], [], [], left)[0]:
            return None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the zygote ended; its own error stands above")
        return int(line)


def _serve() -> dict[str, Any]:
    """Answers requests; returns in a child only, with its request."""
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
    """Becomes the job; its exit is the process's own, with all that a process does on its way."""
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

    # JAX warns of every fork, for it cannot know that no thread runs.
    warnings.filterwarnings("ignore", message=r"os\.fork\(\)", category=RuntimeWarning)
    try:
        _import_all()
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    _run(_serve())
