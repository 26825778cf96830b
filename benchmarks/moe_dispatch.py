"""Measures the cost of dispatching tokens to experts, relative to a dense layer.

`python benchmarks/moe_dispatch.py` compiles a mixture-of-experts layer with and without a capacity,
and a dense feed-forward layer with the same active flops (two experts per token, so twice the
hidden dims), forward and backward, on a mesh of eight simulated devices. It prints the collectives
in each layer and direction. It also prints the time relative to the dense layer, measured
alternately in a single run.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from praxis_lite.core import MeshConfig, constrain, make_mesh, simulate_devices  # noqa: E402

simulate_devices(8)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402

from praxis_lite.core import NnxModel  # noqa: E402
from praxis_lite.core.errors import format_bytes  # noqa: E402
from praxis_lite.core.models.model import spec_leaves  # noqa: E402
from praxis_lite.layers import (  # noqa: E402
    AuxLoss,
    TransformerFeedForward,
    TransformerFeedForwardMoe,
    intermediates,
)
from praxis_tools.explain import hlo, hlo_matmuls  # noqa: E402

BATCH, TIME, MODEL, HIDDEN, EXPERTS = 16, 128, 128, 512, 4
TOKENS = (("data", "expert"), None, None)
MOE = functools.partial(
    TransformerFeedForwardMoe,
    MODEL,
    HIDDEN,
    num_experts=EXPERTS,
    weight_split_dims_mapping=("expert", "data", "mdl"),
    activation_split_dims_mapping=TOKENS,
)
LAYERS: dict[str, Callable[..., Any]] = {
    "dense": functools.partial(
        TransformerFeedForward,
        MODEL,
        2 * HIDDEN,
        has_bias=False,
        # Sharded over the same number of devices as the weights of the experts.
        weight_split_dims_mapping=(("data", "expert"), "mdl"),
        hidden_split_dims_mapping=(("data", "expert"), None, "mdl"),
        activation_split_dims_mapping=TOKENS,
    ),
    "experts with capacity": MOE,
    "dropless": functools.partial(MOE, dropless=True),
}


def compiled_layer(
    build: Callable[..., Any], mesh: jax.sharding.Mesh, backward: bool
) -> tuple[Any, Any]:
    """Compiles a layer's loss or the loss's gradients; returns the executable and its arguments."""
    model = NnxModel(build)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        module = model.module({"params": params, "non_trainable": {}})
        outputs = module(constrain(x, TOKENS))
        return jnp.mean(jnp.square(outputs)) + sum(intermediates(module, AuxLoss).values())

    def sharding(mapping: Any) -> NamedSharding:
        return NamedSharding(mesh, mapping)

    shardings = [
        sharding(spec.partition_spec(mesh.axis_names, path))
        for path, spec in spec_leaves(model.weight_specs()["params"])
    ]
    x_sharding = sharding(jax.sharding.PartitionSpec(*TOKENS))
    params = jax.jit(model.init)(jax.random.key(0))["params"]
    leaves, treedef = jax.tree.flatten(params)
    params = jax.tree.unflatten(treedef, jax.device_put(leaves, shardings))
    x = np.random.default_rng(0).normal(size=(BATCH, TIME, MODEL)).astype(np.float32)
    arguments = (params, jax.device_put(x, x_sharding))
    # Shard gradients like their weights, as required by an optimizer.
    weights_shardings = jax.tree.map(lambda w: w.sharding, params)
    replicated = sharding(jax.sharding.PartitionSpec())
    with jax.set_mesh(mesh):
        step = (
            jax.jit(
                jax.value_and_grad(loss, argnums=(0, 1)),
                out_shardings=(replicated, (weights_shardings, x_sharding)),
            )
            if backward
            else jax.jit(loss)
        )
        return step.lower(*arguments).compile(), arguments


def medians(layers: dict[str, tuple[Any, Any]], num_rounds: int) -> dict[str, float]:
    """Returns the median seconds of each executable, measured alternately."""
    seconds: dict[str, list[float]] = {name: [] for name in layers}
    for i in range(num_rounds + 3):
        for name, (compiled, arguments) in layers.items():
            start = time.perf_counter()
            jax.block_until_ready(compiled(*arguments))
            if i >= 3:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_rounds", type=int, default=30)
    num_rounds = parser.parse_args().num_rounds
    axis_names = ("data", "expert", "mdl")
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(2, 2, 2), axis_names=axis_names))
    forward = {name: compiled_layer(build, mesh, False)[0] for name, build in LAYERS.items()}
    both = {name: compiled_layer(build, mesh, True) for name, build in LAYERS.items()}
    print("collectives of a layer: forward pass / forward and backward")
    for name in LAYERS:
        counts = [hlo.summarize(hlo.collectives(c)) for c in (forward[name], both[name][0])]
        for kind in sorted(set().union(*counts)):
            (n, size), (total, total_size) = (count.get(kind, (0, 0)) for count in counts)
            print(
                f"  {name:<24}{kind:<20}{n:>3} ({format_bytes(size)}) /{total:>3} "
                f"({format_bytes(total_size)})"
            )
    seconds = medians(both, num_rounds)
    print(f"\n{'forward and backward / dense':<32}{'time':>8}{'flops':>8}{'temp memory':>14}")
    for name, (compiled, _) in both.items():
        temp, dense_temp = (hlo.memory_per_device(c).temp for c in (compiled, both["dense"][0]))
        print(
            f"  {name:<30}{seconds[name] / seconds['dense']:>8.2f}"
            f"{hlo_matmuls.flops(compiled) / hlo_matmuls.flops(both['dense'][0]):>8.2f}"
            f"{temp / dense_temp:>14.2f}"
        )


if __name__ == "__main__":
    main()
