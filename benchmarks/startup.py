"""What it costs to start: importing the library, and launching a job up to its first step.

`python benchmarks/startup.py` prints CPU seconds (user and system, of the whole process, the least
of several runs) and ratios measured in one run. The job is lm.Synthetic, two layers on a mesh of
eight simulated devices, launched as `main.py` launches it; cold starts with an empty compilation
cache, warm with the one that the cold start left.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PEERS = "import jax, flax.nnx, optax, orbax.checkpoint"
IMPORTS = {
    "import praxis_lite": "import praxis_lite",
    "all that a training job imports": (
        "import praxis_lite.main, praxis_lite.core.partitioner.partitioner, "
        "praxis_lite.run.checkpoints.checkpoints, praxis_lite.run.trainer.trainer, "
        "praxis_lite.run.config.text, praxis_lite.experiments.lm"
    ),
}
# Stops the job when its first step's metrics have reached the host.
UNTIL_FIRST_STEP = """
import os, sys
from praxis_lite.run.trainer.metrics.progress import ProgressLine
ProgressLine.update = lambda *args, **kwargs: os._exit(0)
from praxis_lite.main import main
main(["--exp=lm.Synthetic", "--job_log_dir=" + sys.argv[1]])
"""
# Real Pax, a two-layer model, on such a machine at its quietest; the goal is a third of it.
PAX_CPU_SECONDS = 17.0


def cpu_seconds(code: str, *args: str, cache: str | None = None) -> float:
    """Returns the user and system seconds of `python -c code`, which must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if cache is not None:
        environment["JAX_COMPILATION_CACHE_DIR"] = cache
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", code, *args], check=True, env=environment, capture_output=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def launch(cache: str) -> float:
    """Returns the CPU seconds of a new job up to its first step, compiled programs in `cache`."""
    with tempfile.TemporaryDirectory() as job_log_dir:
        return cpu_seconds(UNTIL_FIRST_STEP, job_log_dir, cache=cache)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_runs", type=int, default=5)
    num_runs = parser.parse_args().num_runs
    cpu_seconds(PEERS)  # Reads everything from disk once.
    peers = min(cpu_seconds(PEERS) for _ in range(num_runs))
    print(f"{'':<44}{'CPU s':>8}{'ratio':>8}{'goal':>8}")
    print(f"{'import jax, flax, optax, orbax':<44}{peers:>8.2f}")
    for name, code in IMPORTS.items():
        seconds = min(cpu_seconds(code) for _ in range(num_runs))
        print(f"{name:<44}{seconds:>8.2f}{seconds / peers:>8.2f}{1.1:>8.2f}")
    cold, warm = [], []
    for _ in range(num_runs):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(launch(cache))
            warm.append(launch(cache))
    print(f"\n{'':<44}{'CPU s':>8}{'/ Pax':>8}{'goal':>8}")
    for name, seconds in (("cold", min(cold)), ("warm", min(warm))):
        name = f"launch to the end of the first step, {name}"
        print(f"{name:<44}{seconds:>8.2f}{seconds / PAX_CPU_SECONDS:>8.2f}{1 / 3:>8.2f}")


if __name__ == "__main__":
    main()
