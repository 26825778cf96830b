"""Measures how a step's host time grows with the number of metrics.

`python benchmarks/growth_metrics.py` trains a job with a trivial step and 25 to 400 metrics. It
prints the CPU time of the training thread per step: for the call to the step, the metrics that are
read one step late, metrics.jsonl, TensorBoard and the progress line. It also prints the CPU time
per evaluation batch. The goal is 1 ms per step with 50 metrics.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from praxis_lite.core import MeshConfig, simulate_devices  # noqa: E402

NUM_DEVICES = 1
simulate_devices(NUM_DEVICES)

import fiddle as fdl  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from benchmarks.growth import report  # noqa: E402
from praxis_lite import Experiment, Hook, RunConfig, SaveSettings  # noqa: E402
from praxis_lite.config.build import build  # noqa: E402
from praxis_lite.core import Learner, Partitioner, make_mesh  # noqa: E402
from praxis_lite.experiment.launched_config import LaunchedConfig  # noqa: E402
from praxis_lite.inputs.numpy_data import InMemory  # noqa: E402
from praxis_lite.job.job_dir import JobDir  # noqa: E402
from praxis_lite.models import FunctionModel  # noqa: E402
from praxis_lite.tasks.loss import LossTask  # noqa: E402
from praxis_lite.trainer.evaluation import Evaluator  # noqa: E402
from praxis_lite.trainer.job_on_mesh import JobOnMesh  # noqa: E402
from praxis_lite.trainer.launch import launch_training  # noqa: E402
from praxis_tools.job_tools import TOOLS, hooks_of_tools  # noqa: E402

DIMS, ROWS, PER_TURN, NUM_TURNS, GOAL_MS = 8, 8, 20, 15, 1.0


def init(key: jax.Array) -> dict[str, jax.Array]:
    """Returns the weights."""
    return {"w": jax.random.normal(key, (DIMS, DIMS))}


def loss(params: Any, inputs: Any, key: Any, num_metrics: int) -> Any:
    """Returns a loss, and metrics as (value, weight) pairs."""
    x = inputs["inputs"] @ params["w"]
    pairs = {f"metric_{i}": (x[i % ROWS, 0], jnp.float32(ROWS)) for i in range(num_metrics)}
    return (jnp.mean(x**2), jnp.float32(ROWS)), pairs


class WithMetrics(Experiment):
    """A job with one matmul, and a given number of metrics in addition to the loss."""

    num_metrics = 50

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, NUM_DEVICES, 1))

    def task(self):
        learner = fdl.Config(Learner, optimizer=fdl.Partial(optax.sgd), learning_rate=1e-3)
        model = fdl.Config(FunctionModel, init)
        return fdl.Config(LossTask, model, fdl.Partial(loss, num_metrics=self.num_metrics), learner)

    def datasets(self):
        return {"train": fdl.Config(rows, num_rows=ROWS * PER_TURN * NUM_TURNS)}

    def run(self):
        return fdl.Config(RunConfig, num_train_steps=PER_TURN * NUM_TURNS)


def rows(num_rows: int) -> InMemory:
    """Returns a dataset of batches of ROWS rows."""
    data = np.random.default_rng(0).normal(size=(num_rows, DIMS)).astype(np.float32)
    return InMemory({"inputs": data}, batch_size=ROWS, shuffle=False)


class Clock(Hook):
    """Hook that records the CPU time of the training thread every fixed number of steps."""

    every, waits = PER_TURN, False

    def __init__(self):
        self.times: list[float] = []

    def after_step(self, made):
        self.times.append(time.thread_time())


def job_of(num_metrics: int, folder: Path) -> tuple[JobOnMesh, LaunchedConfig]:
    """Returns the job and its config."""
    experiment = WithMetrics()
    experiment.num_metrics = num_metrics
    config = experiment.config()
    job = build(config)
    settings = dataclasses.replace(job.run, checkpoints=SaveSettings(every_seconds=86_400))
    job = dataclasses.replace(job, run=settings)
    partitioner = Partitioner(job.task, make_mesh(job.mesh))
    launched = LaunchedConfig(
        config, "benchmarks.growth_metrics.WithMetrics", packages=["benchmarks"]
    )
    return JobOnMesh(partitioner, job, JobDir(folder)), launched


def seconds_of_a_step(num_metrics: int) -> float:
    """Returns the minimum CPU seconds per step of the training loop."""
    with tempfile.TemporaryDirectory() as folder:
        job, launched = job_of(num_metrics, Path(folder))
        clock = Clock()
        with contextlib.redirect_stdout(io.StringIO()):
            tools = dataclasses.replace(TOOLS, hooks=lambda job: [*hooks_of_tools(job), clock])
            launch_training(job, launched, tools)
    return min(after - before for before, after in itertools.pairwise(clock.times[1:])) / PER_TURN


@functools.cache
def evaluator_of(num_metrics: int) -> tuple[Evaluator, Any]:
    """Returns an evaluator for PER_TURN batches, and the weights."""
    with tempfile.TemporaryDirectory() as folder:
        job, _ = job_of(num_metrics, Path(folder))
    partitioner = job.partitioner
    weights = partitioner.init(partitioner.key(0)).mdl_vars
    return Evaluator(partitioner, {"heldout": rows(ROWS * PER_TURN)}, PER_TURN), weights


def seconds_of_a_batch(num_metrics: int) -> float:
    """Returns the CPU seconds per batch of an evaluation."""
    evaluator, weights = evaluator_of(num_metrics)
    evaluator.run(0, weights)
    began = time.thread_time()
    evaluator.run(0, weights)
    return (time.thread_time() - began) / PER_TURN


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--largest", type=int, default=400, help="the most metrics")
    largest = parser.parse_args().largest
    sizes = [largest // 2**i for i in (4, 3, 2, 1, 0)]
    milliseconds = 1e3 * min(seconds_of_a_step(50) for _ in range(2))
    print(f"step with 50 metrics: {milliseconds:.2f} ms (goal {GOAL_MS})")
    good = [
        report("a step, s", sizes, seconds_of_a_step, repeats=1),
        report("a batch of an evaluation, s", sizes, seconds_of_a_batch, repeats=3),
    ]
    sys.exit(0 if all(good) and milliseconds <= GOAL_MS else 1)


if __name__ == "__main__":
    # The job's config must name functions in an importable module, which __main__ is not.
    from benchmarks import growth_metrics

    growth_metrics.main()
