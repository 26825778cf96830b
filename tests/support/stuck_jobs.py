"""Runs jobs of three processes, one of which hangs, and collects observations."""

import dataclasses
import functools
import signal
import subprocess
import time
from pathlib import Path

from tests.support import process_pairs as pairs
from tests.support.job_runs import CHECKOUT, home

EXPERIMENT = '''
import ctypes
import os
import signal
import threading
import time
from pathlib import Path

import fiddle as fdl
from jobzoo.experiments import Tiny, Windows
from praxis_lite import Hook, MeshConfig, register
from praxis_lite.layers import rotary_lm, set_sharding_params


def hang(where):
    folder = Path(os.environ["MARKS"])
    left = [k for k in os.environ.get(f"HANG_{where}", "").split(",") if k]
    left = [how for how in left if not (folder / how).exists()]
    if not left:
        return
    how = left[0]
    (folder / how).touch()
    if how == "sleeps":
        threading.Event().wait()
    if how == "keeps the lock":
        ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
    if how == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)


class HangingWindows(Windows):
    """Waits at a batch, and takes its time for each."""

    def rows(self, index, rows):
        if index == 12:
            hang("INPUT")
        time.sleep(0.1)
        return super().rows(index, rows)


class SlowWindows(Windows):
    """Takes its time for the batches of an evaluation, and much in the second process."""

    def rows(self, index, rows):
        time.sleep(float(os.environ.get("SLOW_EVALUATION", "0")))
        return super().rows(index, rows)


class HangingHook(Hook):
    """Waits after a step."""

    def after_step(self, made):
        if made.step == 12:
            hang("HOOK")


@register
class Hanging(Tiny):
    """Three processes of one device."""

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 3, 1))

    def task(self):
        task = super().task()
        lm = rotary_lm(
            vocab_size=257, model_dims=7, hidden_dims=5, num_heads=1, dim_per_head=4, num_layers=1
        )
        task.model = set_sharding_params(lm)
        return task

    def datasets(self):
        datasets = super().datasets()
        fdl.update_callable(datasets["train"], HangingWindows)
        fdl.update_callable(datasets["heldout"], SlowWindows)
        return datasets

    def hooks(self):
        return [fdl.Config(HangingHook)]

    def run(self):
        run = super().run()
        run.num_train_steps = 100_000
        run.evaluation.every_steps = 1000
        run.checkpoints.every_steps = 5
        return run
'''

# It usually takes half a minute, but longer on a busy machine.
_SECONDS = 180.0
OUTSIDE = "is stopped from outside"


@dataclasses.dataclass(frozen=True)
class Case:
    """A job of three processes, one of which hangs.

    Attributes:
      culprit: Index of the process that hangs.
      where: "INPUT" or "HOOK".
      hows: How it hangs; in an elastic job, one entry for each time that it hangs.
      settings: Settings for `--set`.
      flags: Additional flags.
      is_slow_before: Whether the culprit takes 7 s per evaluation batch before it hangs.
    """

    culprit: int
    where: str
    hows: tuple[str, ...]
    settings: tuple[str, ...] = ("run.stopping.watchdog_exits=true",)
    flags: tuple[str, ...] = ()
    is_slow_before: bool = False


@dataclasses.dataclass(frozen=True)
class Seen:
    """Observations of a job.

    Attributes:
      job: The job's directory.
      texts: Standard error of each process.
      codes: Exit statuses.
      seconds: Time until the other processes had ended, or until the elastic job had continued.
    """

    job: Path
    texts: list[str]
    codes: list[int]
    seconds: float


@functools.cache
def _package() -> Path:
    """Writes the package with the experiment, and returns its parent folder."""
    folder = home() / "stuckzoo"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "experiments.py").write_text(EXPERIMENT)
    return home()


def _num_steps(job: Path) -> int:
    path = job / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def started(case: Case, folder: Path) -> list[subprocess.Popen]:
    """Starts a job of three processes."""
    _package()
    job, env = folder / "job", [{"MARKS": str(folder)} for _ in range(3)]
    if case.hows != (OUTSIDE,):
        env[case.culprit][f"HANG_{case.where}"] = ",".join(case.hows)
    settings = case.settings
    if case.is_slow_before:
        env[case.culprit]["SLOW_EVALUATION"] = "7"
        settings += ("run.evaluation.every_steps=9", "run.evaluation.max_batches=6")
    return pairs.start_processes(
        "--exp=stuckzoo.experiments.Hanging",
        "--packages=jobzoo,stuckzoo",
        "--start_seconds=300",
        *case.flags,
        f"--job_log_dir={job}",
        "--set",
        *settings,
        cwd=CHECKOUT,
        count=3,
        env=env,
    )


def wait_until_stuck(case: Case, folder: Path, processes: list[subprocess.Popen]) -> None:
    """Waits until one of a job's processes hangs or is slow, or stops one from outside."""
    job = folder / "job"
    if case.is_slow_before:
        pairs.wait_until(lambda: _num_steps(job) >= 8, processes)
    elif case.hows == (OUTSIDE,):
        pairs.wait_until(lambda: _num_steps(job) >= 8, processes)
        pairs.kill(processes[case.culprit], signal.SIGSTOP)
    else:
        pairs.wait_until((folder / case.hows[0]).exists, processes)


def watched(case: Case, folder: Path, processes: list[subprocess.Popen]) -> Seen:
    """Waits until a job has ended or continued, and returns the observations."""
    job, began = folder / "job", time.monotonic()

    def wait(is_so, most: float) -> None:
        end = time.monotonic() + most
        while not is_so():
            runs = any(process.poll() is None for process in processes)
            assert runs and time.monotonic() < end, (case, _ended(processes))
            time.sleep(0.2)

    if "--elastic" in case.flags:
        for number in range(1, 1 + len(case.hows)):
            wait(lambda n=number: elastic_lines(job).count('"stuck"') >= n, 400.0)
        wait(lambda: _num_steps(job) >= 20, 200.0)
    else:
        others = [process for k, process in enumerate(processes) if k != case.culprit]
        wait(lambda: all(item.poll() is not None for item in others), _SECONDS)
    seconds = time.monotonic() - began
    return Seen(job, _ended(processes), [process.returncode for process in processes], seconds)


def elastic_lines(job: Path) -> str:
    """Returns the content of elastic.jsonl."""
    return (job / "elastic.jsonl").read_text()


def _ended(processes: list[subprocess.Popen]) -> list[str]:
    """Kills the remaining processes, and returns the standard error of each process."""
    for process in processes:
        process.kill()
    return [process.communicate()[1] for process in processes]
