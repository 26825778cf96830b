"""Compares formulas for pipeline bubbles with compiled and measured train steps.

For each schedule, `python -m benchmarks.pipeline_bubbles` prints the numbers of ticks in its loops
according to the formula and in the compiled step, the fraction of bubbles, the collective-permutes
in the loops, the temporary memory per device, and the median step time. The time is relative to a
Repeat on the same mesh, which also shards its batch over the stage axis. Simulated devices share
the cores, so even idle stages slow down the others. Bubbles alone would multiply the step time by
1 / (1 - fraction).
"""

import argparse
import statistics
import sys
import time
from typing import Any

import fiddle as fdl
import jax
import numpy as np
import optax

from praxis_lite.core import (
    Learner,
    MeshConfig,
    Partitioner,
    make_mesh,
    simulate_devices,
)
from praxis_lite.layers import (
    SHARDING_PRESETS,
    OneForwardOneBackward,
    Pipeline,
    Repeat,
    TransformerLm,
    set_sharding_params,
)
from praxis_lite.layers.stacking.pipelining.pipeline_schedules import (
    InterleavedSchedule,
    Schedule,
)
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_tools.explain import hlo, hlo_runs, hlo_text

NUM_STAGES, BATCH, TIME = 4, 256, 32
SIZES = dict(vocab_size=64, model_dims=64, hidden_dims=256, num_heads=4, num_layers=8)
MESH = MeshConfig(ici_mesh_shape=(NUM_STAGES, 2, 1), axis_names=("stage", "data", "mdl"))
SCHEDULES = {
    "GPipe, 4 microbatches": dict(num_microbatches=4),
    "GPipe, 8 microbatches": dict(num_microbatches=8),
    "circular, 2 repeats, 4 microbatches": dict(num_microbatches=4, circular_repeat=2),
    "GPipe, 8 microbatches streamed": dict(num_microbatches=8, stream_io=True),
    "GPipe, 8 microbatches, split": dict(num_microbatches=8, split_backward=True),
    "circular, 2 repeats, 8 microbatches, split": dict(
        num_microbatches=8, circular_repeat=2, split_backward=True
    ),
    "1F1B, 8 microbatches": dict(num_microbatches=8, one_forward=True),
    "1F1B, 8 microbatches, split": dict(num_microbatches=8, one_forward=True, split_backward=True),
    "1F1B, 2 repeats, 8 microbatches, split": dict(
        num_microbatches=8, circular_repeat=2, one_forward=True, split_backward=True
    ),
    "GPipe, 32 microbatches": dict(num_microbatches=32),
    "1F1B, 32 microbatches, split": dict(
        num_microbatches=32, one_forward=True, split_backward=True
    ),
}
# Times per tick: forward; recomputed forward and input gradients; weight gradients.
TIMES = 1.0, 2.0, 1.0


def partitioner(
    stack: fdl.Partial, batch_axes: tuple[str, ...], gradients: OneForwardOneBackward | None = None
) -> Partitioner:
    """Returns a Partitioner for a language model; only the layout of the layer stack varies."""
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
    return Partitioner(fdl.build(task), make_mesh(MESH), gradients=gradients)


class Step:
    """A compiled train step and its state; each call is timed."""

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
        """Runs a step and returns its loss."""
        start = time.perf_counter()
        self._state, outputs = self._partitioner.train_step(self._state, self._batch, self._key)
        jax.block_until_ready((self._state, outputs))
        self.times.append(time.perf_counter() - start)
        return float(outputs["metrics"]["loss"][0])


def pipelined(one_forward: bool = False, **settings: Any) -> Partitioner:
    """Returns a Partitioner of a model whose layers are split into pipeline stages."""
    stack = fdl.Partial(Pipeline, num_stages=NUM_STAGES, **settings)
    return partitioner(stack, ("data",), OneForwardOneBackward() if one_forward else None)


def phases(
    num_microbatches: int,
    circular_repeat: int = 1,
    one_forward: bool = False,
    split_backward: bool = False,
    **_: Any,
) -> list[tuple[int, float]]:
    """Returns (number of ticks, time per tick) for each loop of a schedule, by formulas."""
    sizes = NUM_STAGES, num_microbatches, circular_repeat
    forward, input_grads, weight_grads = TIMES
    if one_forward:
        return [
            (len(ticks), sum(time for time, is_done in zip(TIMES, parts, strict=True) if is_done))
            for ticks, *parts in InterleavedSchedule(*sizes, split_backward).phases
        ]
    schedule = Schedule(*sizes)
    if not split_backward:
        return [(schedule.num_ticks, forward), (schedule.num_ticks, input_grads + weight_grads)]
    return [
        (schedule.num_ticks, forward),
        (NUM_STAGES - 1, input_grads),
        (schedule.num_weight_ticks, input_grads + weight_grads),
    ]


def loops(compiled: jax.stages.Compiled) -> list[int]:
    """Returns the trip counts of the outermost loops in a compiled step, in order of size."""
    program = hlo_text.parse(compiled)
    return sorted(
        hlo_runs.trip_count(program, site.computation, site.instruction) or 0
        for site in hlo_runs.executed(program)
        if site.instruction.opcode == "while" and not site.scope
    )


def num_permutes(compiled: jax.stages.Compiled) -> int:
    """Returns the number of collective-permutes that a step runs inside loops."""
    return sum(
        item.count
        for item in hlo.collectives(compiled)
        if item.kind == "collective-permute" and (item.count or 0) > 1
    )


def main() -> None:
    """Prints the table."""
    simulate_devices(8)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_steps", type=int, default=20)
    args = parser.parse_args()
    repeat = Step(partitioner(fdl.Partial(Repeat), ("stage", "data")))
    steps = {name: Step(pipelined(**s)) for name, s in SCHEDULES.items()}
    losses = {}
    for index in range(args.num_steps):
        # Take turns, so that other load on the machine affects all steps.
        for name, step in [("Repeat", repeat), *steps.items()]:
            losses[name] = step.run()
        print(f"  step {index + 1}/{args.num_steps}", file=sys.stderr)
    print(
        f"losses after {args.num_steps} steps: "
        f"{min(losses.values()):.5f} to {max(losses.values()):.5f}\n"
    )
    repeat_time = statistics.median(repeat.times[2:])
    for name, settings in SCHEDULES.items():
        step, by_formula = steps[name], phases(**settings)
        busy = settings["num_microbatches"] * settings.get("circular_repeat", 1) * sum(TIMES)
        share = 1 - busy / sum(number * time for number, time in by_formula)
        ticks = sorted(number for number, _ in by_formula if number > 1)
        ratio = statistics.median(step.times[2:]) / repeat_time
        memory = step.compiled.memory_analysis().temp_size_in_bytes / 2**20
        print(
            f"{name}\n"
            f"  ticks of loops         formula {ticks}, compiled {loops(step.compiled)}\n"
            f"  share of bubbles       {share:.4f}\n"
            f"  permutes in loops      {num_permutes(step.compiled)}\n"
            f"  temporary memory       {memory:.1f} MiB\n"
            f"  step time / Repeat's   {ratio:.2f} (bubbles alone {1 / (1 - share):.2f})"
        )


if __name__ == "__main__":
    main()
