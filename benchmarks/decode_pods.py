"""Predicts the time per decoded token of Llama-2 7B on TPU pods, without the hardware.

    pip install libtpu==0.0.51
    python benchmarks/decode_pods.py --row v5e:2x4 v5p:2x2x1 --batch 1 32    # [--layers N]

For each row, the script compiles the complete `Partitioner.decode_step` for prompts of 128 tokens
and 128 new tokens, with bfloat16 weights whose features are sharded over all chips (`megatron`). It
prints the plan's table, which compares the time per token with the time to read the weights and the
cache.
"""

import argparse
import dataclasses
import heapq
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import fiddle as fdl
import jax
import jax.numpy as jnp
import optax

from praxis_lite.core import Learner, MeshConfig, Partitioner, make_mesh
from praxis_lite.decode import Greedy
from praxis_lite.layers import (
    Embedding,
    FullSoftmax,
    Repeat,
    TransformerFeedForward,
    rotary_lm,
    set_sharding_params,
)
from praxis_lite.layers.whole_model.sharding_presets import SHARDING_PRESETS
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_tools.plan.job_on_topology import PLANNING_OPTIONS
from praxis_tools.plan.plan_text import decoding_table, plan_text
from praxis_tools.plan.predict import plan_step
from praxis_tools.plan.step_plan import StepPlan
from praxis_tools.plan.topology import Topology, topology_of


def partitioner_of(options: argparse.Namespace, topology: Topology) -> Partitioner:
    """Returns a Partitioner for Llama-2 7B on a mesh with all chips along `mdl`."""
    model = rotary_lm(
        vocab_size=32_000,
        model_dims=4096,
        hidden_dims=11_008,
        num_heads=32,
        dim_per_head=128,
        num_layers=options.layers,
        fprop_dtype=jnp.bfloat16,
        tr_fflayer_tpl=fdl.Partial(
            TransformerFeedForward, activation="silu", use_gated_activation=True, has_bias=False
        ),
        softmax_tpl=fdl.Partial(FullSoftmax, has_bias=False),
        separate_embedding_tpl=fdl.Partial(Embedding),
        stacked_transformer_tpl=fdl.Partial(Repeat),
    )
    preset = SHARDING_PRESETS["megatron"]
    task = LanguageModelTask(
        fdl.build(set_sharding_params(model, preset)),
        Learner(optimizer=optax.sgd, learning_rate=1.0),
        inputs_split_mapping={"map_1d": (preset["batch"],), "map_2d": (preset["batch"], None)},
        decoder=Greedy(max_decode_steps=options.new, eos_id=2, weights_dtype="activations"),
    )
    mesh = make_mesh(
        MeshConfig(ici_mesh_shape=(1, 1, len(topology.devices)), allow_split_physical_axes=True),
        topology.devices,
    )
    more = dict(item.split("=", 1) for item in options.compiler_option)
    compiler_options = PLANNING_OPTIONS.get(topology.chip.name, {}) | more
    return Partitioner(task, mesh, compiler_options={"tpu": compiler_options})


def planned(options: argparse.Namespace, name: str) -> list[StepPlan]:
    """Returns a plan for each batch size; optionally prints the most expensive instructions."""
    topology = topology_of(name)
    partitioner = partitioner_of(options, topology)
    plans = []
    for rows in options.batch:
        ids = jax.ShapeDtypeStruct((rows, options.prompt), jnp.int32)
        lengths = jax.ShapeDtypeStruct((rows,), jnp.int32)
        weights = jax.ShapeDtypeStruct((rows,), jnp.float32)
        batch = {"ids": ids, "prefix_lengths": lengths, "weights": weights}
        plan = plan_step(partitioner, partitioner.decode_step, batch, topology)
        if options.top:
            print(plan_text(plan))
            times = plan.timeline.instruction_seconds.items()
            for instruction, seconds in heapq.nlargest(options.top, times, key=lambda x: x[1]):
                print(f"  {seconds * 1e6:9.2f} us  {instruction}")
        # Free the executable, because it is large.
        plans.append(dataclasses.replace(plan, compiled=None))
    return plans


def main() -> None:
    """Prints a table for each row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", nargs="+", default=["v5e:2x4", "v5p:2x2x1"], help="topologies")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--new", type=int, default=128, help="tokens")
    parser.add_argument("--compiler-option", action="append", default=[], help="name=value")
    parser.add_argument("--top", type=int, default=0, help="costliest instructions to show")
    options = parser.parse_args()
    for name in options.row:
        print(f"\n{name}\n{decoding_table(planned(options, name))}", flush=True)


if __name__ == "__main__":
    main()
