"""Signals to a job of two real processes while it saves, restores, compiles or evaluates.

A process that reaches a gate writes a file, and waits until the test opens the gate, or forever.
The time of a signal therefore does not depend on a clock.
"""

import dataclasses
import signal
import tempfile
from pathlib import Path

import pytest

from praxis_lite.job.job_dir import JobDir
from tests.support import line_jobs  # noqa: F401 (writes jobzoo.lines)
from tests.support import process_pairs as pairs
from tests.support.job_runs import home
from tests.support.log_lines import terminal_text

pytestmark = pytest.mark.slow

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


BEGIN, READ = OrbaxWrite.begin, checkpoints.read_state
WRITE, DIGESTS = serialization.async_serialize_from_host, DiskSteps.file_entries
step = ""  # Of the save in flight, of which there is only one at a time.


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


OrbaxWrite.begin, checkpoints.read_state = noted_begin, gated_read
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
    """Fits a line to noisy points on eight devices."""

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
    """A job of two processes, which wait at gates until the test lets them pass.

    Args:
      folder: Folder for the job and for the files of the gates.
      places: The gates at which the processes wait: "write of 14", "digests of 14", "restore",
        "compile" or "evaluation" (of step 15).
    """

    def __init__(self, folder: Path, *places: str):
        folder.mkdir(exist_ok=True)
        self._gates = Path(tempfile.mkdtemp(prefix="gates_", dir=folder))
        env = {"GATES": str(self._gates), "GATED": ",".join(places)}
        self.job = JobDir(folder / "job")
        self.processes = pairs.start_processes(
            GATED, f"--job_log_dir={folder}/job", cwd=home(), env=(env, env)
        )

    def reaches(self, place: str, who: str = "01") -> None:
        """Waits until the given processes have reached a gate."""
        pairs.wait_until(
            lambda: all((self._gates / f"{place}.{k}").exists() for k in who), self.processes
        )

    def signal(self, signum: int) -> None:
        """Sends a signal to the second process."""
        pairs.kill(self.processes[1], signum)

    def answer(self) -> str:
        """Returns the next line on standard error of the second process."""
        return terminal_text(self.processes[1].stderr.readline())

    def opens(self, place: str) -> None:
        """Opens a gate, so that the processes continue."""
        (self._gates / f"{place}.open").touch()

    def ended(self) -> list[pairs.Ended]:
        """Returns how both processes ended; fails if this takes more than a minute."""
        return pairs.ended(self.processes, 60)


def steps_in(job: JobDir) -> list[str]:
    """Returns the names of all entries in the checkpoint folder, except unfinished saves."""
    return sorted(path.name for path in job.checkpoints.iterdir() if "saving" not in path.name)


@dataclasses.dataclass(frozen=True)
class Interruption:
    """A launch of the job that was interrupted.

    Attributes:
      done: how both processes ended.
      answer: the line by which the process that got the first signal answered it.
      steps: the steps that were then there.
    """

    done: list[pairs.Ended]
    answer: str
    steps: list[str]


def interrupted(folder, place, *, twice=True):
    """Launches the job, and signals its second process at a gate, once or twice."""
    gates = (place, "write of 14") if place == "evaluation" else (place,)
    # The save of step 14 would else be whole before the signal, or not.
    pair = Pair(folder, *gates)
    pair.reaches(place, "0" if place.startswith("digests") else "01")
    pair.signal(signal.SIGTERM)
    answer = pair.answer()
    if twice:
        pair.signal(signal.SIGINT)
    else:
        pair.opens(place)
    return Interruption(pair.ended(), answer, steps_in(pair.job))


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """The job is ended by a second signal in a save, and resumed and ended by a single one."""
    folder = tmp_path_factory.mktemp("one")
    return [interrupted(folder, "write of 14", twice=twice) for twice in (True, False)]


def test_a_signal_while_a_step_is_saved_ends_both_with_a_later_step(launches):
    launch = launches[1]
    assert [process.code for process in launch.done] == [0, 0], launch
    assert launch.answer.startswith("WARNING: SIGTERM: ending after")
    # The step after that in which both agree; a save of step 21 may have been waited for.
    last = max(map(int, launch.steps))
    assert 14 < last < 29
    assert f"step {last} is saved, and the same command" in launch.done[0].out


def test_where_one_is_ended_at_once_the_other_hears_of_it(launches):
    check_heard(launches[0], "the newest checkpoint is of step 7")


def check_heard(launch, newest):
    """Checks that the second process was ended at once, and the first told so."""
    first, second = launch.done
    assert launch.answer.startswith("WARNING: SIGTERM: ending after")
    assert (first.code, second.code) == (130, 130), launch
    assert f"was ended by SIGINT, the second signal; {newest}. This process also" in first.err
    assert "error: process 1 (" in first.err
    assert second.err.endswith(f"ended at once; {newest}\n")
    assert launch.steps[-1:] == [s for s in [newest.split()[-1]] if s.isdecimal()]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("place", "newest"),
    [
        ("compile", "no step had been completed"),
        ("evaluation", "the newest checkpoint is of step 7"),
        ("restore", "the newest checkpoint is of step 7"),
        ("digests of 14", "the newest checkpoint is of step 7"),
        ("write of 29", "the newest checkpoint is of step 28"),
    ],
)
def test_also_there_the_other_hears_of_it(tmp_path, place, newest):
    if place in ("restore", "evaluation"):
        interrupted(tmp_path, "write of 14")
    check_heard(interrupted(tmp_path, place), newest)
