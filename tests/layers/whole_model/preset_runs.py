"""Language models of each sharding preset: run on meshes, or compiled for an absent TPU."""

import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

import fiddle as fdl
import jax
import numpy as np
import optax
from jax.sharding import Mesh

from praxis_lite import layers
from praxis_lite.core import Learner, MeshConfig, Partitioner, make_mesh
from praxis_lite.core.sharding.devices import axis_types
from praxis_lite.layers import SHARDING_PRESETS, rotary_lm, set_sharding_params
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_tools.explain import hlo
from tests.support.lm_runs import structs, zero_padded

NUM_LAYERS, NUM_STEPS = 2, 3
AXES = ("replica", "data", "mdl")
KEEPS_ALL = fdl.Partial(layers.Repeat, checkpoint_policy="save_everything")
# What no axis of a mesh divides, with an embedding, positions and a softmax apart.
UNEVEN = functools.partial(
    fdl.Partial,
    layers.TransformerLm,
    37,
    13,
    29,
    3,
    NUM_LAYERS,
    dim_per_head=5,
    max_seq_length=7,
    softmax_tpl=layers.FullSoftmax,
    separate_embedding_tpl=layers.Embedding,
    stacked_transformer_tpl=KEEPS_ALL,
)
# Rows, time, model and hidden dims, heads and their dims, vocabulary.
EVEN = (16, 12, 32, 48, 8, 4, 64)
OF_TPU = (8, 128, 256, 512, 8, 32, 512)


def even_lm(sizes: Sequence[int] = EVEN, **settings: Any) -> fdl.Partial:
    """Returns an LM with rotary positions that keeps all activations: each collective once."""
    _, _, model_dims, hidden_dims, num_heads, dim_per_head, vocab_size = sizes
    return rotary_lm(
        vocab_size=vocab_size,
        model_dims=model_dims,
        hidden_dims=hidden_dims,
        num_heads=num_heads,
        dim_per_head=dim_per_head,
        num_layers=NUM_LAYERS,
        **settings,
        stacked_transformer_tpl=KEEPS_ALL,
    )


def both_ends() -> fdl.Partial:
    """Returns an encoder-decoder that no axis divides."""
    block = fdl.Partial(layers.Transformer, tr_atten_tpl=fdl.Partial(layers.DotProductAttention))
    return fdl.Partial(
        layers.TransformerEncoderDecoder,
        17,
        6,
        11,
        3,
        1,
        1,
        dim_per_head=4,
        decoder_layer_tpl=block,
        encoder_embedding_tpl=layers.Embedding,
    )


def mesh_of(word: str, shape: tuple[int, ...]) -> Mesh:
    """Returns a mesh with the axes that a preset names."""
    names = ("data", "expert", "mdl") if "expert" in word else AXES
    return make_mesh(MeshConfig(ici_mesh_shape=shape, axis_names=names))


def partitioner_of(lm: fdl.Partial, preset: str, mesh: Mesh, **settings: Any) -> Partitioner:
    """Returns the steps of a model whose splits, and whose batch's, are a preset's.

    Args:
      settings: of the task.
    """
    batch = SHARDING_PRESETS[preset]["batch"]
    task = LanguageModelTask(
        fdl.build(set_sharding_params(lm, preset)),
        Learner(optax.sgd, 0.3),
        inputs_split_mapping={"map_1d": (batch,), "map_2d": (batch, None)},
        **settings,
    )
    return Partitioner(task, mesh)


def batch_of(num_rows: int, length: int, vocab_size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    ids = rng.integers(0, vocab_size, (num_rows, length + 1)).astype(np.int32)
    weights = (rng.random((num_rows, length)) < 0.8).astype(np.float32)
    return {"ids": ids[:, :-1], "labels": ids[:, 1:], "weights": weights}


def drawn(partitioner: Partitioner) -> Any:
    """Returns a state to start with: NumPy arrays of true shapes, for which no init is compiled."""
    rng = np.random.default_rng(1)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if "params" not in jax.tree_util.keystr(path):
            return np.zeros(leaf.shape, leaf.dtype)
        return rng.normal(scale=0.3, size=leaf.shape).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, partitioner.layout.shapes)


def losses(
    partitioner: Partitioner, batch: dict[str, np.ndarray]
) -> tuple[list[float], jax.stages.Compiled]:
    """Returns the losses of some steps, and the compiled step that made them."""
    layout, key = partitioner.layout, partitioner.key(0)
    padded = jax.tree.map(zero_padded, drawn(partitioner), layout.padded_shapes)
    state, actual = jax.device_put(padded, layout.shardings(partitioner.mesh)), []
    compiled = partitioner.train_step.lower(structs(batch)).compile()
    for _ in range(NUM_STEPS):
        state, outputs = compiled(state, partitioner.global_batch(batch), key)
        actual.append(float(outputs["metrics"]["loss"][0]))
    return actual, compiled


def collectives(
    preset: str, mesh: Mesh, sizes: Sequence[int] = EVEN, **settings: Any
) -> list[hlo.Collective]:
    """Returns the collectives of a train step."""
    batch = structs(batch_of(sizes[0], sizes[1], sizes[-1]))
    lowered = partitioner_of(even_lm(sizes, **settings), preset, mesh).train_step.lower(batch)
    # The TPU's compiler may also pass parts round while it multiplies; this shows them by name.
    options = {
        f"xla_tpu_enable_windowed_einsum_for_{kind}": False
        for kind in ("reduce_scatter", "all_gather")
    }
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    return hlo.collectives(lowered.compile(compiler_options=None if is_cpu else options))


def bytes_by_kind(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Returns the bytes of a program's collectives, by their kind."""
    total: dict[str, int] = {}
    for item in hlo.collectives(compiled):
        total[item.kind] = total.get(item.kind, 0) + item.bytes * item.count
    return total


def main() -> None:
    """Prints by preset [kind, bytes, executions] of a TPU's collectives, as JSON."""
    from jax.experimental import mesh_utils, topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
    devices = mesh_utils.create_device_mesh((1, 1, 8), topology.devices)
    mesh = axis_types.mesh_of(devices, AXES)
    actual = {
        preset: [(item.kind, item.bytes, item.count) for item in collectives(preset, mesh, OF_TPU)]
        for preset in ("megatron", "sequence", "fsdp")
    }
    print(json.dumps(actual))


if __name__ == "__main__":
    sys.exit(main())
