"""Trains small language models on several meshes; the results are cached for all tests."""

import functools
from typing import NamedTuple

import fiddle as fdl
import jax
import numpy as np
import optax

from praxis_lite.core import Learner, MeshConfig, Partitioner, TrainState, make_mesh
from praxis_lite.decode import Greedy
from praxis_lite.layers import rotary_lm, set_sharding_params
from praxis_lite.tasks.language_model import LanguageModelTask
from tests.support import plain_training

MESHES = [(1, 1, 1), (1, 4, 2), (1, 8, 1), (1, 1, 8), (2, 2, 2), (1, 3, 2)]
SIZES = {
    # Not divisible by the mesh axes, except that the number of heads is divisible by 3.
    "uneven": dict(vocab_size=37, model_dims=13, hidden_dims=29, num_heads=3, dim_per_head=6),
    "even": dict(vocab_size=48, model_dims=24, hidden_dims=48, num_heads=8, dim_per_head=2),
}
OPTIMIZERS = {
    "adamw": optax.adamw,
    # Factor all matrices, including tiny ones.
    "adafactor": functools.partial(optax.adafactor, min_dim_size_to_factor=2),
}
NUM_ROWS = {"uneven": 11, "even": 24}
SEQ_LEN, NUM_STEPS, MAX_NORM, LEARNING_RATE = 7, 20, 0.5, 1e-2
PROMPT_LENGTHS, NUM_NEW_TOKENS = (5, 2, 1, 4, 3), 6


def lm_of(size):
    """Returns a function of `rngs` that builds the model."""
    return lm_with(SIZES[size])


def lm_with(dims):
    return fdl.build(set_sharding_params(rotary_lm(num_layers=2, **dims)))


@functools.cache
def partitioner_of(size, optimizer, shape):
    return partitioner_with(SIZES[size], optimizer, shape)


def partitioner_with(dims, optimizer, shape):
    task = LanguageModelTask(
        lm_with(dims),
        Learner(OPTIMIZERS[optimizer], LEARNING_RATE, clip_gradient_norm_to_value=MAX_NORM),
        inputs_split_mapping={
            "map_1d": (("replica", "data"),),
            "map_2d": (("replica", "data"), None),
        },
        decoder=Greedy(max_decode_steps=NUM_NEW_TOKENS),
    )
    return Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=shape)))


def batches(size, num_rows=None):
    rng, rows = np.random.default_rng(3), num_rows or NUM_ROWS[size]
    out = []
    for _ in range(3):
        ids = rng.integers(0, SIZES[size]["vocab_size"], (rows, SEQ_LEN + 1)).astype(np.int32)
        weights = (rng.random((rows, SEQ_LEN)) < 0.8).astype(np.float32)
        out.append({"ids": ids[:, :-1], "labels": ids[:, 1:], "weights": weights})
    return [out[i % 3] for i in range(NUM_STEPS)]


def prompts():
    ids = np.random.default_rng(5).integers(0, 37, (len(PROMPT_LENGTHS), 5)).astype(np.int32)
    lengths = np.array(PROMPT_LENGTHS, np.int32)
    return {"ids": ids, "prefix_lengths": lengths, "weights": np.ones(len(lengths), np.float32)}


def structs(inputs):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)


@functools.cache
def plain(size, optimizer, num_rows=None):
    return plain_training.train(
        lm_of(size),
        OPTIMIZERS[optimizer](learning_rate=LEARNING_RATE),
        MAX_NORM,
        batches(size, num_rows),
    )


class Run(NamedTuple):
    partitioner: Partitioner
    initial: TrainState  # NumPy arrays with logical shapes
    state: TrainState
    losses: list[float]
    grad_norms: list[float]
    compiled: jax.stages.Compiled
    num_left: int  # Number of arrays of old states that were not donated


def on_host(layout, tree):
    return jax.tree.map(
        # Copy first, because a NumPy view of the buffer would prevent its donation.
        lambda x, true: np.asarray(x.copy())[tuple(slice(dim) for dim in true.shape)],
        tree,
        layout.shapes,
    )


def zero_padded(x, to):
    padded = np.zeros(to.shape, to.dtype)
    padded[tuple(slice(dim) for dim in x.shape)] = x
    return padded


def drawn_weights(partitioner):
    """Returns mdl_vars on the mesh, with values that do not depend on it; no init is compiled."""
    layout, rng = partitioner.layout.select("mdl_vars"), np.random.default_rng(1)
    weights = jax.tree.map(
        lambda x: rng.normal(scale=0.3, size=x.shape).astype(x.dtype), layout.shapes
    )
    padded = jax.tree.map(zero_padded, weights, layout.padded_shapes)
    return jax.device_put(padded, layout.shardings(partitioner.mesh))


@functools.cache
def trained(size, optimizer, shape):
    partitioner = partitioner_of(size, optimizer, shape)
    key, inputs = partitioner.key(0), batches(size)
    compiled = partitioner.train_step.lower(structs(inputs[0])).compile()
    state = partitioner.init(key)
    initial = on_host(partitioner.layout, state)
    losses, grad_norms, num_left = [], [], 0
    for item in inputs:
        old = state
        state, outputs = partitioner.train_step(old, partitioner.global_batch(item), key)
        losses.append(float(outputs["metrics"]["loss"][0]))
        grad_norms.append(float(outputs["learner"]["grad_norm"]))
        num_left += sum(not x.is_deleted() for x in jax.tree.leaves(old))
        assert float(outputs["metrics"]["loss"][1]) == item["weights"].sum()
    assert partitioner.train_step.num_compiled() == 1
    return Run(partitioner, initial, state, losses, grad_norms, compiled, num_left)
