"""Measures the cost of trackers in a training loop: the hook's calls, and the step time.

    WANDB_MODE=offline python -m benchmarks.tracker_overhead [--steps=500]

Each step waits 10 ms without holding the GIL, like a step on a device, and writes its line of
metrics. TensorBoard, W&B (offline), MLflow (SQLite), a Prometheus file and a Prometheus port record
every step, which is fifty times as often as the default in a run of 10,000 steps.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from praxis_lite import MLflow, PrometheusTextfile, TensorBoard, WeightsAndBiases
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trackers.metrics_endpoint import MetricsEndpoint
from praxis_lite.trackers.tracker import TrackedRun, Tracker
from praxis_lite.trackers.tracker_thread import TrackerThread
from praxis_lite.trainer.hooks.tracking import Trackers
from praxis_lite.trainer.metrics.json_lines import JsonLinesWriter

STEP_SECONDS = 0.010
NAMES = ("loss", "accuracy", "grad_norm", "learning_rate", "step_time", "input_time", "a", "b", "c")


def all_trackers(folder: Path) -> dict[str, Tracker]:
    """Returns a tracker of each kind, with its database, if any, in the folder."""
    return {
        "tensorboard": TensorBoard(),
        "wandb": WeightsAndBiases(project="overhead"),
        "mlflow": MLflow(f"sqlite:///{folder}/mlflow.db"),
        "file": PrometheusTextfile(),
        "port": MetricsEndpoint(0),
    }


def threads_in(job: JobDir, every: int) -> list[TrackerThread]:
    """Returns the tracker threads of a job, or none if `every` is 0."""
    if not every:
        return []
    run = TrackedRun("0" * 32, "job", "zoo.Tiny", job.path, {"run.seed": 0}, {}, 0)
    return [
        TrackerThread(name, tracker, run, lambda step: step % every == 0)
        for name, tracker in all_trackers(job.path).items()
    ]


def measured(num_steps: int, every: int) -> tuple[float, float]:
    """Returns the median seconds per step and the median seconds of the hook's calls per step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = JobDir(folder)
        with (
            JsonLinesWriter(job.metrics_jsonl, -1) as writer,
            Trackers(threads_in(job, every), job) as trackers,
        ):
            trackers.resume_from(0)
            if every:
                time.sleep(20)  # Wait until the trackers have imported W&B and MLflow.
            seconds, calls = [], []
            for step in range(1, num_steps + 1):
                began = time.perf_counter()
                time.sleep(STEP_SECONDS)
                line = {"step": step, **dict.fromkeys(NAMES, step / 7)}
                writer.write(line)
                called = time.perf_counter()
                trackers.log_step(step, line)
                trackers.forward_notes(print)
                ended = time.perf_counter()
                seconds.append(ended - began)
                calls.append(ended - called)
        return statistics.median(seconds), statistics.median(calls)


def main() -> None:
    """Prints a line for each setting."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--steps", type=int, default=500)
    num_steps = options.parse_args().steps
    base, _ = measured(num_steps, 0)
    print(f"no trackers: {1000 * base:.3f} ms per step")
    for every in (1, 50):
        step, call = measured(num_steps, every)
        print(
            f"five trackers, every {every}: {1000 * step:.3f} ms per step "
            f"({100 * (step / base - 1):+.2f}%), including {1e6 * call:.1f} us for the hook's "
            f"calls ({100 * call / STEP_SECONDS:.3f}% of 10 ms)"
        )


if __name__ == "__main__":
    main()
