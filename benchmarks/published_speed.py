"""Measures the training speed of GPT-2 (124M).

    python -m benchmarks.published_speed /tmp/speed          # on a GPU; takes less than 6 minutes

Writes speed.json and a trace of three steps to the directory. llm.c processes 463,000 tokens per
second on one H100 (10B tokens in 45 minutes on eight), and 145,000 on one A100 with 40 GB.
"""

import argparse
import importlib.metadata
import json
import time
from pathlib import Path
from typing import Any

import fiddle as fdl
import jax
import numpy as np

from praxis_lite.config.experiment_overrides import configured
from praxis_lite.core import Partitioner, make_mesh
from praxis_lite.experiments.published.speed import Gpt2

# Peak FLOP/s of dense bfloat16 matmuls, keyed by a part of the device's name.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}


def speed(settings: list[str], folder: Path, num_steps: int) -> dict[str, float]:
    """Returns tokens per second, model FLOPs per token and sizes, and writes a trace."""
    job = fdl.build(configured(Gpt2, settings))
    partitioner = Partitioner(job.task, make_mesh(job.mesh))
    key = partitioner.key(0)
    state = partitioner.init(key)
    batch = next(iter(job.datasets["train"].batches()))
    batch_size, block_size = batch["ids"].shape
    inputs = partitioner.global_batch(batch)

    def run(count: int) -> float:
        """Runs `count` steps, and returns the elapsed seconds."""
        nonlocal state
        start = time.perf_counter()
        for _ in range(count):
            state, _ = partitioner.train_step(state, inputs, key)
        jax.block_until_ready(state)
        return time.perf_counter() - start

    run(5)  # Compiles and warms up.
    tokens_per_second = num_steps * batch_size * block_size / run(num_steps)
    with jax.profiler.trace(str(folder / "trace")):
        run(3)
    leaves = list(partitioner.layout.select("mdl_vars").leaves())
    num_weights = sum(int(np.prod(leaf.shape)) for leaf in leaves)
    # 6 FLOPs per weight, plus the matmuls of attention (Chowdhery et al., arXiv:2204.02311).
    flops = 6 * num_weights + 12 * Gpt2.n_layer * Gpt2.n_embd * block_size
    sizes = {"batch_size": batch_size, "block_size": block_size, "num_steps": num_steps}
    return {"tokens_per_second": tokens_per_second, "flops_per_token": flops, **sizes}


def main() -> None:
    """Measures the speed, and prints and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num_steps", type=int, default=40)
    parser.add_argument("--set", nargs="*", default=[], help="settings, such as batch_size=32")
    args = parser.parse_args()
    device = jax.devices()[0].device_kind
    result: dict[str, Any] = {"device": device, "jax": importlib.metadata.version("jax")}
    result |= speed(args.set, args.folder, args.num_steps)
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in device), None)
    if peak is not None:
        result["mfu"] = result["tokens_per_second"] * result["flops_per_token"] / peak
    text = json.dumps(result, indent=2)
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "speed.json").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
