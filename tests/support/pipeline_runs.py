"""Prints the collectives of pipelined train steps, compiled for a TPU, as JSON."""

import json
from typing import Any

import fiddle as fdl
import jax
import numpy as np
import optax

from praxis_lite.core import Learner, MeshConfig, Partitioner, make_mesh
from praxis_lite.layers import (
    SHARDING_PRESETS,
    Embedding,
    FullSoftmax,
    OneForwardOneBackward,
    Pipeline,
    rotary_lm,
    set_sharding_params,
)
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_tools.explain import hlo
from praxis_tools.plan.topology import topology_of

STAGES, DATA, LAYERS, VOCABULARY, DIMS, HIDDEN = 2, 4, 4, 256, 128, 256
ROWS, LENGTH = 8, 64  # Size of a microbatch.
BATCH = ("stage", "data")


def collectives(num_microbatches: int, one_forward: bool, **settings: Any) -> list[tuple]:
    """Returns (kind, bytes, count, group size) of collectives; weights are replicated over data."""
    lm = rotary_lm(
        vocab_size=VOCABULARY,
        model_dims=DIMS,
        hidden_dims=HIDDEN,
        num_heads=4,
        dim_per_head=32,
        num_layers=LAYERS,
        separate_embedding_tpl=fdl.Partial(Embedding),
        softmax_tpl=fdl.Partial(FullSoftmax, has_bias=False),
        stacked_transformer_tpl=fdl.Partial(
            Pipeline, num_stages=STAGES, num_microbatches=num_microbatches, **settings
        ),
    )
    set_sharding_params(lm, {**SHARDING_PRESETS["megatron"], "batch": ("data",)})
    lm.softmax_tpl.activation_split_dims_mapping = (BATCH, None, "mdl")
    lm.separate_embedding_tpl.activation_split_dims_mapping = (BATCH, None, None)
    task = LanguageModelTask(
        fdl.build(lm),
        Learner(optax.sgd, 1e-3),
        inputs_split_mapping={"map_1d": (BATCH,), "map_2d": (BATCH, None)},
    )
    mesh = make_mesh(
        MeshConfig(ici_mesh_shape=(STAGES, DATA, 1), axis_names=("stage", "data", "mdl")),
        topology_of("v5e:2x4", 1).devices,
    )
    gradients = OneForwardOneBackward() if one_forward else None
    ids = jax.ShapeDtypeStruct((ROWS * num_microbatches, LENGTH), np.int32)
    weights = jax.ShapeDtypeStruct((ROWS * num_microbatches, LENGTH), np.float32)
    step = Partitioner(task, mesh, gradients=gradients).train_step
    compiled = step.lower({"ids": ids, "labels": ids, "weights": weights}).compile()
    return [
        (item.kind, item.bytes, item.count, item.group_size) for item in hlo.collectives(compiled)
    ]


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "1f1b": [collectives(4, True)],
                "split": [collectives(4, True, split_backward=True)],
                "gpipe, split": [collectives(4, False, split_backward=True)],
            }
        )
    )
