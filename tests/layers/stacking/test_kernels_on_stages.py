"""Kernels that XLA cannot split, in blocks on stages: each device has those of its own stages."""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from praxis_lite.core import Learner, MeshConfig, NnxModel, Partitioner, make_mesh
from praxis_lite.layers import (
    SHARDING_PRESETS,
    BaseLayer,
    OneForwardOneBackward,
    Pipeline,
    TransformerFeedForward,
    rotary_lm,
    set_sharding_params,
)
from praxis_lite.layers.base.foreign_kernels import without_vma
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_lite.tasks.loss import LossTask
from praxis_tools.explain import hlo
from tests.layers.stacking.pipeline_cases import MESH_AXES, assert_trees_close
from tests.support.marks import nightly_but

DIMS, ROWS = 6, 24


class Block(BaseLayer):
    """A residual block of a kernel, which works on a device's rows with all of a weight."""

    def __init__(self, *, rngs):
        self.w = self.weight((DIMS, 8), (None, None), rngs=rngs)
        self.out = self.weight((8, DIMS), (None, None), rngs=rngs)

    def __call__(self, x, *, key=None, cache=None):
        def kernel(hidden, out):
            return jnp.tanh(hidden) @ out

        hidden, mesh = x @ self.w[...], jax.sharding.get_abstract_mesh()
        if not mesh.empty:
            rows = PartitionSpec("data")
            kernel = without_vma(kernel, (rows, PartitionSpec()), (), rows, set(mesh.axis_names))
        return x + kernel(hidden, self.out[...]), cache


def loss(pipeline, inputs, key):
    outputs = pipeline(inputs["x"])[0]
    return jnp.mean(jnp.sin(outputs) ** 2, axis=1)


WAYS = {
    "gpipe": ({}, None),
    "split": ({"split_backward": True}, None),
    "1f1b": ({}, OneForwardOneBackward()),
    "1f1b, split": ({"split_backward": True}, OneForwardOneBackward()),
}


@functools.cache
def after_a_step(mesh_shape, way):
    """Returns a step's loss and weights, and its compiled program."""
    settings, gradients = WAYS[way]
    model = NnxModel(
        lambda rngs: Pipeline(
            Block,
            4,
            num_stages=2,
            num_microbatches=3,
            activation_split_dims_mapping=("data", None),
            rngs=rngs,
            **settings,
        )
    )
    task = LossTask(
        model,
        loss,
        Learner(optax.sgd, 1.0),
        inputs_split_mapping={"map_1d": ("data",), "map_2d": ("data", None)},
    )
    mesh = make_mesh(MeshConfig(ici_mesh_shape=mesh_shape, axis_names=MESH_AXES))
    partitioner = Partitioner(task, mesh, gradients=gradients)
    rng = np.random.default_rng(0)
    inputs = {
        "x": rng.normal(size=(ROWS, DIMS)).astype(np.float32),
        "weights": np.ones(ROWS, np.float32),
    }
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
    compiled = partitioner.train_step.lower(spec).compile()
    key = partitioner.key(0)
    state, outputs = partitioner.train_step(
        partitioner.init(key), partitioner.global_batch(inputs), key
    )
    return jax.device_get((outputs["metrics"], state.mdl_vars["params"])), compiled


@pytest.mark.slow
@pytest.mark.parametrize("way", nightly_but({"1f1b, split"}, WAYS))
def test_a_kernel_on_stages_trains_as_on_one_device_and_gathers_nothing(way):
    actual, compiled = after_a_step((2, 2, 2), way)
    assert_trees_close(actual, after_a_step((1, 1, 1), "gpipe")[0], rtol=1e-5, atol=1e-6)
    in_loops = {item.kind for item in hlo.collectives(compiled) if item.count > 1}
    assert "all-gather" not in in_loops and "collective-permute" in in_loops


def lm_after_a_step(mesh_shape, way, tensor_parallel):
    """Returns a step's loss and weights of a language model, its layers split over "mdl"."""
    settings, gradients = WAYS[way]
    lm = rotary_lm(
        vocab_size=37,
        model_dims=8,
        hidden_dims=12,
        num_heads=2,
        dim_per_head=4,
        num_layers=2,
        tr_fflayer_tpl=fdl.Partial(TransformerFeedForward, tensor_parallel=tensor_parallel),
        stacked_transformer_tpl=fdl.Partial(Pipeline, num_stages=2, num_microbatches=3, **settings),
    )
    set_sharding_params(lm, {**SHARDING_PRESETS["megatron"], "batch": ("data",)})
    task = LanguageModelTask(
        fdl.build(lm), Learner(optax.sgd, 1.0), inputs_split_mapping={"map_2d": ("data", None)}
    )
    # An axis more, which splits nothing.
    mesh = make_mesh(
        MeshConfig(ici_mesh_shape=(1, *mesh_shape), axis_names=("replica", *MESH_AXES))
    )
    partitioner = Partitioner(task, mesh, gradients=gradients)
    ids = np.random.default_rng(0).integers(37, size=(12, 9)).astype(np.int32)
    inputs = {"ids": ids[:, :-1], "labels": ids[:, 1:], "weights": np.ones((12, 8), np.float32)}
    key = partitioner.key(0)
    state, outputs = partitioner.train_step(
        partitioner.init(key), partitioner.global_batch(inputs), key
    )
    params = partitioner.layout.unpad(state).mdl_vars["params"]
    return jax.device_get((outputs["metrics"]["loss"], params))


@pytest.mark.slow
@pytest.mark.parametrize("way", nightly_but({"1f1b"}, WAYS))
def test_half_blocks_by_hand_on_stages_train_as_on_one_device(way):
    actual = lm_after_a_step((2, 2, 2), way, "gather")
    expected = lm_after_a_step((1, 1, 1), "gpipe", None)
    assert_trees_close(actual, expected, rtol=1e-4, atol=1e-6)
