"""Measures how the cost of launching a job grows with the length of its metrics.jsonl.

    python -m benchmarks.growth_metrics_log

When a job resumes three steps before the last step, it moves the lines for these steps to a
different file, searches for the previous losses, and plots the loss curve. The goal is a constant
cost.
"""

import json
import resource
import sys
import tempfile
from pathlib import Path

from benchmarks.growth import report
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.job_history import losses_before
from praxis_lite.trainer.metrics.json_lines import JsonLinesWriter
from praxis_lite.trainer.metrics.loss_curve import plot_loss_curve

SIZES = (50_000, 100_000, 200_000, 400_000)
NUM_MADE_AGAIN = 3


def line_of(step: int) -> dict[str, float]:
    """Returns a line of metrics.jsonl for a job with eight metrics."""
    numbers = {f"metric_{number}": step / (number + 7) for number in range(8)}
    return {"step": step, "loss": 7 / step, "learning_rate": 1e-3, "step_time": 0.1, **numbers}


def main() -> None:
    """Prints the growth of a launch's time and memory."""
    with tempfile.TemporaryDirectory() as folder:
        for size in SIZES:
            job = JobDir(Path(folder, str(size)))
            job.path.mkdir()
            with job.metrics_jsonl.open("w") as file:
                file.writelines(json.dumps(line_of(step)) + "\n" for step in range(1, size + 1))

        def start(size: int) -> None:
            job = JobDir(Path(folder, str(size)))
            with JsonLinesWriter(job.metrics_jsonl, size - NUM_MADE_AGAIN) as writer:
                for step in range(size - NUM_MADE_AGAIN + 1, size + 1):
                    writer.write(line_of(step))
            losses_before(job)
            plot_loss_curve(job, "")

        start(SIZES[0])  # Imports matplotlib.
        is_good = report("a start by lines of metrics.jsonl", SIZES, start, repeats=2)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"peak memory of the process: {peak:,.0f} MB")
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
