"""Measures the time to generate a report on long jobs, and the size of the report's page.

The script writes five jobs of 100,000 steps with the metrics of a language model. Then it
alternates between `--mode=report --html` for all jobs, in a separate process, and `json.loads` of
all lines.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.metrics.json_lines import json_line
from praxis_tools.report.job_reader import named_jobs
from praxis_tools.report.report import ReportReader

SECONDS_GOAL, BYTES_GOAL = 3.0, 5_000_000


def written(folder: Path, seed: int, num_steps: int) -> Path:
    """Writes metrics of a job that evaluates every 1% of its steps; returns its directory."""
    job, rng = JobDir(folder), np.random.default_rng(seed)
    folder.mkdir()
    job.write_config('{"experiment": "benchmark.Job"}', [f"run.seed={seed}", "run.same=1"])
    steps = np.arange(1, num_steps + 1)
    loss = 2 + 3 / np.sqrt(steps) + rng.normal(0, 0.05, num_steps)
    seconds = 0.01 + rng.exponential(0.001, num_steps)
    of_float32 = {
        "loss": loss,
        "accuracy": 1 / (1 + loss),
        "bits_per_byte": loss / np.log(2),
        "grad_norm": rng.lognormal(0, 0.3, num_steps),
        "learning_rate": 1e-3 / np.sqrt(steps),
    }
    columns = {name: values.astype(np.float32) for name, values in of_float32.items()} | {
        "num_skipped_in_a_row": 0 * steps,
        "num_skipped_steps": 0 * steps,
        "step_time": seconds,
        "input_time": seconds * 0.03,
        "dispatch_time": seconds * 0.05,
        "device_time": seconds * 0.9,
        "save_time": 0.0 * steps,
        "evaluation_time": 0.0 * steps,
        "tokens_per_second": 65_536 / seconds,
        "mfu": 0.45 - seconds,
        "hfu": 0.55 - seconds,
    }
    names, rows = list(columns), zip(*(column.tolist() for column in columns.values()), strict=True)
    with job.metrics_jsonl.open("w") as file:
        for step, row in enumerate(rows, start=1):
            file.write(json_line({"step": step, **dict(zip(names, row, strict=True))}))
    every = max(1, num_steps // 100)
    job.eval_metrics_jsonl.write_text(
        "".join(
            json_line({"step": step, "dataset": "heldout", "loss": float(loss[step - 1])})
            for step in range(every, num_steps + 1, every)
        )
    )
    return folder


def main() -> None:
    """Prints the seconds, the ratio to the time of json.loads, and the page's size in bytes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_jobs", type=int, default=5)
    parser.add_argument("--num_steps", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            written(Path(folder, f"job{seed}"), seed, args.num_steps)
            for seed in range(args.num_jobs)
        ]
        html, command, loads = Path(folder, "report.html"), [], []
        for _ in range(args.repeats):
            start, cpu = time.perf_counter(), _cpu_seconds(resource.RUSAGE_CHILDREN)
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "praxis_lite",
                    "--mode=report",
                    f"--html={html}",
                    *jobs,
                ],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            cpu = _cpu_seconds(resource.RUSAGE_CHILDREN) - cpu
            command.append((time.perf_counter() - start, cpu))
            start, cpu = time.perf_counter(), _cpu_seconds(resource.RUSAGE_SELF)
            for job in jobs:
                with JobDir(job).metrics_jsonl.open() as file:
                    [json.loads(line) for line in file]
            cpu = _cpu_seconds(resource.RUSAGE_SELF) - cpu
            loads.append((time.perf_counter() - start, cpu))
        reader = ReportReader(named_jobs(list(map(str, jobs))))
        reader.read()
        start = _cpu_seconds(resource.RUSAGE_SELF)
        reader.read().page()
        again = _cpu_seconds(resource.RUSAGE_SELF) - start
        size = html.stat().st_size
    print(f"{args.num_jobs} jobs of {args.num_steps:,} steps, medians of {args.repeats}")
    print(f"{'':<30}{'seconds':>10}{'of CPU':>10}{'goal':>8}")
    (seconds, cpu), (plain, plain_cpu) = map(_medians, (command, loads))
    print(f"{'the command, with its page':<30}{seconds:>10.2f}{cpu:>10.2f}{SECONDS_GOAL:>8.1f}")
    print(f"{'json.loads of all lines':<30}{plain:>10.2f}{plain_cpu:>10.2f}")
    print(f"{'ratio':<30}{seconds / plain:>10.2f}{cpu / plain_cpu:>10.2f}")
    print(f"{'each additional page with --follow':<30}{'':>10}{again:>10.2f}")
    print(f"{'MB of the page':<30}{size / 1e6:>10.2f}{'':>10}{BYTES_GOAL / 1e6:>8.1f}")


def _cpu_seconds(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def _medians(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    first, second = map(statistics.median, zip(*pairs, strict=True))
    return first, second


if __name__ == "__main__":
    main()
