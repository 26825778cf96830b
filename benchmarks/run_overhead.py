"""Compares the step time of a training job, with metrics and logs, with that of a bare loop.

`python -m benchmarks.run_overhead` trains a job with 10 ms of matmuls per step, which records
goodput, step times, MFU and HFU, metrics.jsonl, TensorBoard, the progress line and log.txt, but
saves no checkpoints. Every 20 steps, the job pauses while a bare loop runs 20 steps of the same
compiled step on a separate state. The loop creates the batch, calls the step, and reads the metrics
one step late. The script prints the ratio of the step times: the median over all turns, and the
median over the 10% of turns with the least other load. It also prints the CPU time of the training
thread, which is hidden as long as this time is shorter than the step.

The simulated device is bound to one core, and all other threads of the process to the other cores,
because the host of an accelerator does not compute the model either. --shared_cores disables this.
"""

import argparse
import contextlib
import dataclasses
import io
import os
import tempfile
import time
from pathlib import Path

import jax

from benchmarks.matmul_job import Matmuls
from praxis_lite import (
    Hook,
    MLflow,
    PrometheusTextfile,
    RunConfig,
    SaveSettings,
    TensorBoard,
    WeightsAndBiases,
)
from praxis_lite.config.build import build
from praxis_lite.core import Partitioner, make_mesh, simulate_devices
from praxis_lite.experiment.launched_config import LaunchedConfig
from praxis_lite.job.job_dir import JobDir
from praxis_lite.job.processes.logs import command_log, job_log
from praxis_lite.trackers.metrics_endpoint import MetricsEndpoint
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_lite.trainer.launch import launch_training
from praxis_tools.job_tools import TOOLS, hooks_of_tools
from praxis_tools.plan.chips import CHIPS
from praxis_tools.utilization.utilization_hook import Utilization

STEP_SECONDS, GOAL = 0.01, 1.01
PER_TURN = 20


class Turns(Hook):
    """Hook that alternates with the bare loop and times both."""

    every, waits = PER_TURN, True

    def __init__(self, partitioner: Partitioner, pipeline):
        self._partitioner, self._batches = partitioner, pipeline.batches()
        # (seconds per step, CPU seconds of the training thread per step) in each turn.
        self.with_all: list[tuple[float, float]] = []
        self.bare: list[tuple[float, float]] = []
        self._since: tuple[float, float] | None = None

    def before_training(self, loop, state):
        self._key = self._partitioner.key(0)
        self._state = self._partitioner.init(self._key)

    def after_step(self, made):
        if self._since is not None:
            self.with_all.append(each_since(self._since))
            self.bare.append(self.turn())
        self._since = clocks()

    def turn(self) -> tuple[float, float]:
        """Runs steps in a bare loop and returns the wall and CPU seconds per step."""
        began, pending = clocks(), None
        for _ in range(PER_TURN):
            batch = self._partitioner.global_batch(next(self._batches))
            self._state, outputs = self._partitioner.train_step(self._state, batch, self._key)
            if pending is not None:
                jax.device_get(pending)
            pending = outputs
        jax.device_get(pending)
        return each_since(began)


def bind_the_device_to_a_core() -> None:
    """Binds XLA's thread pool to one core, and the process's other threads to the other cores.

    Raises SystemExit if there is only one core or the system cannot bind threads.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        raise SystemExit("Threads cannot be bound to two cores here. Use --shared_cores.")
    for thread in Path("/proc/self/task").iterdir():
        is_of_device = (thread / "comm").read_text().strip() == "tf_XLAEigen"
        os.sched_setaffinity(int(thread.name), cores[:1] if is_of_device else cores[1:])


def clocks() -> tuple[float, float]:
    """Returns the wall time and this thread's CPU time in seconds."""
    return time.perf_counter(), time.thread_time()


def each_since(before: tuple[float, float]) -> tuple[float, float]:
    """Returns the wall and CPU seconds per step since `before`, for a turn of PER_TURN steps."""
    wall, processor = clocks()
    return (wall - before[0]) / PER_TURN, (processor - before[1]) / PER_TURN


def job_of(
    num_layers: int, num_steps: int, folder: Path, *, has_trackers: bool = False
) -> tuple[JobOnMesh, LaunchedConfig]:
    """Returns a one-device job with TensorBoard, or with all kinds of trackers, and its config."""
    experiment = Matmuls()
    experiment.num_layers = num_layers
    config = experiment.config()
    job = build(config)
    run = RunConfig(num_train_steps=num_steps, checkpoints=SaveSettings(every_seconds=86_400))
    if has_trackers:
        trackers = {
            "tensorboard": TensorBoard(),
            "wandb": WeightsAndBiases(project="overhead"),
            "mlflow": MLflow(f"sqlite:///{folder}/mlflow.db"),
            "file": PrometheusTextfile(),
            "port": MetricsEndpoint(0),
        }
        run = dataclasses.replace(run, trackers=trackers)
    job = dataclasses.replace(job, run=run)
    partitioner = Partitioner(job.task, make_mesh(job.mesh))
    launched = LaunchedConfig(config, "benchmarks.matmul_job.Matmuls", packages=["benchmarks"])
    return JobOnMesh(partitioner, job, JobDir(folder)), launched


def seconds_of_a_step(num_layers: int) -> float:
    """Returns the median step time with a given number of layers."""
    with tempfile.TemporaryDirectory() as folder:
        job, _ = job_of(num_layers, 1, Path(folder))
    turns = Turns(job.partitioner, job.datasets["train"])
    turns.before_training(None, None)
    return min(turns.turn()[0] for _ in range(12))


def main() -> None:
    """Prints the step times of both loops and their ratio."""
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
    )
    os.environ["NPROC"] = "1"  # Number of threads in XLA's computation pool.
    simulate_devices(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_turns", type=int, default=60)
    parser.add_argument(
        "--trackers",
        action="store_true",
        help="use all kinds of trackers (W&B offline) in addition to TensorBoard",
    )
    parser.add_argument(
        "--shared_cores",
        action="store_true",
        help="let the device's threads share all cores with the host's threads",
    )
    args = parser.parse_args()
    os.environ.setdefault("WANDB_MODE", "offline")
    # Run a matmul, so that XLA creates all its threads.
    jax.block_until_ready(jax.jit(lambda x: x @ x)(jax.numpy.ones((512, 512))))
    if not args.shared_cores:
        bind_the_device_to_a_core()
    num_layers = max(1, round(8 * STEP_SECONDS / seconds_of_a_step(8)))
    with tempfile.TemporaryDirectory() as folder:
        job, launched = job_of(
            num_layers, (args.num_turns + 1) * PER_TURN, Path(folder), has_trackers=args.trackers
        )
        turns = Turns(job.partitioner, job.datasets["train"])

        def more_hooks(job):
            hooks = [hook for hook in hooks_of_tools(job) if not isinstance(hook, Utilization)]
            return [Utilization(job, CHIPS["cpu"]), *hooks, turns]

        with contextlib.redirect_stdout(io.StringIO()), command_log(), job_log():
            launch_training(job, launched, dataclasses.replace(TOOLS, hooks=more_hooks))
    print(f"{num_layers} layers, {len(turns.bare)} turns of {PER_TURN} steps each")
    print(f"{'ms per step':<12}{'all on':>10}{'bare':>10}{'ratio':>8}{'goal':>8}")
    for name, part, clock in (("median", 0.5, 0), ("least tenth", 0.1, 0), ("loop thread", 0.1, 1)):
        a, b = (
            sorted(both[clock] for both in times)[int(part * len(times))]
            for times in (turns.with_all, turns.bare)
        )
        goal = "" if clock else GOAL
        print(f"{name:<12}{a * 1e3:>10.3f}{b * 1e3:>10.3f}{a / b:>8.4f}{goal:>8}")


if __name__ == "__main__":
    main()
