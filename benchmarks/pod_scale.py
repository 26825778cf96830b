"""Compiles and plans train steps of language models for TPU pods, without the hardware.

    pip install libtpu                      # 0.0.51 with jax 0.10.2 to compare with other libraries
    python benchmarks/pod_scale.py --row S  # or A, B64, B16, F, even, uneven; or several
    python benchmarks/pod_scale.py --row M8 --preset fsdp+expert
    python benchmarks/pod_scale.py --row L32 L128 --preset fsdp+context --attention auto
    python benchmarks/pod_scale.py --row O70 --preset fsdp --attention splash
    python benchmarks/pod_scale.py --row G9 --preset fsdp --chunk-size 1024

Each row is a model on a mesh, built with the public API. For each row, the script prints the peak
memory, the compiler's cycle estimate and the duration of the simulated schedule
(praxis_tools/plan/schedule/). It also prints the ratios of these values to those for MaxText and
for the best hand-written step in plain JAX, both compiled in the same way. `--top` lists the most
expensive instructions.
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
from pod_rows import EXPERT_MESHES, PEERS, ROWS, WITH_EXPERTS, model_of

from praxis_lite.core import Learner, MeshConfig, Partitioner, make_mesh
from praxis_lite.core.collectives import ExplicitCollectives
from praxis_lite.core.sharding.mesh_config import merged_options
from praxis_lite.layers import set_sharding_params
from praxis_lite.layers.whole_model.sharding_presets import COMPILER_OPTIONS, SHARDING_PRESETS
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_tools.explain import hlo_matmuls
from praxis_tools.explain.hlo_text import op_name_of, parse
from praxis_tools.plan.chips import CHIPS
from praxis_tools.plan.costs import Efficiencies
from praxis_tools.plan.schedule.schedule import schedule
from praxis_tools.plan.schedule.timeline import Timeline
from praxis_tools.plan.topology import PhysicalMesh, topology_of

# The seconds for other libraries are based on the compiler's cycles, the full link bandwidth and no
# latency. Pallas kernels, for which the compiler reports no cycles, are counted as zero.
AS_THE_PEERS = Efficiencies(
    cycles=1.0,
    link=1.0,
    hop_seconds=0.0,
    kernel=float("inf"),
    grouped=float("inf"),
    hbm=float("inf"),
)
# On v5p and v6e, embedding gathers run on the SparseCore, whose HLO text XLA cannot parse.
UNREADABLE = {"xla_tpu_offload_gather_to_sparsecore": "false"}
# The same applies to sorting and scattering tokens by expert.
UNREADABLE_OF_EXPERTS = {
    "xla_tpu_enable_offloading_sort_to_sparsecore": "false",
    "xla_tpu_enable_offloading_scatter_to_sparsecore": "false",
}


def partitioner_of(options: argparse.Namespace, row: str) -> Partitioner:
    """Returns a Partitioner for a row's task and mesh, built with the public API."""
    model, topology, shape, *_ = ROWS[row]
    devices = (
        topology_of(topology).devices
        if options.wrap
        else topologies.get_topology_desc(
            platform="tpu", topology_name=topology, num_slices=1
        ).devices
    )
    axes = ("replica", "data", "mdl")
    if "expert" in options.preset:
        axes, shape = ("data", "expert", "mdl"), EXPERT_MESHES[row]
    shape = tuple(map(int, options.mesh.split(","))) if options.mesh else shape
    mesh = make_mesh(
        MeshConfig(ici_mesh_shape=shape, axis_names=axes, allow_split_physical_axes=True), devices
    )
    preset = SHARDING_PRESETS[options.preset]
    config = set_sharding_params(model_of(ROWS[row], options), preset)
    if options.layers:
        config.num_layers = options.layers
    learner = Learner(
        optimizer=fdl.build(fdl.Partial(optax.adamw, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)),
        learning_rate=optax.linear_schedule(0.0, 3e-5, 100),
        clip_gradient_norm_to_value=1.0,
        gradient_accumulation_steps=options.microbatches,
    )
    batch = preset["batch"]
    task = LanguageModelTask(
        fdl.build(config),
        learner,
        inputs_split_mapping={"map_1d": (batch,), "map_2d": (batch, None)},
    )
    compiler_options = {}
    if topology.startswith(("v5p", "v6e")):
        compiler_options |= UNREADABLE
        compiler_options |= UNREADABLE_OF_EXPERTS if model in WITH_EXPERTS else {}
    compiler_options |= dict(item.split("=", 1) for item in options.compiler_option)
    of_preset = COMPILER_OPTIONS.get(options.preset)
    settings = {"compiler_options": merged_options({"tpu": compiler_options}, of_preset)}
    if options.by_hand:
        axes = tuple(options.by_hand.split(","))
        return Partitioner(task, mesh, gradients=ExplicitCollectives(axes), **settings)
    return Partitioner(task, mesh, **settings)


def measured(options: argparse.Namespace, row: str) -> None:
    """Compiles a row and prints its results."""
    _, topology, _, length, num_rows, _ = ROWS[row]
    partitioner = partitioner_of(options, row)
    num_rows = (num_rows or partitioner.mesh.size) * options.microbatches
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
    mesh = PhysicalMesh(shape, np.zeros(partitioner.mesh.size, int))
    result, one_link = (
        schedule(text, CHIPS[chip], mesh, AS_THE_PEERS, both_links=both) for both in (True, False)
    )
    cycles = (result.compute_seconds + result.memory_seconds) * CHIPS[chip].clock
    figures = (compiled.memory_analysis().peak_memory_in_bytes / 1e6, cycles / 1e9, result.seconds)
    print(f"{row}  {topology}  {options.preset}  {partitioner.mesh.shape_tuple}")
    print(
        f"  peak {figures[0]:.0f} MB  {figures[1]:.4f} Gcycles  {figures[2]:.4f} s, of which "
        f"{result.exposed_seconds:.4f} s waiting for links; {one_link.seconds:.4f} s with rings "
        "on one link"
    )
    print(f"  {hlo_matmuls.flops(compiled):.4g} flops, compiled in {seconds:.0f} s")
    if result.kernel_flops:
        kernels = result.kernel_flops / (0.5 * CHIPS[chip].peak())
        print(
            f"  Pallas kernels: {result.kernel_flops:.4g} flops, {kernels:.4f} s at half of "
            "the peak, not included in the seconds above"
        )
    for peer, of_peer in PEERS.get(row, {}).items():
        if not options.layers and options.microbatches == 1:
            ratios = [ours / theirs for ours, theirs in zip(figures, of_peer, strict=True)]
            print("  / {:8} {:.2f} peak  {:.2f} cycles  {:.2f} s".format(peer, *ratios))
    for name, seconds in _by_operation(text, result).most_common(options.top):
        of_it = seconds * CHIPS[chip].clock
        print(f"  {of_it / 1e6:9.2f} Mcycles {100 * of_it / cycles:5.1f}%  {name[-130:]}")


def _by_operation(text: str, timeline: Timeline) -> collections.Counter:
    """Returns the seconds spent in each JAX operation in a timeline."""
    instructions = {
        name: instruction
        for computation in parse(text).computations.values()
        for name, instruction in computation.items()
    }
    seconds = collections.Counter()
    for name, value in timeline.instruction_seconds.items():
        seconds[op_name_of(instructions[name]) or instructions[name].opcode] += value
    return seconds


def main() -> None:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", nargs="+", choices=ROWS, default=["S"])
    parser.add_argument("--preset", choices=SHARDING_PRESETS, default="fsdp+tensor")
    parser.add_argument(
        "--mesh",
        help="replica,data,mdl, or data,expert,mdl for a preset with "
        "experts; the number of devices must match the row",
    )
    parser.add_argument("--layers", type=int, help="number of layers; disables ratios")
    parser.add_argument("--attention", default="blocked", help="atten_kernel")
    parser.add_argument("--chunk-size", type=int, default=512, help="atten_chunk_size")
    parser.add_argument(
        "--capacity",
        type=float,
        help="capacity of an expert, beyond which tokens are dropped; default: no limit",
    )
    parser.add_argument("--remat", help="checkpoint_policy or its JSON; default: the row's")
    parser.add_argument(
        "--microbatches",
        type=int,
        default=1,
        help="number of microbatches with one row per device; disables ratios",
    )
    parser.add_argument(
        "--wrap",
        action="store_true",
        help="assume wraparound links, as in pods "
        "(the other libraries' v5p steps were compiled without them)",
    )
    parser.add_argument("--by-hand", default="", help="data_axes of ExplicitCollectives")
    parser.add_argument(
        "--compiler-option",
        action="append",
        default=[],
        help="name=value, in addition to the preset",
    )
    parser.add_argument("--top", type=int, default=0, help="costliest operations to show")
    parser.add_argument("--dump", help="file to write the HLO text to")
    options = parser.parse_args()
    for row in options.row:
        measured(options, row)


if __name__ == "__main__":
    main()
