"""Prints the matmuls that overlap with token exchanges between experts on a TPU, as JSON."""

import json
import re

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax

from praxis_lite.core import Learner, MeshConfig, Partitioner, make_mesh
from praxis_lite.layers import (
    COMPILER_OPTIONS,
    SHARDING_PRESETS,
    TransformerFeedForwardMoe,
    rotary_lm,
    set_sharding_params,
)
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_tools.plan.topology import topology_of

PRESET = "fsdp+expert"


def program() -> str:
    """Returns the HLO of a train step on 4 devices, with experts and a shared expert."""
    moe = fdl.Partial(
        TransformerFeedForwardMoe,
        num_experts=16,
        num_experts_per_token=2,
        gating_func="top_k",
        dropless=True,
        num_shared_experts=2,
        activation="silu",
        use_gated_activation=True,
    )
    lm = rotary_lm(
        vocab_size=256,
        model_dims=512,
        hidden_dims=1024,
        num_heads=4,
        dim_per_head=128,
        num_layers=2,
        fprop_dtype=jnp.bfloat16,
        tr_fflayer_tpl=moe,
    )
    rows = SHARDING_PRESETS[PRESET]["batch"]
    task = LanguageModelTask(
        fdl.build(set_sharding_params(lm, PRESET)),
        Learner(optax.sgd, 1e-3),
        inputs_split_mapping={"map_1d": (rows,), "map_2d": (rows, None)},
    )
    config = MeshConfig(ici_mesh_shape=(2, 4, 1), axis_names=("data", "expert", "mdl"))
    mesh = make_mesh(config, topology_of("v5e:2x4", 1).devices)
    ids = jax.ShapeDtypeStruct((16, 512), np.int32)
    weights = jax.ShapeDtypeStruct((16, 512), np.float32)
    step = Partitioner(task, mesh, compiler_options=COMPILER_OPTIONS[PRESET]).train_step
    return step.lower({"ids": ids, "labels": ids, "weights": weights}).compile().as_text()


def products_beside(text: str) -> list[list[str]]:
    """Returns the matmuls that run during each exchange outside the loops over rounds."""
    beside, running = [], {}
    for line in text.splitlines():
        if re.match(r"(ENTRY )?%?[\w.\-]+ \(", line):  # Another computation.
            running = {}
        operation = re.search(r'op_name="([^"]*)"', line)
        name = operation.group(1) if operation else ""
        if pair := re.search(r"%(\S+) = .* all-to-all-(start|done)\(%?([\w.\-]+)", line):
            if pair.group(2) == "start" and "while/body/all_to_all" not in name:
                running[pair.group(1)] = []
            elif pair.group(3) in running:
                beside.append(running.pop(pair.group(3)))
        elif name.endswith("dot_general"):
            for products in running.values():
                products.append(name)
    return beside


if __name__ == "__main__":
    print(json.dumps(products_beside(program())))
