"""Jobs of two processes that receive signals while they wait at gates: `jobzoo.gated.Gated`.

A process that reaches a gate writes a file, and waits until the test opens the gate, or forever.
The time of a signal therefore does not depend on a clock.
"""

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from praxis_lite.job.job_dir import JobDir
from tests.support import line_jobs  # noqa: F401 (writes jobzoo.lines)
from tests.support import process_pairs as pairs
from tests.support.job_runs import CHECKOUT, home, lines_of
from tests.support.log_lines import terminal_text

EXPERIMENT = '''
import asyncio
import contextlib
import ctypes
import os
import threading
import time
from pathlib import Path

import fiddle as fdl
import jax
from orbax.checkpoint._src.serialization import serialization

from jobzoo.lines import Line, Lines
from praxis_lite import EvaluationSettings, Hook, MeshConfig, RunConfig, SaveSettings, register
from praxis_lite.checkpoints import checkpoints
from praxis_lite.checkpoints.background_save import BackgroundSave
from praxis_lite.checkpoints.orbax_write import OrbaxWrite
from praxis_lite.checkpoints.steps.step_store import DiskSteps
from tests.support.log_lines import terminal_text

LIBC = ctypes.CDLL(None)


def is_gate(place):
    """Tells that this process has come to a place; returns True if it is to wait there."""
    folder = os.environ.get("GATES")
    if not folder or place not in os.environ["GATED"].split(","):
        return False
    Path(folder, f"{place}.{jax.process_index()}").touch()
    return not Path(folder, f"{place}.open").exists()


def gate(place):
    while is_gate(place):
        time.sleep(0.02)


def gate_of_c(place):
    """Waits in C code that no signal interrupts, as a compiler does not."""
    if is_gate(place):
        mutex = ctypes.create_string_buffer(64)
        LIBC.pthread_mutex_lock(mutex)

        def open_it():
            gate(place)
            LIBC.pthread_mutex_unlock(mutex)

        threading.Thread(target=open_it, daemon=True).start()
        LIBC.pthread_mutex_lock(mutex)


JOIN, BEGIN, READ = BackgroundSave.join, OrbaxWrite.begin, checkpoints.read_state
WRITE, DIGESTS = serialization.async_serialize_from_host, DiskSteps.file_entries
step = ""  # Of the save in flight, of which there is only one at a time.


def noted_join(self):
    is_gate(f"wait for {self.step}")  # Python waits there, and hears signals.
    JOIN(self)


def noted_begin(self, state):
    global step
    step = self._folder.name.removesuffix(".saving")
    BEGIN(self, state)


async def gated_write(*args, **kwargs):
    while is_gate(f"write of {step}"):
        await asyncio.sleep(0.02)
    await WRITE(*args, **kwargs)


def gated_digests(self, name):
    gate(f"digests of {step}")
    return DIGESTS(self, name)


def gated_read(*args, **kwargs):
    gate("restore")
    return READ(*args, **kwargs)


BackgroundSave.join, OrbaxWrite.begin = noted_join, noted_begin
checkpoints.read_state = gated_read
serialization.async_serialize_from_host, DiskSteps.file_entries = gated_write, gated_digests


class Gates(Hook):
    """Waits where the first step compiles."""

    every = None

    @contextlib.contextmanager
    def compiling(self):
        gate_of_c("compile")
        yield


class GatedLines(Lines):
    """Waits at the second batch."""

    def rows(self, index, rows):
        if index == 1:
            gate("evaluation")
        return super().rows(index, rows)


@register
class Gated(Line):
    """A line through noisy points, over eight devices."""

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 8, 1))

    def datasets(self):
        return {
            "train": fdl.Config(Lines, batch_size=13),
            "heldout": fdl.Config(GatedLines, batch_size=13),
        }

    def hooks(self):
        return [fdl.Config(Gates)]

    def run(self):
        return fdl.Config(
            RunConfig, num_train_steps=29, checkpoints=fdl.Config(SaveSettings, every_steps=7),
            evaluation=fdl.Config(EvaluationSettings, every_steps=15, max_batches=3),
        )
'''
GATED = "--exp=jobzoo.gated.Gated"
(home() / "jobzoo/gated.py").write_text(EXPERIMENT)


class Pair:
    """A job of two processes that wait at gates.

    Args:
      folder: Folder for the job and for the files of the gates.
      places: The gates at which the processes wait: "write of 14", "digests of 14", "restore",
        "compile" or "evaluation" (of step 15). At "wait for 14", the processes only report that
        they start to wait for that save.
      in_python: Whether the processes call `train()` instead of the command line.
    """

    def __init__(self, folder: Path, *places: str, in_python: bool = False):
        folder.mkdir(exist_ok=True)
        self._gates = Path(tempfile.mkdtemp(prefix="gates_", dir=folder))
        env = {"GATES": str(self._gates), "GATED": ",".join(places)}
        self.job = JobDir(folder / "job")
        self.processes = (
            in_two_pythons(folder / "job", env)
            if in_python
            else pairs.start_processes(
                GATED, f"--job_log_dir={folder}/job", cwd=home(), env=(env, env)
            )
        )

    def reaches(self, place: str, who: str = "01") -> None:
        """Waits until the given processes have reached a gate."""
        pairs.wait_until(
            lambda: all((self._gates / f"{place}.{k}").exists() for k in who), self.processes
        )

    def signal(self, signum: int, who: str) -> None:
        """Sends a signal to the given processes."""
        for k in who:
            pairs.kill(self.processes[int(k)], signum)

    def answer(self, who: str) -> list[str]:
        """Returns the next line on standard error of each given process."""
        return [terminal_text(self.processes[int(k)].stderr.readline()) for k in who]

    def opens(self, place: str) -> None:
        """Opens a gate, so that the processes continue."""
        (self._gates / f"{place}.open").touch()

    def ended(self) -> list[pairs.Ended]:
        """Returns how both processes ended; fails if this takes more than a minute."""
        return pairs.ended(self.processes, 60)


def in_two_pythons(job: Path, env: dict[str, str]) -> list[subprocess.Popen]:
    """Starts two processes that call `train()` in Python."""
    address = f"127.0.0.1:{pairs.free_port()}"
    whole = {
        **os.environ,
        "PYTHONPATH": f"{CHECKOUT}:{home()}",
        "XDG_CACHE_HOME": str(home() / "cache"),
        **pairs.KEPT,
        **env,
    }
    return [
        subprocess.Popen(
            [sys.executable, "-c", IN_PYTHON, address, str(k), str(job)],
            cwd=home(),
            env=whole,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for k in range(2)
    ]


IN_PYTHON = """
import sys

import jax

address, index, job = sys.argv[1:]
jax.distributed.initialize(address, 2, int(index))

import praxis_lite

try:
    praxis_lite.train("jobzoo.gated.Gated", job, packages=["jobzoo"])
except BaseException as error:
    print(f"raised {type(error).__name__}: {error}", flush=True)
"""


def steps_in(job: JobDir) -> list[str]:
    """Returns the names of all entries in the checkpoint folder, except unfinished saves."""
    return sorted(path.name for path in job.checkpoints.iterdir() if "saving" not in path.name)


def numbers_of(job: JobDir) -> list[dict]:
    """Returns a job's lines of metrics and evaluations, without values from clocks."""
    return lines_of(job.metrics_jsonl) + lines_of(job.eval_metrics_jsonl)


@functools.cache
def uninterrupted() -> list[dict]:
    """Returns the lines of metrics and evaluations of the same job without interruptions."""
    pair = Pair(home() / "uninterrupted")
    assert [process.code for process in pair.ended()] == [0, 0]
    return numbers_of(pair.job)
