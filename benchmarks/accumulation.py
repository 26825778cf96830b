"""Compares the time and memory of gradient accumulation with those of a full-batch step.

`python -m benchmarks.accumulation` prints the median step times, measured alternately in a single
run, and the temporary memory, matmul flops and collective bytes of the compiled steps. Several ways
to shard the state over the data axis are compared, with all-reduces inserted by the compiler and
with explicit collectives.
"""

import argparse
import functools
import statistics
from collections.abc import Sequence

import fiddle as fdl
import jax
import numpy as np
import optax

from benchmarks.step_overhead import Step, figures
from praxis_lite.core import (
    Learner,
    MeshConfig,
    Partitioner,
    make_mesh,
    simulate_devices,
)
from praxis_lite.core.collectives import ExplicitCollectives
from praxis_lite.experiments.lm import BATCH_OVER_DATA
from praxis_lite.layers import rotary_lm, set_sharding_params
from praxis_lite.tasks.language_model import LanguageModelTask

VOCAB_SIZE, BATCH, TIME = 256, 64, 64
NUM_MICROBATCHES = (1, 2, 4, 8)


# The arrays that are sharded over the data axis in addition to the mdl axis.
LAYOUTS = {
    "nothing": {"preset": "megatron"},
    "slots (ZeRO-1)": {"preset": "megatron", "slot_mesh_axes": ("data",)},
    "weights and slots": {"preset": "fsdp+tensor"},
    "nothing, explicit": {"preset": "megatron", "gradients": ExplicitCollectives()},
    "weights and slots, explicit": {"preset": "fsdp+tensor", "gradients": ExplicitCollectives()},
}


def partitioner_of(
    accumulation_steps: int,
    preset: str,
    slot_mesh_axes: Sequence[str] = (),
    gradients: ExplicitCollectives | None = None,
) -> Partitioner:
    """Returns a Partitioner for a small language model."""
    lm = rotary_lm(
        vocab_size=VOCAB_SIZE,
        model_dims=128,
        hidden_dims=512,
        num_heads=4,
        dim_per_head=32,
        num_layers=4,
    )
    learner = Learner(
        functools.partial(optax.adamw, b2=0.98),
        1e-3,
        clip_gradient_norm_to_value=1.0,
        gradient_accumulation_steps=accumulation_steps,
        slot_mesh_axes=slot_mesh_axes,
    )
    model = fdl.build(set_sharding_params(lm, preset))
    task = LanguageModelTask(model, learner, inputs_split_mapping=BATCH_OVER_DATA)
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 4, 2)))
    return Partitioner(task, mesh, gradients=gradients)


def random_batch() -> dict[str, np.ndarray]:
    """Returns a random batch with rows of unequal length; the same on every call."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(VOCAB_SIZE, size=(BATCH, TIME + 1), dtype=np.int32)
    is_token = np.arange(TIME) < rng.integers(1, TIME + 1, size=(BATCH, 1))
    return {"ids": tokens[:, :-1], "labels": tokens[:, 1:], "weights": is_token.astype(np.float32)}


def times(num_steps: int) -> list[float]:
    """Returns the median step time for each number of microbatches."""
    running = []
    for n in NUM_MICROBATCHES:
        partitioner = partitioner_of(n, **LAYOUTS["nothing"])
        key, batch = partitioner.key(0), partitioner.global_batch(random_batch())
        running.append(Step(partitioner.train_step, partitioner.init(key), batch, key))
    for index in range(num_steps):
        # Rotate the order, so that no step always runs after the same step.
        for step in running[index % len(running) :] + running[: index % len(running)]:
            step.run(lambda outputs: outputs["metrics"]["loss"][0])
    last = ", ".join(f"{step.losses[-1]:.6f}" for step in running)
    print(f"losses of the last step: {last}")
    warm = num_steps // 10
    return [statistics.median(step.step_times[warm:]) for step in running]


def main() -> None:
    """Prints both tables."""
    simulate_devices(8)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_steps", type=int, default=30)
    args = parser.parse_args()
    print(f"a batch of {BATCH} rows of {TIME} tokens")
    seconds = times(args.num_steps)
    print(f"{'microbatches':<16}{'seconds/step':>16}{'/ one batch':>14}")
    for n, second in zip(NUM_MICROBATCHES, seconds, strict=True):
        print(f"{n:<16}{second:>16.4f}{second / seconds[0]:>14.3f}")
    names = ("temporary memory", "matmul flops", "collective bytes")
    heads = "".join(f"{name:>20}{'/ one':>8}" for name in names)
    print(f"\n{'split over data':<28}{'microbatches':>14}{heads}")
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), random_batch())
    for layout, settings in LAYOUTS.items():
        for n in NUM_MICROBATCHES:
            result = figures(partitioner_of(n, **settings).train_step.lower(spec).compile())
            second = result if n == 1 else second
            row = "".join(f"{result[x]:>20,.6g}{result[x] / second[x]:>8.3f}" for x in names)
            print(f"{layout:<28}{n:>14}{row}", flush=True)


if __name__ == "__main__":
    main()
