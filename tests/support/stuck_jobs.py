"""Runs jobs of three processes, one of which hangs, and collects observations."""

import dataclasses
import subprocess
import time
from pathlib import Path

from tests.support import process_pairs as pairs
from tests.support.job_runs import CHECKOUT, home

EXPERIMENT = '''
import ctypes
import os
import threading
import time

import fiddle as fdl
from jobzoo.experiments import Tiny, Windows
from praxis_lite import Hook, MeshConfig, register
from praxis_lite.layers import rotary_lm, set_sharding_params


def hang():
    how = os.environ.get("HANG")
    if how == "sleeps":
        threading.Event().wait()
    if how == "keeps the lock":
        ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)


class SlowWindows(Windows):
    """Takes its time for the batches of an evaluation, and much in the second process."""

    def rows(self, index, rows):
        time.sleep(float(os.environ.get("SLOW_EVALUATION", "0")))
        return super().rows(index, rows)


class HangingHook(Hook):
    """Waits after a step."""

    def after_step(self, made):
        if made.step == 12:
            hang()


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

# It usually takes a minute, but longer on a busy machine.
_SECONDS = 300.0


@dataclasses.dataclass(frozen=True)
class Case:
    """A job of three processes, one of which hangs in a hook.

    Attributes:
      culprit: Index of the process that hangs.
      how: "sleeps" or "keeps the lock".
      is_slow_before: Whether the culprit takes 7 s per evaluation batch before it hangs.
    """

    culprit: int
    how: str
    is_slow_before: bool = False


@dataclasses.dataclass(frozen=True)
class Seen:
    """Observations of a job.

    Attributes:
      job: The job's directory.
      texts: Standard error of each process.
      codes: Exit statuses.
    """

    job: Path
    texts: list[str]
    codes: list[int]


def started(case: Case, folder: Path) -> list[subprocess.Popen]:
    """Starts a job of three processes."""
    package = home() / "stuckzoo"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    (package / "experiments.py").write_text(EXPERIMENT)
    env: list[dict[str, str]] = [{} for _ in range(3)]
    env[case.culprit]["HANG"] = case.how
    settings = ["run.stopping.watchdog_exits=true"]
    if case.is_slow_before:
        env[case.culprit]["SLOW_EVALUATION"] = "7"
        settings += ["run.evaluation.every_steps=9", "run.evaluation.max_batches=6"]
    return pairs.start_processes(
        "--exp=stuckzoo.experiments.Hanging",
        "--packages=jobzoo,stuckzoo",
        "--start_seconds=300",
        f"--job_log_dir={folder}/job",
        "--set",
        *settings,
        cwd=CHECKOUT,
        count=3,
        env=env,
    )


def watched(case: Case, folder: Path, processes: list[subprocess.Popen]) -> Seen:
    """Waits until the processes that do not hang have ended, and returns the observations."""
    others = [process for k, process in enumerate(processes) if k != case.culprit]
    end = time.monotonic() + _SECONDS
    while any(process.poll() is None for process in others) and time.monotonic() < end:
        time.sleep(0.2)
    have_ended = all(process.poll() is not None for process in others)
    for process in processes:
        process.kill()
    texts = [process.communicate()[1] for process in processes]
    assert have_ended, (case, texts)
    return Seen(folder / "job", texts, [process.returncode for process in processes])
