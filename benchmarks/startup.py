"""Measures the CPU time to import the library and to launch a job up to its first step.

`python benchmarks/startup.py` prints CPU seconds (user and system time of the complete process, the
minimum of several runs) and ratios measured in a single run. The job is lm.Synthetic with two
layers on eight simulated devices, launched as in `main.py`. A cold start has an empty compilation
cache, and a warm start reuses its cache. A finished job has already completed all its steps. Plain
JAX is plain_jax_lm.py up to its first step, with a warm cache. Python's bytecode is cached as in an
installed package, even if PYTHONDONTWRITEBYTECODE is set.
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
        "praxis_lite.checkpoints.checkpoints, praxis_lite.trainer.training_loop, "
        "praxis_lite.config.config_json, praxis_lite.experiments.lm"
    ),
}
# Stops the job when the first step's metrics have reached the host.
UNTIL_FIRST_STEP = """
import os, sys
from praxis_lite.trainer.metrics.progress import ProgressLine
ProgressLine.update = lambda *args, **kwargs: os._exit(0)
from praxis_lite.main import main
main(["--exp=lm.Synthetic", "--job_log_dir=" + sys.argv[1]])
"""
FINISHED = """
import sys
from praxis_lite.main import main
main(["--exp=lm.Synthetic", "--job_log_dir=" + sys.argv[1], "--set", "run.num_train_steps=4"])
"""
# Stops when the loss of the first step has reached the host.
PLAIN_JAX = """
import os, sys
import jax
sys.path.insert(0, sys.argv[1])
import plain_jax_lm
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
plain_jax_lm.print = lambda *args: os._exit(0)
plain_jax_lm.main()
"""
# CPU time of Pax with a two-layer model on a similar idle machine; the goal is a third of this.
PAX_CPU_SECONDS = 17.0


def cpu_seconds(code: str, *args: str, bytecode: str, cache: str | None = None) -> float:
    """Returns the user and system CPU seconds of `python -c code`.

    Args:
      bytecode: Folder for compiled Python files.
      cache: Directory of the compilation cache, or None.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": bytecode}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if cache is not None:
        environment["XDG_CACHE_HOME"] = cache
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", code, *args], check=True, env=environment, capture_output=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_runs", type=int, default=5)
    num_runs = parser.parse_args().num_runs
    with tempfile.TemporaryDirectory() as folder:
        _print_table(num_runs, Path(folder))


def _print_table(num_runs: int, folder: Path) -> None:
    def seconds(code: str, *args: str, cache: str | None = None) -> float:
        return cpu_seconds(code, *args, bytecode=str(folder / "bytecode"), cache=cache)

    def launch(cache: str) -> float:
        return seconds(UNTIL_FIRST_STEP, tempfile.mkdtemp(dir=folder), cache=cache)

    for code in (PEERS, *IMPORTS.values()):
        seconds(code)  # Warm up the page cache.
    peers = min(seconds(PEERS) for _ in range(num_runs))
    print(f"{'':<44}{'CPU s':>8}{'ratio':>8}{'goal':>8}")
    print(f"{'import jax, flax, optax, orbax':<44}{peers:>8.2f}")
    for name, code in IMPORTS.items():
        least = min(seconds(code) for _ in range(num_runs))
        print(f"{name:<44}{least:>8.2f}{least / peers:>8.2f}{1.1:>8.2f}")

    warm_cache = tempfile.mkdtemp(dir=folder)
    finished_job, plain_cache = str(folder / "finished"), str(folder / "plain")
    launch(warm_cache)
    seconds(FINISHED, finished_job, cache=warm_cache)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = plain_cache
    times: dict[str, list[float]] = {name: [] for name in ("cold", "warm", "finished", "plain")}
    for turn in range(num_runs + 1):
        times["cold"].append(launch(tempfile.mkdtemp(dir=folder)))
        times["warm"].append(launch(warm_cache))
        times["finished"].append(seconds(FINISHED, finished_job, cache=warm_cache))
        plain = seconds(PLAIN_JAX, str(ROOT / "benchmarks"))
        if turn:  # The first turn compiles.
            times["plain"].append(plain)
    least = {name: min(values) for name, values in times.items()}
    print(f"\n{'':<44}{'CPU s':>8}{'/ Pax':>8}{'goal':>8}{'/ plain JAX':>13}")
    for name in ("cold", "warm"):
        row = f"launch to the end of the first step, {name}"
        print(
            f"{row:<44}{least[name]:>8.2f}{least[name] / PAX_CPU_SECONDS:>8.2f}{1 / 3:>8.2f}"
            f"{least[name] / least['plain']:>13.2f}"
        )
    ratio = least["finished"] / least["plain"]
    print(f"{'the same command on a finished job':<44}{least['finished']:>8.2f}{ratio:>29.2f}")
    print(f"{'plain JAX to its first step, warm':<44}{least['plain']:>8.2f}")


if __name__ == "__main__":
    main()
