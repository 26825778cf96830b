"""Compares the loss of lm.PyDocs under each quantization recipe with the loss in bfloat16.

    python benchmarks/quantized_training.py [--steps 120] [--full-batch] [--settings PATH=VALUE ...]

The script trains the experiment once with each recipe, on one simulated device. It prints the mean
training loss over the last tenth of the steps and the final held-out loss, and exits with status 1
if any loss is more than 1% above the loss in bfloat16. A step has 256 tokens instead of the
experiment's 2,048, because int8 is slow on CPUs and float8 is emulated. Step times are therefore
meaningless.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ["JAX_NUM_CPU_DEVICES"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from praxis_lite.api import train  # noqa: E402
from praxis_lite.layers import QUANTIZATION_RECIPES, QuantizationRule  # noqa: E402

LIMIT = 0.01
FEW_TOKENS = [
    "datasets.train.batch_size=4",
    "datasets.train.seq_len=64",
    "datasets.heldout.seq_len=64",
    "run.evaluation.max_batches=4",
]


def losses_of(recipe: str | None, steps: int, folder: Path, settings: list[str]) -> tuple:
    """Trains with a recipe; returns the final training loss, the held-out loss and the seconds."""
    start = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        train(
            "lm.PyDocs",
            folder,
            settings=[
                f"task.quantization={recipe}",
                "task.model.fprop_dtype=bfloat16",
                "mesh.ici_mesh_shape=1,1,1",
                f"run.num_train_steps={steps}",
                f"run.evaluation.every_steps={steps}",
                f"run.checkpoints.every_steps={steps}",
                *settings,
            ],
        )
    trained = [line["loss"] for line in _lines(folder / "metrics.jsonl") if "loss" in line]
    heldout = [line["loss"] for line in _lines(folder / "eval_metrics.jsonl")][-1]
    trained = trained[-max(steps // 10, 1) :]
    return statistics.mean(trained), heldout, time.perf_counter() - start


def _lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def main() -> int:
    """Prints a line for each recipe; returns 1 if any recipe exceeds the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=[
            name
            for name, rule in QUANTIZATION_RECIPES.items()
            if isinstance(rule, QuantizationRule)
        ],
    )
    parser.add_argument("--full-batch", action="store_true", help="use the experiment's batch size")
    parser.add_argument("--settings", nargs="*", default=[], help="as in --set, for all runs")
    options = parser.parse_args()
    print(f"{'recipe':<20}{'training':>10}{'':>9}{'held out':>10}{'':>9}{'seconds':>9}")
    settings = [*([] if options.full_batch else FEW_TOKENS), *options.settings]
    base, worst = None, 0.0
    with tempfile.TemporaryDirectory() as root:
        for recipe in (None, *options.recipes):
            *losses, seconds = losses_of(recipe, options.steps, Path(root) / str(recipe), settings)
            base = base or losses
            changes = [loss / of_base - 1 for loss, of_base in zip(losses, base, strict=True)]
            worst = max(worst, *changes)
            pairs = zip(losses, changes, strict=True)
            shown = "".join(f"{loss:>10.4f}{change:>+9.2%}" for loss, change in pairs)
            print(f"{recipe or 'bfloat16':<20}{shown}{seconds:>9.0f}", flush=True)
    print(f"largest change {worst:+.2%}, allowed {LIMIT:+.0%}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
