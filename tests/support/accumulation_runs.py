"""Prints the collectives of a train step with microbatches, compiled for a TPU, as JSON."""

import json

import fiddle as fdl
import jax
import numpy as np
import optax

from praxis_lite.core import Learner, MeshConfig, Partitioner, make_mesh
from praxis_lite.layers import Embedding, FullSoftmax, rotary_lm, set_sharding_params
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_tools.explain import hlo
from praxis_tools.plan.topology import topology_of

ROWS, LENGTH = 64, 64


def summed(accumulation_steps: int, slot_mesh_axes: tuple[str, ...] = ()) -> dict[str, int]:
    """Returns the bytes of each kind of collective; weights are replicated on each of 8 devices."""
    lm = rotary_lm(
        vocab_size=256,
        model_dims=128,
        hidden_dims=512,
        num_heads=4,
        dim_per_head=32,
        num_layers=3,
        separate_embedding_tpl=fdl.Partial(Embedding),
        softmax_tpl=fdl.Partial(FullSoftmax, has_bias=False),
    )
    task = LanguageModelTask(
        fdl.build(set_sharding_params(lm, "replicated")),
        Learner(
            optax.adamw,
            1e-3,
            gradient_accumulation_steps=accumulation_steps,
            slot_mesh_axes=slot_mesh_axes,
        ),
        inputs_split_mapping={"map_1d": ("data",), "map_2d": ("data", None)},
    )
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 8, 1)), topology_of("v5e:2x4", 1).devices)
    ids = jax.ShapeDtypeStruct((ROWS, LENGTH), np.int32)
    weights = jax.ShapeDtypeStruct((ROWS, LENGTH), np.float32)
    step = Partitioner(task, mesh).train_step
    compiled = step.lower({"ids": ids, "labels": ids, "weights": weights}).compile()
    totals = hlo.summarize(hlo.collectives(compiled))
    return {kind: size for kind, (_, size) in totals.items()}


if __name__ == "__main__":
    print(json.dumps([summed(1), summed(4)]))
