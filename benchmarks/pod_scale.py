"""Train steps of Llamas on pods, compiled for real TPU topologies on a machine without one.

    pip install libtpu                      # 0.0.51 with jax 0.10.2 for the figures of the peers
    python benchmarks/pod_scale.py --row S  # or A, B64, B16, F, even, uneven; or several
    python benchmarks/pod_scale.py --row M8 --preset fsdp+expert
    python benchmarks/pod_scale.py --row L32 L128 --preset fsdp+context --attention auto

A row is a model on a mesh, as a user builds it. It prints peak memory, the cycles that the compiler
expects, the seconds that its schedule takes (praxis_lite/tools/plan/schedule.py), and their ratios
to MaxText's step and to the best one written by hand in plain JAX, both compiled in the same way.
`--top` shows where the cycles go.
"""

import argparse
import collections
import os
import time

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies

from praxis_lite.collectives import ExplicitCollectives
from praxis_lite.core import Learner, MeshConfig, Partitioner, make_mesh
from praxis_lite.layers import (
    Embedding,
    FullSoftmax,
    Repeat,
    TransformerFeedForward,
    TransformerFeedForwardMoe,
    rotary_lm,
    set_sharding_params,
)
from praxis_lite.layers.whole_model.sharding_presets import COMPILER_OPTIONS, SHARDING_PRESETS
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_lite.tools.explain import hlo
from praxis_lite.tools.explain.hlo_text import op_name_of, parse
from praxis_lite.tools.plan.chips import CHIPS
from praxis_lite.tools.plan.costs import Efficiencies
from praxis_lite.tools.plan.schedule import schedule
from praxis_lite.tools.plan.timeline import Mesh, Timeline
from praxis_lite.tools.plan.topology import topology_of

# Model dims, layers, heads, dims of a head, hidden dims, vocabulary.
MODELS = {
    "tiny": (2048, 4, 16, 128, 7168, 32_000),
    "llama2-7b": (4096, 32, 32, 128, 11_008, 32_000),
    "mixtral-8x7b": (4096, 32, 32, 128, 14_336, 32_000),
    "even": (2048, 4, 16, 128, 8192, 32_004),
    "uneven": (2048, 4, 16, 128, 8190, 32_003),
}
# Heads of keys, experts, and experts of a token, of a model that has some.
WITH_EXPERTS = {"mixtral-8x7b": (8, 8, 2)}
# Mesh (data, expert, mdl) of a row, for presets with an axis of experts.
EXPERT_MESHES = {"M8": (8, 8, 1)}
# Model, topology, mesh (replica, data, mdl), tokens per row, rows if not one per device.
ROWS = {
    "S": ("tiny", "v5e:4x4", (1, 16, 1), 1024),
    "A": ("llama2-7b", "v5e:16x16", (1, 256, 1), 2048),
    "B64": ("llama2-7b", "v5e:16x16", (1, 64, 4), 2048),
    "B16": ("llama2-7b", "v5e:16x16", (1, 16, 16), 2048),
    "F": ("llama2-7b", "v5p:4x4x4", (1, 16, 4), 2048),
    "L32": ("llama2-7b", "v5e:16x16", (1, 16, 16), 32_768, 16),
    "L128": ("llama2-7b", "v5e:16x16", (1, 4, 64), 131_072, 4),
    "M8": ("mixtral-8x7b", "v5p:4x4x4", (1, 64, 1), 4096),
    "even": ("even", "v5e:2x4", (1, 2, 4), 1024),
    "uneven": ("uneven", "v5e:2x4", (1, 2, 4), 1024),
}
# Peak MB, Gcycles, seconds. MaxText e591f30c, and plain JAX with all collectives by hand; jax
# 0.10.2, libtpu 0.0.51, remat of whole layers, bfloat16, float32 weights and Adam.
PEERS = {
    "S": {"MaxText": (572.7, 0.0521, 0.0425), "by hand": (646, 0.0305, 0.0316)},
    "A": {"MaxText": (2416.7, 1.584, 1.238), "by hand": (1835, 1.2314, 1.0466)},
    "B64": {"MaxText": (2103.4, 1.715, 1.402), "by hand": (1895.5, 1.2429, 1.0157)},
    "B16": {"MaxText": (2614.8, 2.437, 3.133), "by hand": (1834.8, 1.2314, 1.0466)},
    "F": {"MaxText": (3494.3, 0.831, 0.610), "by hand": (2962.4, 0.6587, 0.4571)},
    # Its best ways, all-to-all and a ring, without the time in kernels of Pallas.
    "L32": {"MaxText": (3871.4, 1.7772, 1.4581)},
    "L128": {"MaxText": (1939.7, 9.238, 10.166)},
    # No token dropped, 8 devices for experts; 64 devices for weights; and a capacity of 1.25.
    "M8": {
        "MaxText": (19_865.6, 2.4088, 1.8952), "its fsdp": (19_666.7, 2.018, 2.5251),
        "dropping": (19_809.5, 4.2718, 3.8176),
    },
}
# The peers' seconds are of the compiler's own cycles, whole links and no latency; kernels of
# Pallas, of which it says none, take no time.
AS_THE_PEERS = Efficiencies(cycles=1.0, link=1.0, hop_seconds=0.0, kernel=float("inf"))
# On v5p an embedding's gather goes to the SparseCore, whose text XLA cannot read back.
UNREADABLE = {"xla_tpu_offload_gather_to_sparsecore": "false"}
# Nor the sorts and scatters of tokens by expert.
UNREADABLE_OF_EXPERTS = {
    "xla_tpu_enable_offloading_sort_to_sparsecore": "false",
    "xla_tpu_enable_offloading_scatter_to_sparsecore": "false",
}


def model_config(name: str, options: argparse.Namespace) -> fdl.Config:
    """Returns the config of a Llama of MODELS, computed in bfloat16."""
    attention = {
        "atten_kernel": options.attention, "atten_chunk_size": options.chunk_size,
        "float32_logits": options.attention not in ("einsum", "blocked"),  # Others have no choice.
    }
    model_dims, num_layers, num_heads, dim_per_head, hidden_dims, vocab_size = MODELS[name]
    activation = {"activation": "silu", "use_gated_activation": True}
    feed_forward = fdl.Partial(TransformerFeedForward, has_bias=False, **activation)
    if name in WITH_EXPERTS:
        attention["num_kv_heads"], num_experts, per_token = WITH_EXPERTS[name]
        capacity = {"dropless": True} if options.capacity is None else {
            # Pax's factor is of the tokens, MaxText's of their choices.
            "unadjusted_expert_capacity_factor": options.capacity * per_token,
        }
        feed_forward = fdl.Partial(
            TransformerFeedForwardMoe, num_experts=num_experts, num_experts_per_token=per_token,
            gating_func="top_k", **activation, **capacity,
        )
    return rotary_lm(
        vocab_size=vocab_size, model_dims=model_dims, hidden_dims=hidden_dims,
        num_heads=num_heads, dim_per_head=dim_per_head, num_layers=num_layers,
        fprop_dtype=jnp.bfloat16, attention=attention,
        tr_fflayer_tpl=feed_forward,
        softmax_tpl=fdl.Partial(FullSoftmax, has_bias=False),
        separate_embedding_tpl=fdl.Partial(Embedding),
        stacked_transformer_tpl=fdl.Partial(Repeat, checkpoint_policy=options.remat),
    )


def partitioner_of(options: argparse.Namespace, row: str) -> Partitioner:
    """Returns the row's task on its mesh, as a user makes them."""
    model, topology, shape, *_ = ROWS[row]
    devices = topology_of(topology).devices if options.wrap else topologies.get_topology_desc(
        platform="tpu", topology_name=topology, num_slices=1
    ).devices
    axes = ("replica", "data", "mdl")
    if "expert" in options.preset:
        axes, shape = ("data", "expert", "mdl"), EXPERT_MESHES[row]
    shape = tuple(map(int, options.mesh.split(","))) if options.mesh else shape
    mesh = make_mesh(
        MeshConfig(ici_mesh_shape=shape, axis_names=axes, allow_split_physical_axes=True), devices
    )
    preset = SHARDING_PRESETS[options.preset]
    config = set_sharding_params(model_config(model, options), preset)
    if options.layers:
        config.num_layers = options.layers
    learner = Learner(
        optimizer=fdl.build(fdl.Partial(
            optax.adamw, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1
        )),
        learning_rate=optax.linear_schedule(0.0, 3e-5, 100), clip_gradient_norm_to_value=1.0,
        gradient_accumulation_steps=options.micro_batches,
    )
    batch = preset["batch"]
    task = LanguageModelTask(
        fdl.build(config), learner,
        inputs_split_mapping={"map_1d": (batch,), "map_2d": (batch, None)},
    )
    compiler_options = dict(COMPILER_OPTIONS.get(options.preset, {}).get("tpu", {}))
    if topology.startswith("v5p"):
        compiler_options |= UNREADABLE
        compiler_options |= UNREADABLE_OF_EXPERTS if model in WITH_EXPERTS else {}
    compiler_options |= dict(item.split("=", 1) for item in options.compiler_option)
    settings = {"compiler_options": {"tpu": compiler_options}}
    if options.by_hand:
        axes = tuple(options.by_hand.split(","))
        return Partitioner(task, mesh, gradients=ExplicitCollectives(axes), **settings)
    return Partitioner(task, mesh, **settings)


def measured(options: argparse.Namespace, row: str) -> None:
    """Compiles a row and prints its figures."""
    _, topology, _, length, *rows = ROWS[row]
    partitioner = partitioner_of(options, row)
    num_rows = (rows[0] if rows else partitioner.mesh.size) * options.micro_batches
    ids = jax.ShapeDtypeStruct((num_rows, length), jnp.int32)
    weights = jax.ShapeDtypeStruct(ids.shape, jnp.float32)
    batch = {"ids": ids, "labels": ids, "weights": weights, "segment_ids": ids, "segment_pos": ids}
    chip = topology.partition(":")[0]
    start = time.monotonic()
    compiled = partitioner.train_step.lower(batch).compile()
    seconds, text = time.monotonic() - start, compiled.as_text()
    if options.dump:
        with open(options.dump, "w", encoding="utf-8") as file:
            file.write(text)
    shape = dict(partitioner.mesh.shape)
    mesh = Mesh(shape, np.zeros(partitioner.mesh.size, int))
    result, one_link = (
        schedule(text, CHIPS[chip], mesh, AS_THE_PEERS, both_links=both) for both in (True, False)
    )
    cycles = (result.compute + result.memory) * CHIPS[chip].clock
    figures = (
        compiled.memory_analysis().peak_memory_in_bytes / 1e6, cycles / 1e9, result.seconds
    )
    print(f"{row}  {topology}  {options.preset}  {partitioner.mesh.shape_tuple}")
    print(f"  peak {figures[0]:.0f} MB  {figures[1]:.4f} Gcycles  {figures[2]:.4f} s, of which "
          f"{result.exposed:.4f} s wait for the wire; {one_link.seconds:.4f} s with rings on one "
          "link")
    print(f"  {hlo.flops(compiled):.4g} flops, compiled in {seconds:.0f} s")
    if result.kernel_flops:
        kernels = result.kernel_flops / (0.5 * CHIPS[chip].peak())
        print(f"  kernels of Pallas: {result.kernel_flops:.4g} flops, {kernels:.4f} s at half of "
              "the peak, which are not in the seconds above")
    for peer, of_peer in PEERS.get(row, {}).items():
        if not options.layers and options.micro_batches == 1:
            ratios = [ours / theirs for ours, theirs in zip(figures, of_peer, strict=True)]
            print("  / {:8} {:.2f} peak  {:.2f} cycles  {:.2f} s".format(peer, *ratios))
    for name, seconds in _by_operation(text, result).most_common(options.top):
        of_it = seconds * CHIPS[chip].clock
        print(f"  {of_it / 1e6:9.2f} Mcycles {100 * of_it / cycles:5.1f}%  {name[-130:]}")


def _by_operation(text: str, timeline: Timeline) -> collections.Counter:
    """Returns the seconds of a timeline by the JAX operation of an instruction."""
    instructions = {
        name: instruction for computation in parse(text).computations.values()
        for name, instruction in computation.items()
    }
    seconds = collections.Counter()
    for name, value in timeline.of.items():
        seconds[op_name_of(instructions[name]) or instructions[name].opcode] += value
    return seconds


def main() -> None:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", nargs="+", choices=ROWS, default=["S"])
    parser.add_argument("--preset", choices=SHARDING_PRESETS, default="fsdp+tensor")
    parser.add_argument("--mesh", help="replica,data,mdl, or data,expert,mdl of a preset with "
                        "experts, of as many devices as the row has")
    parser.add_argument("--layers", type=int, help="fewer; there are no ratios then")
    parser.add_argument("--attention", default="blocked", help="atten_kernel")
    parser.add_argument("--chunk-size", type=int, default=512, help="atten_chunk_size")
    parser.add_argument("--capacity", type=float, help="of an expert, beyond which it drops; by "
                        "default none is dropped")
    parser.add_argument("--remat", default="save_nothing", help="checkpoint_policy")
    parser.add_argument("--micro-batches", type=int, default=1, help="of a row per device each; "
                        "there are no ratios then")
    parser.add_argument("--wrap", action="store_true", help="link the torus's ends, as pods do; "
                        "the peers of v5p were compiled without, and v5e's programs are the same")
    parser.add_argument("--by-hand", default="", help="data_axes of ExplicitCollectives")
    parser.add_argument("--compiler-option", action="append", default=[],
                        help="name=value, beside those of the preset")
    parser.add_argument("--top", type=int, default=0, help="costliest operations to show")
    parser.add_argument("--dump", help="a file for the program's text")
    options = parser.parse_args()
    for row in options.row:
        measured(options, row)


if __name__ == "__main__":
    main()
