"""Compares a job on two processes with four devices each with a job on one process with eight.

    python benchmarks/demo_multiprocess.py [DIRECTORY]

The script prints the largest difference between the losses. `make demo-multiprocess` runs it.
"""

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT))

from praxis_lite.job.local_directory import local_directory  # noqa: E402

EXPERIMENT = "--exp=lm.Synthetic"
SETTINGS = ["--set", "run.num_train_steps=40", "run.checkpoints.every_steps=20"]


def main() -> None:
    """Runs both jobs and prints their results."""
    folder = local_directory(
        sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="praxis_lite_")
    )
    jobs = {"two processes of 4 devices": folder / "two", "one process of 8": folder / "one"}
    for (title, job), count in zip(jobs.items(), (2, 1), strict=True):
        if (job / "config.json").is_file():  # Left over from an earlier run.
            shutil.rmtree(job)
        began = time.perf_counter()
        run([EXPERIMENT, f"--job_log_dir={job}", *SETTINGS], count)
        run(["--mode=eval", f"--job_log_dir={job}"], count)
        print(f"{title}: trained and evaluated in {time.perf_counter() - began:.0f} s: {job}\n")
    two, item = jobs.values()
    for name in ("metrics.jsonl", "eval_metrics.jsonl"):
        ours, theirs = losses(two / name), losses(item / name)
        assert len(ours) == len(theirs), name
        max_difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        print(
            f"{name}: {len(ours)} losses from {ours[0]:.6f} to {ours[-1]:.6f}; largest difference "
            f"between two processes and one: {max_difference:.1e}"
        )
        # gloo sums across processes in a different order than XLA in one process.
        assert max_difference < 1e-5, "training with two processes differs from training with one"


def run(argv: Sequence[str], count: int) -> None:
    """Runs main.py in `count` processes; prints the first process's output without Gloo's lines."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"--coordinator=127.0.0.1:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                str(CHECKOUT / "main.py"),
                *argv,
                *(
                    [coordinator, f"--num_processes={count}", f"--process_id={k}"]
                    if count > 1
                    else []
                ),
            ],
            cwd=CHECKOUT,
            text=True,
            stdout=subprocess.PIPE,
        )
        for k in range(count)
    ]
    for line in processes[0].stdout:
        if "[Gloo]" not in line:
            print(f"  {line}", end="", flush=True)
    codes = [process.wait() for process in processes]
    if any(codes):
        sys.exit(f"{argv} ended with {codes}")


def losses(path: Path) -> list[float]:
    """Returns the losses in a metrics file."""
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main()
