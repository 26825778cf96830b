"""Measures how the time to set up a model grows with the model's number of weights.

`python -m benchmarks.growth_weights` prints the CPU seconds that a job needs before its first step,
for models with many small layers whose number doubles each time. It also prints the cost ratio of
the last doubling without the constant part, and the exponent of the growth: 1.0 means linear, 2.0
means quadratic. The measured stages are creating the `Partitioner`, and tracing and lowering the
initialization, the train step and the evaluation; for one model, computing the layout, saving and
restoring are also measured. XLA's compile time is excluded. `--largest=5000` checks the goal of
20 s for a `Partitioner` with 5,000 weights.
"""

import argparse
import functools
import gc
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.core import Learner, MeshConfig, Partitioner, Task, make_mesh, simulate_devices
from praxis_lite.layers import Repeat, rotary_lm
from praxis_lite.models import FunctionModel, LinenModel
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_lite.tasks.loss import LossTask
from praxis_lite.trainer.layout_table import layout_json, layout_table

GOAL = 2.1  # With twice the work, the cost may grow at most by this factor.
DIMS, ROWS = 4, 8
XY = {name: jax.ShapeDtypeStruct((ROWS, DIMS), jnp.float32) for name in ("x", "y")}
TOKENS = {
    name: jax.ShapeDtypeStruct((ROWS, 16), dtype)
    for name, dtype in (
        ("ids", "int32"),
        ("labels", "int32"),
        ("weights", "float32"),
        ("segment_ids", "int32"),
        ("segment_pos", "int32"),
    )
}
ADAM = Learner(optax.adam, 1e-3)


class InARow(nnx.Module):
    """A sequence of small layers, initialized from the same RNG streams."""

    def __init__(self, layer: Callable[..., nnx.Module], num_layers: int, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(DIMS, DIMS, use_bias=False, rngs=rngs)
        self.layers = nnx.List([layer(rngs=rngs) for _ in range(num_layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


class LinenInARow(linen.Module):
    """A sequence of small Linen layers with one weight each."""

    num_layers: int

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.num_layers):
            x = linen.Dense(DIMS, use_bias=False)(x)
        return x


def squared_error(model: Callable[..., jax.Array], inputs: Any, key: Any = None) -> jax.Array:
    """Returns the mean squared error of the model."""
    return jnp.mean((model(inputs["x"]) - inputs["y"]) ** 2)


def drawn(key: jax.Array, num_weights: int) -> list[jax.Array]:
    """Initializes the weights of a model of plain functions."""
    return [jax.random.normal(item, (DIMS, DIMS)) for item in jax.random.split(key, num_weights)]


def error_of_products(params: list[jax.Array], inputs: Any, key: Any = None) -> jax.Array:
    """Returns the mean squared error of the product of x and all weights."""
    return squared_error(lambda x: functools.reduce(jnp.matmul, params, x), inputs)


def of_nnx(layer: Callable[..., nnx.Module], learner: Learner, num_layers: int) -> Task:
    """Returns a task with a Flax NNX model."""
    return LossTask(functools.partial(InARow, layer, num_layers), squared_error, learner)


def language_model(num_layers: int) -> Task:
    """Returns an unrolled language model; each layer has nine weights."""
    lm = rotary_lm(
        num_layers=num_layers,
        vocab_size=37,
        model_dims=8,
        hidden_dims=16,
        num_heads=2,
        dim_per_head=4,
    )
    lm.stacked_transformer_tpl = fdl.Partial(Repeat, unroll=True)
    return LanguageModelTask(fdl.build(lm), ADAM)


def clipped_adam(learning_rate: float) -> optax.GradientTransformation:
    """Returns an optimizer in which the update of a weight depends on all other weights."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))


LINEAR = functools.partial(nnx.Linear, DIMS, DIMS, use_bias=False)
# Maps each model to (function from size to task, shapes of batches, number of weights per size).
MODELS: dict[str, tuple[Callable[[int], Task], Any, int]] = {
    "nnx": (functools.partial(of_nnx, LINEAR, ADAM), XY, 1),
    "nnx, norm of all": (
        functools.partial(of_nnx, LINEAR, Learner(clipped_adam, 1e-3)),
        XY,
        1,
    ),
    "nnx, batch norms": (
        functools.partial(of_nnx, functools.partial(nnx.BatchNorm, DIMS), ADAM),
        XY,
        4,
    ),
    "nnx, dropout": (functools.partial(of_nnx, functools.partial(nnx.Dropout, 0.1), ADAM), XY, 1),
    "own layers, unrolled": (language_model, TOKENS, 10),
    "linen": (
        lambda num_layers: LossTask(
            LinenModel(LinenInARow(num_layers), {"x": (ROWS, DIMS)}), squared_error, ADAM
        ),
        XY,
        1,
    ),
    "functions": (
        lambda num_weights: LossTask(
            FunctionModel(functools.partial(drawn, num_weights=num_weights)),
            error_of_products,
            ADAM,
        ),
        XY,
        1,
    ),
}


def report(name: str, sizes: Sequence[int], work: Callable[[int], object]) -> bool:
    """Prints the CPU seconds of `work(size)` for each size, and their growth.

    Args:
      name: Name of the measurement, printed on each line.
      sizes: Three or more sizes, each twice the previous size.
      work: Function that does the measured work once for a given size.

    Returns:
      Whether the cost ratio of the last doubling is at most `GOAL`.
    """
    seconds = []
    for size in sizes:
        start = time.process_time()
        work(size)
        seconds.append(time.process_time() - start)
        print(f"{name}: {size:>9,}  {seconds[-1]:9.4f} s", flush=True)
    # The constant part is the intercept of the line through the two smallest sizes.
    constant = max(0.0, 2 * seconds[0] - seconds[1])
    noise = max(1e-6, 0.05 * constant)  # A cost that does not grow has a ratio of 1.
    growth = [
        max(after - constant, noise) / max(before - constant, noise)
        for before, after in itertools.pairwise(seconds)
    ]
    exponent = statistics.median(math.log2(ratio) for ratio in growth)
    print(
        f"{name}: the last doubling costs {growth[-1]:.2f} times as much (goal {GOAL}); "
        f"exponent {exponent:.2f}"
    )
    return growth[-1] <= GOAL


def measure(name: str, sizes: list[int], *, has_files: bool) -> bool:
    """Prints the growth of each stage and returns whether all stages meet the goal."""
    task_of, batch, weights_per_layer = MODELS[name]
    sizes = [size // weights_per_layer for size in sizes]
    mesh, made, states = make_mesh(MeshConfig(ici_mesh_shape=(1, 1, 1))), {}, {}

    def alone(work: Callable[[int], object]) -> Callable[[int], object]:
        def call(size: int) -> None:
            # Otherwise Python's garbage collector would traverse objects left over from the
            # previous sizes.
            gc.freeze()
            work(size)

        return call

    def partitioner(size: int) -> None:
        made[size] = Partitioner(task_of(size), mesh)

    def init(size: int) -> None:
        key = made[size].key(0)
        made[size].init.trace(key).lower()

    def layout(size: int) -> None:
        layout_table(made[size].layout), layout_json(made[size].layout)

    def save(size: int) -> None:
        with Checkpoints(f"{folder}/{size}", saving=SaveSettings()) as checkpoints:
            checkpoints.save(1, states[size], made[size].layout)

    def restore(size: int) -> None:
        with Checkpoints(f"{folder}/{size}") as checkpoints:
            checkpoints.restore(made[size].layout, mesh)

    partitioner(2), init(2)  # Exclude one-time costs.
    stages = {
        "Partitioner()": partitioner,
        "init: trace, lower": init,
        "train step: trace, lower": lambda size: made[size].train_step.lower(batch),
        "evaluation: trace, lower": lambda size: made[size].eval_step.lower(batch),
    }
    with tempfile.TemporaryDirectory() as folder:
        if has_files:
            stages |= {"layout.txt, layout.json": layout, "save": save, "restore": restore}
        are_good = []
        for stage, work in stages.items():
            if stage == "save":
                for size in sizes:
                    shapes = made[size].layout.abstract(mesh)
                    states[size] = jax.tree.map(
                        lambda x: jax.device_put(np.ones(x.shape, x.dtype), x.sharding), shapes
                    )
            are_good.append(report(f"{name}: {stage}", sizes, alone(work)))
    return all(are_good)


def main() -> None:
    """Prints the tables."""
    simulate_devices(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--largest", type=int, default=2000, help="maximum number of weights")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    args = parser.parse_args()
    sizes = [args.largest // 2**i for i in (3, 2, 1, 0)]
    are_good = [measure(name, sizes, has_files=name == "functions") for name in args.models]
    sys.exit(0 if all(are_good) else 1)


if __name__ == "__main__":
    main()
