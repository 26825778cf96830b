"""Launches small jobs from a user package in this process, for tests of `main`.

A temporary folder, one per process, contains the package `jobzoo`, its texts, jobs that are shared
by several tests, and the compilation cache, so that a second launch is fast.
"""

import atexit
import contextlib
import dataclasses
import functools
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax

import praxis_lite
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.metrics.json_lines import read_json_lines
from praxis_lite.trainer.metrics.step_times import TIMES
from tests.support.log_lines import terminal_text

# Keys in metrics.jsonl whose values depend on clocks.
CLOCKS = {*TIMES, "examples_per_second", "tokens_per_second"}
CHECKOUT = Path(__file__).parents[2]

EXPERIMENTS = '''
import os
import signal
from pathlib import Path

import fiddle as fdl
import jax
import numpy as np
import optax

from praxis_lite.layers import rotary_lm
from praxis_lite import (
    EvaluationSettings, Experiment, MeshConfig, RunConfig, SaveSettings, StopSettings, register,
)
from praxis_lite.checkpoints.steps.retention import BestCheckpoints
from praxis_lite.decode import Sample
from praxis_lite.experiment.run_settings import EarlyStopping
from praxis_lite.inputs import InMemory, TextCorpus, TextPrompts
from praxis_lite.inputs.numpy_data import TextWindows
from praxis_lite.layers import set_sharding_params
from praxis_lite.core.learner.learner import Learner
from praxis_lite.tasks.language_model import LanguageModelTask

TEXTS = Path(__file__).parents[1] / "texts"


class Windows(TextWindows):
    """Ends the process, or the loop, at the batch that the environment names."""

    def rows(self, index, rows):
        if os.environ.get("JOBZOO_KILL_AT") == str(index):
            os.kill(os.getpid(), getattr(signal, os.environ.get("JOBZOO_SIGNAL", "SIGKILL")))
        if os.environ.get("JOBZOO_RAISE_AT") == str(index):
            raise RuntimeError("the plug was pulled")
        batch = super().rows(index, rows)
        if os.environ.get("JOBZOO_FOREIGN_ID_AT") == str(index):
            batch["labels"] = np.where(np.arange(len(batch["ids"]))[:, None] == 5, 300,
                                       batch["labels"])
        return batch


@register
class Tiny(Experiment):
    """A byte LM of sizes that no mesh divides; dropout, so that the keys matter."""

    corpus = fdl.Config(TextCorpus, files=f"{TEXTS}/*.txt", heldout_percent=20)

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 4, 2))

    def task(self):
        lm = rotary_lm(
            vocab_size=257, model_dims=7, hidden_dims=11, num_heads=3,
            dim_per_head=6, num_layers=2, residual_dropout_prob=0.1,
        )
        learner = fdl.Config(
            Learner,
            optimizer=fdl.Partial(optax.adamw),
            learning_rate=fdl.Config(
                optax.linear_schedule, init_value=3e-2, end_value=1e-3, transition_steps=20
            ),
            clip_gradient_norm_to_value=1.0,
        )
        batch = ("replica", "data")
        return fdl.Config(
            LanguageModelTask, model=set_sharding_params(lm), learner=learner,
            inputs_split_mapping={"map_1d": (batch,), "map_2d": (batch, None)},
            decoder=fdl.Config(Sample, max_decode_steps=5, temperature=0.0, k=0),
        )

    def datasets(self):
        return {
            "train": fdl.Config(
                Windows, self.corpus, "train", batch_size=13, seq_len=11, shuffle=True
            ),
            "heldout": fdl.Config(
                TextWindows, self.corpus, "heldout", batch_size=13, seq_len=37, shuffle=False
            ),
        }

    def decode_datasets(self):
        return {
            "prompts": fdl.Config(
                TextPrompts, self.corpus, "heldout", batch_size=5, num_prompts=3,
                min_prompt_bytes=2, max_prompt_bytes=7,
            )
        }

    def run(self):
        return fdl.Config(
            RunConfig, num_train_steps=7, checkpoints=fdl.Config(SaveSettings, every_steps=3),
            evaluation=fdl.Config(EvaluationSettings, every_steps=3),
        )


@register
class Averaged(Tiny):
    """Averages its weights, keeps the best checkpoint, and stops when it gets no better."""

    def task(self):
        task = super().task()
        task.learner.ema_decay = 0.7
        task.learner.learning_rate = 1.0  # So high that the loss goes up and down.
        task.learner.bprop_variable_exclusion = "final_ln/.*"
        return task

    def run(self):
        return fdl.Config(
            RunConfig, num_train_steps=9, decode_use_ema_states=True,
            checkpoints=fdl.Config(
                SaveSettings, every_steps=2, max_to_keep=2,
                best=fdl.Config(BestCheckpoints, metric="heldout/loss", max_to_keep=1),
            ),
            evaluation=fdl.Config(EvaluationSettings, every_steps=1, use_ema_states=True),
            stopping=fdl.Config(
                StopSettings, early=fdl.Config(EarlyStopping, metric="heldout/loss", patience=2)
            ),
        )


@register
class Wasteful(Tiny):
    """A large weight on every device, and a dimension of which half is padding."""

    def task(self):
        task = super().task()
        task.model.max_seq_length = 40_009
        task.model.hidden_dims = 1
        return task


def ragged_arrays():
    return {"ids": np.ones((7, 11), np.int32), "labels": np.ones((5, 11), np.int32)}


def arrays_without_labels():
    return {"ids": np.ones((7, 11), np.int32), "targets": np.ones((7, 11), np.int32)}


@register
class Ragged(Tiny):
    """Batches whose leaves have different numbers of rows."""

    def datasets(self):
        return {"train": fdl.Config(RaggedBatches, ragged_arrays, batch_size=7, shuffle=True)}


class RaggedBatches(InMemory):
    """Gives what it is told, wrong as it is."""

    def check(self):
        pass

    def element_spec(self):
        leaves = {**self.arrays(), "weights": np.ones((7, 11), np.float32)}
        return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in leaves.items()}


@register
class NoLabels(Tiny):
    """Batches without the key `labels`."""

    def datasets(self):
        return {
            "train": fdl.Config(InMemory, arrays_without_labels, batch_size=7, shuffle=True)
        }


@register
class RaggedArrays(Tiny):
    """Arrays in memory that disagree."""

    def datasets(self):
        return {"train": fdl.Config(InMemory, ragged_arrays, batch_size=7, shuffle=True)}


@register
class NoTrain(Tiny):
    """Nothing to train on."""

    def datasets(self):
        return {"heldout": super().datasets()["heldout"]}
'''


@dataclasses.dataclass(frozen=True)
class Launch:
    """The result of a command line.

    Attributes:
      code: Exit status.
      out: Text on standard output, as on a terminal.
      err: Text on standard error, as on a terminal.
      num_compiled: Number of executables that XLA compiled or read from its cache.
      seconds: Duration of the launch.
    """

    code: int
    out: str
    err: str
    num_compiled: int
    seconds: float


def home() -> Path:
    """Returns the folder with the package `jobzoo` and its texts, and adds it to sys.path."""
    folder = _home()
    if str(folder) not in sys.path:  # A test that restores sys.path removes it.
        sys.path.insert(0, str(folder))
    return folder


@functools.cache
def _home() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="jobzoo_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "texts").mkdir()
    for number in range(8):
        lines = [f"{number + k} plus {k} makes {number + 2 * k}.\n" for k in range(37)]
        (folder / f"texts/t{number}.txt").write_text("".join(lines))
    (folder / "jobzoo").mkdir()
    (folder / "jobzoo/__init__.py").touch()
    (folder / "jobzoo/experiments.py").write_text(EXPERIMENTS)
    return folder


def launch(*argv: str, num_devices: int | None = 8) -> Launch:
    """Runs `main` with these arguments in this process, on its eight simulated devices."""
    from praxis_lite.main import main

    env = {"XDG_CACHE_HOME": str(home() / "cache")}
    if num_devices is not None:
        env["JAX_NUM_CPU_DEVICES"] = str(num_devices)
    out, err, code = io.StringIO(), io.StringIO(), 0
    before, start = _num_compiled(), time.perf_counter()
    try:
        with (
            mock.patch.dict(os.environ, env),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            main([*argv, *_packages(argv)])
    except SystemExit as stop:
        code = stop.code
    seconds = time.perf_counter() - start
    texts = terminal_text(out.getvalue()), terminal_text(err.getvalue())
    return Launch(code, *texts, _num_compiled() - before, seconds)


def loaded(job: JobDir, *args: Any, **settings: Any) -> praxis_lite.TrainedModel:
    """Loads a job with `praxis_lite.load`."""
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(home() / "cache")}):
        return praxis_lite.load(job.path, *args, packages=["jobzoo"], **settings)


def succeed(*argv: str) -> Launch:
    """Runs `main`, and checks that it succeeds and prints nothing on standard error."""
    done = launch(*argv)
    assert done.code == 0, done.err
    assert done.err == ""
    return done


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a JSON lines file without values that depend on clocks."""
    return [{k: v for k, v in line.items() if k not in CLOCKS} for line in read_json_lines(path)]


@functools.cache
def trained() -> tuple[JobDir, Launch]:
    """Returns a job of `Tiny`, trained on a (1, 4, 2) mesh. It is shared: do not modify it."""
    folder = home() / "trained"
    done = succeed("--exp=jobzoo.experiments.Tiny", f"--job_log_dir={folder}")
    return JobDir(folder), done


def copy_of_trained(folder: Path) -> JobDir:
    """Returns a copy of the trained job, which may be modified."""
    return JobDir(Path(shutil.copytree(trained()[0].path, folder)))


def as_it_died(job: JobDir, step: int) -> JobDir:
    """Returns a copy of a job as if its process had died after the save of `step`."""
    copy = JobDir(Path(shutil.copytree(job.path, f"{job.path}_that_died")))
    for saved in copy.checkpoints.iterdir():
        if saved.name.isdigit() and int(saved.name) > step:
            shutil.rmtree(saved)
    return copy


def _packages(argv: tuple[str, ...]) -> list[str]:
    has_own = any(item == "--mode=summary" or item.startswith("--packages") for item in argv)
    return [] if has_own else ["--packages=jobzoo"]


def start_process(
    *argv: str, cwd: Path, env: dict[str, str] | None = None, out: Any = subprocess.PIPE
) -> subprocess.Popen:
    """Starts `python -m praxis_lite` with the checkout and `jobzoo` on its path."""
    whole = {**os.environ, "PYTHONPATH": f"{CHECKOUT}:{home()}"}
    whole |= {"XDG_CACHE_HOME": str(home() / "cache"), **(env or {})}
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # pytest was started in the background of a shell.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(
        [sys.executable, "-m", "praxis_lite", *argv, *_packages(argv)],
        cwd=cwd,
        env=whole,
        text=True,
        stdout=out,
        stderr=subprocess.PIPE,
    )


@functools.cache
def _compilations() -> list[str]:
    # Never unregistered, because JAX has no public function that removes a single listener.
    names: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, _, **kw: names.append(name))
    return names


def _num_compiled() -> int:
    return _compilations().count("/jax/core/compile/backend_compile_duration")
