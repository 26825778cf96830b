"""Sharding presets on meshes: the losses of one device, and the collectives that they promise."""

import collections
import contextlib
import functools
import math

import fiddle as fdl
import jax
import numpy as np
import pytest

from praxis_lite import layers
from praxis_lite.core import NnxModel
from praxis_lite.core.models.model import spec_leaves
from praxis_lite.layers import set_sharding_params
from praxis_tools.check.asserts.layers import assert_near, drawn
from praxis_tools.explain import hlo
from tests.layers.whole_model import preset_runs
from tests.layers.whole_model.preset_runs import EVEN, NUM_LAYERS, both_ends, mesh_of
from tests.support.on_tpu import needs_libtpu, printed_by

UNEVEN_BATCH = preset_runs.batch_of(11, 7, 37)


@functools.cache
def uneven_run(word, shape):
    """Returns the losses and the compiled step of a model, drawn the same for all."""
    partitioner = preset_runs.partitioner_of(preset_runs.UNEVEN(), word, mesh_of(word, shape))
    return preset_runs.losses(partitioner, UNEVEN_BATCH)


@pytest.mark.slow
# tests/support/lm_runs.py has fsdp+tensor, on six meshes; test_accumulation.py has megatron.
@pytest.mark.parametrize(
    ("word", "shape"),
    [
        ("fsdp", (2, 2, 2)),
        ("sequence", (1, 2, 3)),
    ],
)
def test_uneven_steps_have_the_losses_of_one_device(word, shape):
    expected, _ = uneven_run("replicated", (1, 1, 1))
    assert expected[2] < expected[1] < expected[0] - 1e-2
    np.testing.assert_allclose(uneven_run(word, shape)[0], expected, atol=1e-5)


def run(models, mesh):
    """Returns by name the outputs of models whose weights `drawn` gives, and what was compiled."""
    built = {name: NnxModel(fdl.build(config)) for name, (config, _) in models.items()}

    def placed(model, mdl_vars):
        if mesh is None:
            return mdl_vars
        specs = [s.partition_spec(mesh.axis_names, p) for p, s in spec_leaves(model.weight_specs())]
        leaves, treedef = jax.tree.flatten(mdl_vars)
        return jax.tree.unflatten(treedef, map(jax.lax.with_sharding_constraint, leaves, specs))

    @jax.jit
    def outputs(all_vars):
        return {
            name: models[name][1](model.module(placed(model, all_vars[name])))
            for name, model in built.items()
        }

    arguments = {name: drawn(model) for name, model in built.items()}
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        compiled = outputs.lower(arguments).compile()
        return jax.device_get(compiled(arguments)), compiled


def other_models(word):
    """Returns a config and a call of each, on sizes that no axis divides."""
    rng = np.random.default_rng(6)
    source, target = rng.integers(0, 17, (2, 5, 7)).astype(np.int32)
    images = rng.normal(size=(5, 4, 6, 1)).astype(np.float32)
    vit = layers.build_vision_transformer(
        pos_emb_shapes=(2, 3),
        patch_size=2,
        image_channels=1,
        model_dims=6,
        mlp_dims=11,
        num_xformer_layers=1,
        num_heads=3,
    )
    vit.entry_layers_tpl.prepend_cls_tokens = 1
    models = {
        "both ends": (both_ends(), lambda module: module(source, target)[0]),
        "vit": (vit, lambda module: module(images)),
    }
    for model, _ in models.values():
        set_sharding_params(model, word)
    return models


@pytest.mark.slow
def test_other_models_have_the_outputs_of_one_device():
    actual, _ = run(other_models("sequence"), mesh_of("sequence", (2, 2, 2)))
    expected, _ = run(other_models("replicated"), None)
    assert_near(actual, expected, tolerance=5e-6)


# Collectives on a CPU, which has no reduce-scatter: it sums all and keeps a part.

ROWS, TIME, DIMS, HIDDEN, HEADS, PER_HEAD, VOCAB = EVEN
BLOCK = 4 * (4 * DIMS * HEADS * PER_HEAD + 2 * DIMS * HIDDEN)  # Bytes of a block's matrices.
EMBEDDING = 4 * DIMS * VOCAB
VECTORS = 4 * (4 * DIMS + HIDDEN)  # Of a block's norms and biases.


def collectives(word, shape, **settings):
    """Returns bytes of all executions by (kind, group size), and what is in each layer's."""
    actual = preset_runs.collectives(word, mesh_of(word, shape), **settings)
    totals, per_layer = collections.Counter(), collections.Counter()
    for item in actual:
        totals[item.kind, item.group_size] += item.count * item.bytes
        if item.count == NUM_LAYERS:
            per_layer[item.kind, item.group_size] += item.bytes
    return totals, per_layer, actual


@pytest.mark.slow
def test_fsdp_gathers_each_weight_for_each_pass_and_sends_no_activations_but_the_embeddings():
    totals, per_layer, _ = collectives("fsdp", (1, 4, 2))
    assert totals.keys() == {("all-gather", 8), ("all-reduce", 8), ("all-to-all", 8)}
    # Each device looks up its columns for all; the rows, and their gradients, are exchanged.
    assert totals["all-to-all", 8] == 2 * 4 * ROWS * TIME * DIMS // 8
    assert 2 * BLOCK <= per_layer["all-gather", 8] <= 2 * BLOCK + VECTORS
    gathered = totals["all-gather", 8] - NUM_LAYERS * per_layer["all-gather", 8]
    assert EMBEDDING <= gathered <= 2 * EMBEDDING
    # Gradients, of which each device keeps its part. The embedding's are of lookup and logits.
    assert BLOCK <= per_layer["all-reduce", 8] <= BLOCK + VECTORS
    summed = totals["all-reduce", 8] - NUM_LAYERS * per_layer["all-reduce", 8]
    assert EMBEDDING <= summed <= 2 * EMBEDDING + 256


@pytest.mark.slow
def test_megatron_sums_activations_over_mdl_and_gradients_over_data():
    totals, per_layer, _ = collectives("megatron", (1, 4, 2))
    activations = 4 * ROWS * TIME * DIMS // 4
    assert per_layer.keys() == {("all-reduce", 2), ("all-reduce", 4)}
    # After attention and feed-forward, and before them in the backward pass: there the CPU's
    # compiler sums what queries, keys and values give apart.
    assert 4 * activations <= per_layer["all-reduce", 2] <= 6 * activations
    assert per_layer["all-reduce", 2] % activations == 0
    assert BLOCK // 2 < per_layer["all-reduce", 4] <= BLOCK // 2 + VECTORS
    # Ids, weights and the statistics of the softmax; no weight.
    assert totals["all-gather", 2] < EMBEDDING // 2 and ("all-gather", 4) not in totals


@pytest.mark.slow
def test_sequence_gathers_time_where_a_matmul_needs_it_and_no_weight():
    totals, per_layer, actual = collectives("sequence", (1, 4, 2))
    activations = 4 * ROWS * TIME * DIMS // 4
    assert {kind for kind, _ in totals} == {"all-gather", "all-reduce"}
    # Each pass gathers twice, and the backward pass the inputs of the matmuls once more.
    assert per_layer["all-gather", 2] == 6 * activations
    gathers = [item for item in actual if item.kind == "all-gather"]
    assert {gather.bytes for gather in gathers if gather.count == NUM_LAYERS} == {activations}
    assert EMBEDDING not in {element.bytes for element in gathers}
    scattered = per_layer["all-reduce", 2] - 4 * activations
    assert 0 <= scattered <= 2 * activations + VECTORS


@pytest.mark.slow
def test_replicated_sums_gradients_and_nothing_else():
    _, compiled = uneven_run("replicated", (2, 2, 2))
    # Of rows that do not divide the lookup's gradient takes all ids.
    ids = 4 * 16 * 7
    assert all(item.kind == "all-reduce" or item.bytes <= ids for item in hlo.collectives(compiled))
    sizes = [
        math.prod(s.shape)
        for _, s in spec_leaves(NnxModel(fdl.build(preset_runs.UNEVEN())).weight_specs()["params"])
    ]
    _, summed = hlo.summarize(hlo.collectives(compiled))["all-reduce"]
    assert 4 * sum(sizes) <= summed <= 4 * sum(sizes) + 128


def test_expert_exchanges_tokens_and_splits_experts():
    x_BTD = np.random.default_rng(6).normal(size=(ROWS, TIME, DIMS)).astype(np.float32)
    experts = fdl.Partial(layers.TransformerFeedForwardMoe, DIMS, HIDDEN, num_experts=4)
    models = {"experts": (set_sharding_params(experts, "expert"), lambda module: module(x_BTD))}
    actual, compiled = run(models, mesh_of("expert", (2, 2, 2)))
    assert_near(actual, run(models, None)[0], tolerance=5e-6)
    exchanges = [item for item in hlo.collectives(compiled) if item.kind == "all-to-all"]
    # There and back; tests/layers/moe/test_sharded_experts.py has the backward pass.
    assert [(exchange.count, exchange.group_size) for exchange in exchanges] == [(1, 2), (1, 2)]
    # Two experts of four, half of their hidden dims, gathered along data.
    in_or_out = 4 * 2 * DIMS * HIDDEN // 2
    gathers = [element for element in hlo.collectives(compiled) if element.kind == "all-gather"]
    assert [gather.group_size for gather in gathers if gather.bytes == in_or_out] == [2, 2]


@pytest.mark.slow
@needs_libtpu
def test_a_tpu_scatters_and_gathers_where_megatron_sums():
    actual = printed_by("tests.layers.whole_model.preset_runs")
    rows, time, dims, hidden, heads, per_head, vocab = preset_runs.OF_TPU
    activations, in_bfloat16 = 4 * rows * time * dims, 2 * rows * time * dims

    def counts(word, kind, *sizes):
        """Returns how often a layer does it, and how often it is done outside the layers."""
        same = [count for k, size, count in actual[word] if k == kind and size in sizes]
        return sum(n == NUM_LAYERS for n in same), sum(n == 1 for n in same)

    assert counts("megatron", "all-reduce", activations) == (4, 2)
    assert not [row for row in actual["megatron"] if row[0] == "reduce-scatter"]
    assert counts("sequence", "reduce-scatter", activations // 8) == (4, 2)
    # The embeddings' gradient is gathered in float32.
    assert counts("sequence", "all-gather", in_bfloat16, activations) == (6, 2)
    assert all(size <= 32 * dims for kind, size, _ in actual["sequence"] if kind == "all-reduce")
    block = 4 * dims * heads * per_head + 2 * dims * hidden
    assert counts("fsdp", "reduce-scatter", 4 * block // 8) == (1, 0)
    gathered = sum(n * size for kind, size, n in actual["fsdp"] if kind == "all-gather")
    # Of the vocabulary only the softmax's table. The lookup's stays split by its columns: every
    # device looks all ids up in its own, and rows are exchanged for columns there and back.
    assert gathered == 2 * (2 * NUM_LAYERS * block + dims * vocab) + 4 * rows * time
    assert counts("fsdp", "all-to-all", activations // 8) == (0, 2)
