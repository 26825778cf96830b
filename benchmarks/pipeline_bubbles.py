"""What a pipeline's bubbles and hand-overs cost: the formula, the compiled program, the clock.

`python benchmarks/pipeline_bubbles.py` prints per schedule, in one run: ticks and the share of
bubbles by formula, the same from the loops of the compiled train step, the collectives of a tick,
and the median step time over that of a Repeat on the same mesh, whose batch is split over the stage
axis as well. Simulated devices share the cores, so that idle stages take time from the others:
1 / (1 - share) is what the bubbles alone would make of the last.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from praxis_lite.core import MeshConfig, make_mesh, simulate_devices  # noqa: E402

simulate_devices(8)

import fiddle as fdl  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from praxis_lite.core import (  # noqa: E402
    Learner,
    Partitioner,
)
from praxis_lite.layers import (  # noqa: E402
    SHARDING_PRESETS,
    Pipeline,
    Repeat,
    TransformerLm,
    set_sharding_params,
)
from praxis_lite.layers.stacking.pipelining.schedules import Schedule  # noqa: E402
from praxis_lite.tasks.language_model import LanguageModelTask  # noqa: E402
from praxis_lite.tools.explain import hlo, hlo_text  # noqa: E402

NUM_STAGES, BATCH, TIME = 4, 32, 32
SIZES = dict(vocab_size=64, model_dims=64, hidden_dims=256, num_heads=4, num_layers=8)
MESH = MeshConfig(ici_mesh_shape=(NUM_STAGES, 2, 1), axis_names=("stage", "data", "mdl"))
SCHEDULES = {
    "GPipe, 4 microbatches": dict(num_microbatches=4),
    "GPipe, 8 microbatches": dict(num_microbatches=8),
    "circular, 2 repeats, 4 microbatches": dict(num_microbatches=4, circular_repeat=2),
    "GPipe, 8 microbatches streamed": dict(num_microbatches=8, stream_io=True),
}


def partitioner(stack: fdl.Partial, batch_axes: tuple[str, ...]) -> Partitioner:
    """Returns a language model's steps; outside the stack all have the same layout."""
    lm = fdl.Partial(TransformerLm, **SIZES, stacked_transformer_tpl=stack)
    set_sharding_params(lm, {**SHARDING_PRESETS["megatron"], "batch": batch_axes})
    batch = ("stage", "data")
    lm.softmax_tpl.activation_split_dims_mapping = (batch, None, "mdl")
    lm.softmax_tpl.lookup_split_dims_mapping = (batch, None, None)
    task = fdl.Config(
        LanguageModelTask,
        model=lm,
        learner=fdl.Config(Learner, optimizer=fdl.Partial(optax.sgd), learning_rate=1e-2),
        inputs_split_mapping={"map_2d": (batch, None)},
    )
    return Partitioner(fdl.build(task), make_mesh(MESH))


class Step:
    """A compiled train step with its state, timed a call at a time."""

    def __init__(self, partitioner: Partitioner):
        tokens = np.random.default_rng(0).integers(64, size=(BATCH, TIME + 1), dtype=np.int32)
        weights = np.ones((BATCH, TIME), np.float32)
        batch = {"ids": tokens[:, :-1], "labels": tokens[:, 1:], "weights": weights}
        spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
        self.compiled = partitioner.train_step.lower(spec).compile()
        self._partitioner, self._key = partitioner, partitioner.key(0)
        self._state = partitioner.init(self._key)
        self._batch = partitioner.global_batch(batch)
        self.times: list[float] = []

    def run(self) -> float:
        """Runs a step; returns its loss."""
        start = time.perf_counter()
        self._state, outputs = self._partitioner.train_step(self._state, self._batch, self._key)
        jax.block_until_ready((self._state, outputs))
        self.times.append(time.perf_counter() - start)
        return float(outputs["metrics"]["loss"][0])


def pipelined(settings: dict[str, Any]) -> fdl.Partial:
    """Returns the config of a stack on stages."""
    return fdl.Partial(Pipeline, num_stages=NUM_STAGES, **settings)


def loop_ticks(compiled: jax.stages.Compiled) -> int:
    """Returns how often the longest of the program's outermost loops runs."""
    program = hlo_text.parse(compiled)
    return max(
        hlo_text.trip_count(program, site.computation, site.instruction) or 0
        for site in hlo_text.executed(program)
        if site.instruction.opcode == "while" and not site.scope
    )


def per_tick(compiled: jax.stages.Compiled, num_ticks: int) -> str:
    """Returns the collectives in the loops over ticks, forward and backward, per tick."""
    in_loops = [c for c in hlo.collectives(compiled) if c.count and c.count % num_ticks == 0]
    totals = hlo.summarise(in_loops)
    return ", ".join(f"{n / num_ticks:g} {kind}" for kind, (n, _) in totals.items())


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_steps", type=int, default=20)
    args = parser.parse_args()
    repeat = Step(partitioner(fdl.Partial(Repeat), ("stage", "data")))
    steps = {name: Step(partitioner(pipelined(s), ("data",))) for name, s in SCHEDULES.items()}
    losses = {}
    for index in range(args.num_steps):
        # In turns, so that a busy machine slows all.
        for name, step in [("Repeat", repeat), *steps.items()]:
            losses[name] = step.run()
        print(f"  step {index + 1}/{args.num_steps}", file=sys.stderr)
    print(f"losses after {args.num_steps} steps: "
          f"{min(losses.values()):.5f} to {max(losses.values()):.5f}\n")
    repeat_time = statistics.median(repeat.times[2:])
    for name, settings in SCHEDULES.items():
        sizes = {key: value for key, value in settings.items() if key != "stream_io"}
        schedule, step = Schedule(NUM_STAGES, **sizes), steps[name]
        num_ticks = loop_ticks(step.compiled)
        busy = schedule.num_microbatches * schedule.circular_repeat
        ratio = statistics.median(step.times[2:]) / repeat_time
        print(f"{name}\n"
              f"  ticks                  formula {schedule.num_ticks}, compiled {num_ticks}\n"
              f"  share of bubbles       formula {schedule.bubble_share:.4f}, "
              f"compiled {1 - busy / num_ticks:.4f}\n"
              f"  forward + backward     {per_tick(step.compiled, num_ticks)} a tick\n"
              f"  step time / Repeat's   {ratio:.2f} (bubbles alone "
              f"{1 / (1 - schedule.bubble_share):.2f})")


if __name__ == "__main__":
    main()
