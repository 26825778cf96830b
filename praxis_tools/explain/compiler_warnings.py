"""Rewrites XLA's warnings about full rematerialization to name the layer and what to change."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.trainer.hooks.hook import Hook
from praxis_lite.trainer.hooks.loop import Loop
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_tools.explain.hlo_layers import layers_of_name

_END = b"praxis_lite: compiled\n"
# Forwards standard error line by line, except for the warnings, which it returns at the end. It is
# a separate process, so that XLA's last messages before an abort are forwarded too.
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
    """Notes XLA's warnings while it compiles a job's training step for several devices."""

    def __init__(self, job: JobOnMesh):
        self._is_split = job.partitioner.mesh.size > 1

    def before_training(self, loop: Loop, state: TrainState) -> None:
        self._note = loop.note

    def compiling(self) -> contextlib.AbstractContextManager:
        return explained_warnings(self._note) if self._is_split else contextlib.nullcontext()


@contextlib.contextmanager
def explained_warnings(note: Callable[[str], None]) -> Iterator[None]:
    """Notes on exit, once per layer, that XLA reshards it through full copies.

    XLA's own lines ("Involuntary full rematerialization") are removed from standard error.
    """
    sys.stderr.flush()
    stderr = os.dup(2)
    # In a new session, so that the terminal's Ctrl-C does not reach it.
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _FILTER, _END.decode()],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )
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
        # A process that was started in the meantime may hold the pipe open for longer.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(1.0)
        for warning in dict.fromkeys(map(_explained, lines)):
            note(warning)


def _explained(line: str) -> str:
    """Returns XLA's warning as a message that names the layer and the settings to change."""
    name = re.search(r'op_name="([^"]*)"', line)
    layer = (layers_of_name(name[1])[0] if name else "") or "an operation outside of any layer"
    splits = re.search(r"from sharding (\{.*?\}) to (\{.*?\}) efficiently", line)
    between = f" (from {splits[1]} to {splits[2]})" if splits else ""
    return (
        f"WARNING: {layer}: the compiler goes from one split to another through a full copy on "
        f"every device{between}, which costs memory and time. Split the batch as the activations "
        "are, such as inputs_split_mapping={'map_2d': (('replica', 'data'), None)} of the task, "
        "or state the split of the layer's output (activation_split_dims_mapping). XLA calls it "
        "an involuntary full rematerialization."
    )
