"""Sharding presets: splits, losses as on one device, the collectives promised, no silence."""

import collections
import contextlib
import functools
import hashlib
import importlib.util
import inspect
import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import fiddle as fdl
import jax
import numpy as np
import pytest
from flax import nnx

from experiments import lm, moe, pipelined, seq2seq, vision
from praxis_lite import hlo, layers
from praxis_lite.config.text import config_lines
from praxis_lite.errors import ConfigError
from praxis_lite.layers import LOGICAL_DIMS, SHARDING_PRESETS, set_sharding_params
from praxis_lite.layers.sharding_presets import LEFT_WHOLE
from praxis_lite.models import NnxModel
from praxis_lite.models.model import spec_leaves
from praxis_lite.sharding import MeshConfig, make_mesh
from praxis_lite.weights import BaseLayer
from tests.layers import preset_runs
from tests.layers.preset_runs import EVEN, NUM_LAYERS
from tests.mesh_runs import assert_near, drawn

MEGATRON = SHARDING_PRESETS["megatron"]
DATA, ALL = ("replica", "data"), ("replica", "data", "mdl")


def mesh_of(word, shape):
    names = ("data", "expert", "mdl") if word == "expert" else ALL
    return make_mesh(MeshConfig(ici_mesh_shape=shape, axis_names=names))


def specs_of(config):
    """Returns the split of each weight by path."""
    weight_specs = NnxModel(fdl.build(config)).weight_specs()["params"]
    return {path: spec.split_dims_mapping for path, spec in spec_leaves(weight_specs)}


# Of what set_sharding_params(lm) made before there were presets: all mappings of these tasks.
BEFORE_PRESETS = {
    lm.PyDocs: "24bf88ba767eb502",
    lm.Llama: "e11d6b2ab632c76b",
    moe.PyDocs: "d98fbc6ac82f2cfa",
    pipelined.PyDocs: "a60b7af2054a897a",
    seq2seq.Reverse: "242a15f8711751fa",
}


@pytest.mark.parametrize("experiment", BEFORE_PRESETS)
def test_experiments_split_as_before_there_were_presets(experiment):
    lines = sorted(x for x in config_lines(experiment().config()) if "split_dims_mapping" in x)
    found = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    assert found.startswith(BEFORE_PRESETS[experiment]), lines


def small_lm(**settings):
    return fdl.Partial(layers.TransformerLm, 8, 4, 6, 2, 2, **settings)


def test_no_word_is_fsdp_and_tensor_and_a_second_word_replaces_the_first():
    assert set_sharding_params(small_lm()) == set_sharding_params(small_lm(), "fsdp+tensor")
    twice = set_sharding_params(set_sharding_params(small_lm()), "sequence")
    assert twice == set_sharding_params(small_lm(), "sequence")


# How query/w [D, N, K], ffn_layer1 [D, F] and the embedding [D, V] split; the residual stream.
WANTED = {
    "replicated": ((None,) * 3, (None,) * 2, (None,) * 2, (ALL, None, None)),
    "fsdp": (
        (("data", "mdl"), None, None), (("data", "mdl"), None), (("data", "mdl"), None),
        (ALL, None, None),
    ),
    "megatron": ((None, "mdl", None), (None, "mdl"), (None, "mdl"), (DATA, None, None)),
    "fsdp+tensor": (("data", "mdl", None), ("data", "mdl"), ("data", "mdl"), (DATA, None, None)),
    "sequence": ((None, "mdl", None), (None, "mdl"), (None, "mdl"), (DATA, "mdl", None)),
    "expert": (
        ("data", "mdl", None), ("data", "mdl"), ("data", "mdl"),
        (("data", "expert"), None, None),
    ),
}


@pytest.mark.parametrize("word", SHARDING_PRESETS)
def test_a_word_sets_weights_and_activations(word):
    config = set_sharding_params(small_lm(), word)
    specs, block = specs_of(config), "transformer/blocks"
    query, hidden, embedding, residual = WANTED[word]
    assert specs[f"{block}/self_attention/query/w"] == query
    assert specs[f"{block}/ff_layer/ffn_layer1/linear/w"] == hidden
    assert specs[f"{block}/ff_layer/ffn_layer2/linear/w"] == hidden[::-1]
    assert specs["softmax/logits_ffn/linear/w"] == embedding
    parts = config.transformer_layer_tpl
    assert parts.tr_atten_tpl.output_split_dims_mapping == residual
    assert parts.tr_fflayer_tpl.activation_split_dims_mapping == residual
    assert config.softmax_tpl.lookup_split_dims_mapping == residual
    batch, tensor = residual[0], hidden[1]
    assert parts.tr_fflayer_tpl.hidden_split_dims_mapping == (batch, None, tensor)
    assert parts.tr_atten_tpl.activation_split_dims_mapping == (batch, None, tensor, None)
    assert config.softmax_tpl.activation_split_dims_mapping == (batch, None, tensor)


def test_experts_go_with_every_preset_that_says_where():
    def split(word):
        moe_tpl = fdl.Partial(layers.TransformerFeedForwardMoe, num_experts=2)
        config = small_lm(transformer_layer_tpl=fdl.Partial(
            layers.Transformer, tr_fflayer_tpl=moe_tpl
        ))
        set_sharding_params(config, word)
        return moe_tpl.weight_split_dims_mapping, moe_tpl.gate_split_dims_mapping

    assert split("expert") == (("expert", "data", "mdl"), ("data", None))
    assert split("fsdp") == ((None, ("data", "mdl"), None), (("data", "mdl"), None))
    assert split("megatron") == ((None, None, "mdl"), (None, None))
    assert split("fsdp+tensor") == (None, None)


def image_classifier():
    """Returns one of experiments/vision.py with none of its mappings."""
    model = vision.DigitsViT().task().model
    for config in (model.softmax_tpl, model.network_tpl, model.network_tpl.entry_layers_tpl,
                   model.network_tpl.transformer_layers_tpl.block.tr_atten_tpl,
                   model.network_tpl.transformer_layers_tpl.block.tr_fflayer_tpl):
        for name in fdl.ordered_arguments(config):
            if name.endswith("split_dims_mapping"):
                delattr(config, name)
    return model


def test_a_vision_transformer_splits_as_by_hand_and_its_positions_too():
    by_hand, found = specs_of(vision.DigitsViT().task().model), image_classifier()
    assert not any(any(split or ()) for split in specs_of(found).values())
    wanted = by_hand | {"network/entry_stack/pos_emb/emb_var": (None, "data")}
    assert specs_of(set_sharding_params(found)) == wanted
    assert found.softmax_tpl.activation_split_dims_mapping == (DATA, "mdl")


def both_ends(**settings):
    block = fdl.Partial(layers.Transformer, tr_atten_tpl=fdl.Partial(layers.DotProductAttention))
    return fdl.Partial(
        layers.TransformerEncoderDecoder, 17, 6, 11, 3, 1, 1, dim_per_head=4,
        decoder_layer_tpl=block, encoder_embedding_tpl=layers.Embedding, **settings,
    )


def moe_lm():
    experts = fdl.Partial(layers.TransformerFeedForwardMoe, num_experts=3)
    return preset_runs.even_lm(tr_fflayer_tpl=experts)


@pytest.mark.parametrize(
    ("model", "model_dims"),
    [(preset_runs.UNEVEN, 13), (moe_lm, EVEN[2]), (both_ends, 6), (image_classifier, 45)],
)
def test_with_fsdp_a_device_holds_its_share_of_every_matrix(model, model_dims):
    config = set_sharding_params(model(), "fsdp")
    total = held = 0
    for path, spec in spec_leaves(NnxModel(fdl.build(config)).weight_specs()["params"]):
        axes = spec.partition_spec(ALL, path)
        own_rank = len(spec.shape) - len(spec.stack_split_dims_mapping)
        if own_rank < 2 or path.endswith("/b"):
            continue  # Of a norm, a bias; [N, K] of attention.
        assert ("data", "mdl") in axes, path
        split = spec.shape[axes.index(("data", "mdl"))]
        on_a_device = math.prod(spec.shape) // split * math.ceil(split / 8)
        total, held = total + math.prod(spec.shape), held + on_a_device
    assert total / 8 <= held < total / 8 * (1 + 8 / model_dims)


UNEVEN_BATCH = preset_runs.batch_of(11, 7, 37)


@functools.cache
def uneven_run(word, shape):
    """Returns the losses and the compiled step of a model, drawn the same for all."""
    partitioner = preset_runs.partitioner_of(preset_runs.UNEVEN(), word, mesh_of(word, shape))
    return preset_runs.losses(partitioner, UNEVEN_BATCH)


# tests/lm_runs.py has fsdp+tensor, on six meshes.
@pytest.mark.parametrize(
    ("word", "shape"),
    [
        ("replicated", (2, 2, 2)), ("fsdp", (2, 2, 2)), ("megatron", (1, 2, 3)),
        ("sequence", (1, 2, 3)),
    ],
)
def test_uneven_steps_have_the_losses_of_one_device(word, shape):
    wanted, _ = uneven_run("replicated", (1, 1, 1))
    assert wanted[2] < wanted[1] < wanted[0] - 1e-2
    np.testing.assert_allclose(uneven_run(word, shape)[0], wanted, atol=1e-5)


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
        pos_emb_shapes=(2, 3), patch_size=2, image_channels=1, model_dims=6, mlp_dims=11,
        num_xformer_layers=1, num_heads=3,
    )
    vit.entry_layers_tpl.prepend_cls_tokens = 1
    models = {
        "both ends": (both_ends(), lambda module: module(source, target)[0]),
        "vit": (vit, lambda module: module(images)),
    }
    for model, _ in models.values():
        set_sharding_params(model, word)
    return models


def test_other_models_have_the_outputs_of_one_device():
    found, _ = run(other_models("sequence"), mesh_of("sequence", (2, 2, 2)))
    wanted, _ = run(other_models("replicated"), None)
    assert_near(found, wanted, tolerance=5e-6)


# Collectives on a CPU, which has no reduce-scatter: it sums all and keeps a part.

ROWS, TIME, DIMS, HIDDEN, HEADS, PER_HEAD, VOCAB = EVEN
BLOCK = 4 * (4 * DIMS * HEADS * PER_HEAD + 2 * DIMS * HIDDEN)  # Bytes of a block's matrices.
EMBEDDING = 4 * DIMS * VOCAB
VECTORS = 4 * (4 * DIMS + HIDDEN)  # Of a block's norms and biases.


def collectives(word, shape, **settings):
    """Returns bytes of all executions by (kind, group size), and what is in each layer's."""
    found = preset_runs.collectives(word, mesh_of(word, shape), **settings)
    totals, per_layer = collections.Counter(), collections.Counter()
    for one in found:
        totals[one.kind, one.group_size] += one.count * one.bytes
        if one.count == NUM_LAYERS:
            per_layer[one.kind, one.group_size] += one.bytes
    return totals, per_layer, found


def test_fsdp_gathers_each_weight_for_each_pass_and_sends_no_activations():
    totals, per_layer, _ = collectives("fsdp", (1, 4, 2))
    assert totals.keys() == {("all-gather", 8), ("all-reduce", 8)}
    assert 2 * BLOCK <= per_layer["all-gather", 8] <= 2 * BLOCK + VECTORS
    gathered = totals["all-gather", 8] - NUM_LAYERS * per_layer["all-gather", 8]
    assert EMBEDDING <= gathered <= 2 * EMBEDDING
    # Gradients, of which each device keeps its part. The embedding's are of lookup and logits.
    assert BLOCK <= per_layer["all-reduce", 8] <= BLOCK + VECTORS
    summed = totals["all-reduce", 8] - NUM_LAYERS * per_layer["all-reduce", 8]
    assert EMBEDDING <= summed <= 2 * EMBEDDING + 256


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


def test_sequence_gathers_time_where_a_matmul_needs_it_and_no_weight():
    totals, per_layer, found = collectives("sequence", (1, 4, 2))
    activations = 4 * ROWS * TIME * DIMS // 4
    assert {kind for kind, _ in totals} == {"all-gather", "all-reduce"}
    # Each pass gathers twice, and the backward pass the inputs of the matmuls once more.
    assert per_layer["all-gather", 2] == 6 * activations
    gathers = [one for one in found if one.kind == "all-gather"]
    assert {one.bytes for one in gathers if one.count == NUM_LAYERS} == {activations}
    assert EMBEDDING not in {one.bytes for one in gathers}
    scattered = per_layer["all-reduce", 2] - 4 * activations
    assert 0 <= scattered <= 2 * activations + VECTORS


def test_replicated_sums_gradients_and_nothing_else():
    _, compiled = uneven_run("replicated", (2, 2, 2))
    # Of rows that do not divide the lookup's gradient takes all ids.
    ids = 4 * 16 * 7
    assert all(one.kind == "all-reduce" or one.bytes <= ids for one in hlo.collectives(compiled))
    sizes = [math.prod(s.shape) for _, s in spec_leaves(
        NnxModel(fdl.build(preset_runs.UNEVEN())).weight_specs()["params"]
    )]
    _, summed = hlo.summarise(hlo.collectives(compiled))["all-reduce"]
    assert 4 * sum(sizes) <= summed <= 4 * sum(sizes) + 128


def test_expert_exchanges_tokens_and_splits_experts():
    x_BTD = np.random.default_rng(6).normal(size=(ROWS, TIME, DIMS)).astype(np.float32)
    experts = fdl.Partial(layers.TransformerFeedForwardMoe, DIMS, HIDDEN, num_experts=4)
    models = {"experts": (set_sharding_params(experts, "expert"), lambda module: module(x_BTD))}
    found, compiled = run(models, mesh_of("expert", (2, 2, 2)))
    assert_near(found, run(models, None)[0], tolerance=5e-6)
    exchanges = [one for one in hlo.collectives(compiled) if one.kind == "all-to-all"]
    # There and back; tests/layers/test_sharded_experts.py has the backward pass.
    assert [(one.count, one.group_size) for one in exchanges] == [(1, 2), (1, 2)]
    # Two experts of four, half of their hidden dims, gathered along data.
    in_or_out = 4 * 2 * DIMS * HIDDEN // 2
    gathers = [one for one in hlo.collectives(compiled) if one.kind == "all-gather"]
    assert [one.group_size for one in gathers if one.bytes == in_or_out] == [2, 2]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the compiler for TPUs, is missing"
)
def test_a_tpu_scatters_and_gathers_where_megatron_sums():
    env = os.environ | {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    env.pop("XLA_FLAGS", None)  # Of the CPU.
    run = subprocess.run(
        [sys.executable, "-m", "tests.layers.preset_runs"], capture_output=True, text=True,
        check=False, env=env, cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    rows, time, dims, hidden, heads, per_head, vocab = preset_runs.OF_TPU
    activations, in_bfloat16 = 4 * rows * time * dims, 2 * rows * time * dims

    def counts(word, kind, *sizes):
        """Returns how often a layer does it, and how often it is done outside the layers."""
        same = [count for k, size, count in found[word] if k == kind and size in sizes]
        return sum(n == NUM_LAYERS for n in same), sum(n == 1 for n in same)

    assert counts("megatron", "all-reduce", activations) == (4, 2)
    assert not [row for row in found["megatron"] if row[0] == "reduce-scatter"]
    assert counts("sequence", "reduce-scatter", activations // 8) == (4, 2)
    # The embeddings' gradient is gathered in float32.
    assert counts("sequence", "all-gather", in_bfloat16, activations) == (6, 2)
    assert all(size <= 32 * dims for kind, size, _ in found["sequence"] if kind == "all-reduce")
    block = 4 * dims * heads * per_head + 2 * dims * hidden
    assert counts("fsdp", "reduce-scatter", 4 * block // 8) == (1, 0)
    gathered = sum(n * size for kind, size, n in found["fsdp"] if kind == "all-gather")
    assert gathered == 2 * (2 * NUM_LAYERS * block + 2 * dims * vocab)


WRONG = {
    r"no preset 'megatrn'; wanted is one of .*'sequence'.*Did you mean megatron": "megatrn",
    r"no preset 3; wanted is one of": 3,
    r"no layer has dims of the name 'head'; .*Did you mean heads": {"head": "mdl"},
    r"FullSoftmax|SharedEmbeddingSoftmax\.weight_split_dims_mapping has the dims "
    r"\('embed', 'vocab'\), of which 'embed' and 'vocab' both split over the mesh axis 'mdl'": (
        {**MEGATRON, "embed": ("data", "mdl")}
    ),
    r"TransformerFeedForward\.hidden_split_dims_mapping .* 'batch' and 'activation_mlp' both .*"
    r"'data'": {"batch": DATA, "activation_mlp": ("mdl", "data")},
    r"'batch' and 'batch' both": {"batch": ("data", "data")},
    r"'mlp' splits over 0\.5; wanted is a mesh axis": {"mlp": 0.5},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_preset_is_an_error_that_names_it(message):
    with pytest.raises(ConfigError, match=message):
        set_sharding_params(small_lm(), WRONG[message])


def test_a_changed_preset_changes_that_name_alone():
    preset = {**MEGATRON, "mlp": ("data", "mdl")}
    found, before = (specs_of(set_sharding_params(small_lm(), p)) for p in (preset, MEGATRON))
    changed = {path.split("/")[-3] for path, split in found.items() if split != before[path]}
    assert changed == {"ffn_layer1", "ffn_layer2"}
    into_hidden = "transformer/blocks/ff_layer/ffn_layer1/linear/w"
    assert found[into_hidden] == (None, ("data", "mdl")) and before[into_hidden] == (None, "mdl")


class OwnFeedForward(BaseLayer):
    """A user's layer."""

    def __init__(
        self, input_dims, hidden_dims, *, weight_split_dims_mapping=None,
        activation_split_dims_mapping=None, ln_tpl=None, rngs: nnx.Rngs,
    ):
        self.w = self.weight((input_dims, input_dims), weight_split_dims_mapping, rngs=rngs)


def lm_with_block(**parts):
    return small_lm(transformer_layer_tpl=fdl.Partial(layers.Transformer, **parts))


OWN = fdl.Partial(OwnFeedForward)
EXPERTS = fdl.Partial(layers.TransformerFeedForwardMoe, num_experts=2)
SET = {"weight_split_dims_mapping": (None, "mdl")}
UNKNOWN = {
    "a user's layer": (lm_with_block(tr_fflayer_tpl=OWN), "megatron", "OwnFeedForward"),
    "weights whole, as asked": (lm_with_block(tr_fflayer_tpl=OWN), "replicated", None),
    "its class": (lm_with_block(tr_fflayer_tpl=OwnFeedForward), "fsdp", "OwnFeedForward"),
    "experts of a dense preset": (
        lm_with_block(tr_fflayer_tpl=EXPERTS), "fsdp+tensor", "TransformerFeedForwardMoe"
    ),
    "convolutions": (vision.DigitsResNet().network(), "fsdp", None),
    "a convolution": (
        fdl.Partial(layers.ResNet, conv_params=fdl.Partial(layers.ConvBNAct)), "fsdp", "ConvBNAct"
    ),
    "a dense layer alone": (fdl.Partial(layers.Mlp, 3, (5,), 2), "fsdp", "Mlp"),
    "split by hand": (
        lm_with_block(tr_fflayer_tpl=fdl.Partial(OwnFeedForward, **SET)), "megatron", None
    ),
    "experts split by hand": (
        lm_with_block(tr_fflayer_tpl=fdl.copy_with(EXPERTS, **SET)), "fsdp+tensor", None
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_no_table_knows_is_said_once(name, caplog):
    config, word, wanted = UNKNOWN[name]
    with caplog.at_level(logging.WARNING, "praxis_lite"):
        set_sharding_params(fdl.copy_with(config), word)
    if wanted is None:
        assert not caplog.messages
    else:
        (message,) = caplog.messages
        assert message.startswith(f"set_sharding_params leaves {wanted} as it is, whole on every")
        assert "weight_split_dims_mapping" in message


@pytest.mark.parametrize("model", [preset_runs.UNEVEN, moe_lm, both_ends, image_classifier])
def test_of_this_librarys_models_there_is_nothing_to_say(model, caplog):
    for word in SHARDING_PRESETS.keys() - {"fsdp+tensor"}:
        set_sharding_params(model(), word)
    assert not caplog.messages


def test_a_users_layer_splits_once_it_has_a_row(monkeypatch, caplog):
    row = {"weight_split_dims_mapping": ("embed", "own")}
    monkeypatch.setitem(LOGICAL_DIMS, OwnFeedForward, row)
    config = lm_with_block(tr_fflayer_tpl=OwnFeedForward)
    set_sharding_params(config, {"embed": "data", "own": "mdl"})
    found = config.transformer_layer_tpl.tr_fflayer_tpl
    assert found == fdl.Partial(OwnFeedForward, weight_split_dims_mapping=("data", "mdl"))
    assert not caplog.messages


def test_templates_inside_adapters_and_partials_are_reached():
    attention = layers.DotProductAttention
    wanted = ("data", "mdl", None)
    for template in (
        fdl.Partial(layers.adapted, base_tpl=attention, rank=2),
        layers.lora(attention, rank=2),
        functools.partial(attention, use_bias=False),
    ):
        specs = specs_of(set_sharding_params(lm_with_block(tr_atten_tpl=template)))
        assert specs["transformer/blocks/self_attention/query/w"] == wanted


# Their mappings come from the layer that has them; or are the user's to set.
WITHOUT_A_ROW = {
    "AttentionProjection", "Bias", "CombinedQKVProjectionLayer", "Conv2D", "ConvBNAct",
    "DepthwiseConv1D", "Einsum", "FeedForward", "Linear", "Mlp", "OneHeadedAttentionProjection",
    "RgLru",
}


def test_every_layer_with_weights_to_split_has_a_row_or_a_reason():
    without = set()
    for name in layers.__all__:
        layer = getattr(layers, name)
        if inspect.isclass(layer) and "weight_split_dims_mapping" in inspect.signature(
            layer
        ).parameters and not issubclass(layer, (*LOGICAL_DIMS, *LEFT_WHOLE)):
            without.add(name)
    assert without == WITHOUT_A_ROW


def test_every_field_exists_and_every_name_of_a_preset_is_some_layers():
    names = set()
    for layer, row in LOGICAL_DIMS.items():
        for field, dims in row.items():
            assert field in inspect.signature(layer).parameters
            names |= set() if isinstance(dims, dict) else set(dims)
    for preset in SHARDING_PRESETS.values():
        assert preset.keys() <= names
        set_sharding_params(small_lm(), dict(preset))
