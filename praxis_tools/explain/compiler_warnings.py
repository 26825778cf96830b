"""Rewrites XLA's warnings about full rematerialization to name the layer and suggest a fix."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

from praxis_lite.job.processes.logs import warn_once_per_job
from praxis_lite.trainer.hooks.hook import Hook
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_tools.explain.hlo_layers import layers_of_name

_END = b"praxis_lite: compiled\n"
# A script that forwards standard error line by line, but collects the warnings and returns them at
# the end. It runs in a separate process, so that XLA's last messages before an abort are forwarded.
_FILTER = """
import os, signal, sys
signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # A scheduler sends it to all processes of a job.
end, warnings = sys.argv[1].encode(), []
for line in open(0, "rb"):
    if line.endswith(end):
        os.write(2, line[:-len(end)])
        with open(1, "wb") as answer:
            answer.write(b"".join(warnings))
    elif b"[SPMD] Involuntary full rematerialization" in line:
        warnings.append(line)
    else:
        os.write(2, line)
"""


class CompilerWarnings(Hook):
    """Logs XLA's warnings about the training step, with the layer and a suggested fix."""

    def __init__(self, job: JobOnMesh):
        self._is_split = job.partitioner.mesh.size > 1

    def compiling(self) -> contextlib.AbstractContextManager:
        return explained_warnings(warn_once_per_job) if self._is_split else contextlib.nullcontext()


@contextlib.contextmanager
def explained_warnings(note: Callable[[str], None]) -> Iterator[None]:
    """Context manager that explains XLA's warnings ("Involuntary full rematerialization").

    The warnings are removed from standard error. On exit, `note` is called with an explanation for
    each layer.
    """
    sys.stderr.flush()
    stderr = os.dup(2)
    # Use a new session, so that Ctrl-C in the terminal does not stop the child process.
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _FILTER, _END.decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdin is not None and child.stdout is not None  # Both are pipes.
    os.dup2(child.stdin.fileno(), 2)
    child.stdin.close()
    try:
        yield
    finally:
        sys.stderr.flush()
        with contextlib.suppress(OSError):
            os.write(2, _END)
        os.dup2(stderr, 2)
        os.close(stderr)
        lines = child.stdout.read().decode(errors="replace").splitlines()
        child.stdout.close()
        # A process started within the context may keep the pipe open.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(1.0)
        for warning in dict.fromkeys(map(_explain, lines)):
            note(warning)


def _explain(line: str) -> str:
    """Converts an XLA warning to a message with the layer and the settings to change."""
    name = re.search(r'op_name="([^"]*)"', line)
    layer = (layers_of_name(name[1])[0] if name else "") or "an operation outside of any layer"
    splits = re.search(r"from sharding (\{.*?\}) to (\{.*?\}) efficiently", line)
    between = f" (from {splits[1]} to {splits[2]})" if splits else ""
    return (
        f"{layer}: to reshard an array{between}, the compiler copies the full array to "
        "every device, which costs memory and time (XLA: involuntary full rematerialization). "
        "Shard the batch like the activations, for instance with the task's "
        "inputs_split_mapping={'map_2d': (('replica', 'data'), None)}, or set the layer's "
        "activation_split_dims_mapping."
    )
