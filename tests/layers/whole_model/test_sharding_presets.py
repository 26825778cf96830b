"""Sharding presets: what they split, wrong ones, and what they say of layers that none knows."""

import functools
import inspect
import logging
import math

import fiddle as fdl
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.core import NnxModel
from praxis_lite.core.models.model import spec_leaves
from praxis_lite.experiments import vision
from praxis_lite.layers import (
    SHARDING_PRESETS,
    BaseLayer,
    set_sharding_params,
    splits,
)
from praxis_lite.layers.whole_model.sharding_presets import REPLICATED_LAYERS
from tests.layers.whole_model import preset_runs
from tests.layers.whole_model.preset_runs import AXES, EVEN, both_ends

MEGATRON = SHARDING_PRESETS["megatron"]
DATA = ("replica", "data")


def specs_of(config):
    """Returns the split of each weight by path."""
    weight_specs = NnxModel(fdl.build(config)).weight_specs()["params"]
    return {path: spec.split_dims_mapping for path, spec in spec_leaves(weight_specs)}


def small_lm(**settings):
    return fdl.Partial(layers.TransformerLm, 8, 4, 6, 2, 2, **settings)


def test_no_word_is_fsdp_and_tensor_and_a_second_word_replaces_the_first():
    assert set_sharding_params(small_lm()) == set_sharding_params(small_lm(), "fsdp+tensor")
    for first in ("fsdp+tensor", "fsdp+ring"):
        twice = set_sharding_params(set_sharding_params(small_lm(), first), "sequence")
        assert specs_of(twice) == specs_of(set_sharding_params(small_lm(), "sequence"))
        block = twice.transformer_layer_tpl
        assert getattr(block.tr_atten_tpl, "tensor_parallel", None) is None
        assert block.tr_atten_tpl.output_split_dims_mapping == (DATA, "mdl", None)


# The presets that split time everywhere, with what moves in attention.
CONTEXT = {
    "fsdp+context": "all_to_all+ring",
    "fsdp+context_gather": "gather",
    "fsdp+context_ring": "ring",
    "fsdp+context_heads": "all_to_all",
}
# How query/w [D, N, K], ffn_layer1 [D, F] and the embedding [D, V] split; the residual stream.
WANTED = {
    "replicated": ((None,) * 3, (None,) * 2, (None,) * 2, (AXES, None, None)),
    "fsdp": (
        (("data", "mdl"), None, None),
        (("data", "mdl"), None),
        (("data", "mdl"), None),
        (AXES, None, None),
    ),
    "megatron": ((None, "mdl", None), (None, "mdl"), (None, "mdl"), (DATA, None, None)),
    "fsdp+tensor": (("data", "mdl", None), ("data", "mdl"), ("data", "mdl"), (DATA, "mdl", None)),
    "sequence": ((None, "mdl", None), (None, "mdl"), (None, "mdl"), (DATA, "mdl", None)),
    "fsdp+ring": (("data", "mdl", None), ("data", "mdl"), ("data", "mdl"), (AXES, None, None)),
    "fsdp+mlp_ring": (("data", "mdl", None), ("data", "mdl"), ("data", "mdl"), (AXES, None, None)),
    "expert": (
        ("data", "mdl", None),
        ("data", "mdl"),
        ("data", "mdl"),
        (("data", "expert"), None, None),
    ),
    "fsdp+expert": (
        (("data", "expert", "mdl"), None, None),
        (("data", "expert", "mdl"), None),
        (("data", "expert", "mdl"), None),
        (("data", "expert", "mdl"), None, None),
    ),
    **dict.fromkeys(
        CONTEXT,
        (
            (("data", "mdl"), None, None),
            (("data", "mdl"), None),
            (("data", "mdl"), None),
            (DATA, "mdl", None),
        ),
    ),
}
# Of attention and feed-forward.
BY_HAND = {"fsdp+ring": ("ring", "ring"), "fsdp+mlp_ring": ("weights", "ring")}


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
    halves = (parts.tr_atten_tpl, parts.tr_fflayer_tpl)
    by_hand = tuple(getattr(halve, "tensor_parallel", None) for halve in halves)
    assert by_hand == BY_HAND.get(word, (None, None))
    batch, tensor = SHARDING_PRESETS[word]["batch"], hidden[1]
    time = "mdl" if word in CONTEXT else None
    assert parts.tr_fflayer_tpl.hidden_split_dims_mapping == (batch, time, tensor)
    assert parts.tr_atten_tpl.activation_split_dims_mapping == (batch, time, tensor, None)
    assert getattr(parts.tr_atten_tpl, "context_parallel", None) == CONTEXT.get(word)
    assert config.softmax_tpl.activation_split_dims_mapping == (batch, time, tensor)


def test_experts_go_with_every_preset_that_says_where():
    def split(word):
        moe_tpl = fdl.Partial(layers.TransformerFeedForwardMoe, num_experts=2)
        config = small_lm(
            transformer_layer_tpl=fdl.Partial(layers.Transformer, tr_fflayer_tpl=moe_tpl)
        )
        set_sharding_params(config, word)
        return moe_tpl.weight_split_dims_mapping, moe_tpl.gate_split_dims_mapping

    assert split("expert") == (("expert", "data", "mdl"), ("data", None))
    whole = ("data", "expert", "mdl")
    assert split("fsdp+expert") == (("expert", ("data", "mdl"), None), (whole, None))
    assert split("fsdp") == ((None, ("data", "mdl"), None), (("data", "mdl"), None))
    assert split("megatron") == ((None, None, "mdl"), (None, None))
    assert split("fsdp+tensor") == (None, None)


def image_classifier():
    """Returns one of experiments/vision.py with none of its mappings."""
    model = vision.DigitsViT().task().model
    for config in (
        model.softmax_tpl,
        model.network_tpl,
        model.network_tpl.entry_layers_tpl,
        model.network_tpl.transformer_layers_tpl.block.tr_atten_tpl,
        model.network_tpl.transformer_layers_tpl.block.tr_fflayer_tpl,
    ):
        for name in fdl.ordered_arguments(config):
            if name.endswith("split_dims_mapping"):
                delattr(config, name)
    return model


def test_a_vision_transformer_splits_as_by_hand_and_its_positions_too():
    by_hand, actual = specs_of(vision.DigitsViT().task().model), image_classifier()
    assert not any(any(split or ()) for split in specs_of(actual).values())
    expected = by_hand | {"network/entry_stack/pos_emb/emb_var": (None, "data")}
    assert specs_of(set_sharding_params(actual)) == expected
    assert actual.softmax_tpl.activation_split_dims_mapping == (DATA, "mdl")


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
        axes = spec.partition_spec(AXES, path)
        own_rank = len(spec.shape) - len(spec.stack_split_dims_mapping)
        if own_rank < 2 or path.endswith("/b"):
            continue  # Of a norm, a bias; [N, K] of attention.
        assert ("data", "mdl") in axes, path
        split = spec.shape[axes.index(("data", "mdl"))]
        on_a_device = math.prod(spec.shape) // split * math.ceil(split / 8)
        total, held = total + math.prod(spec.shape), held + on_a_device
    assert total / 8 <= held < total / 8 * (1 + 8 / model_dims)


WRONG = {
    r"preset.*'megatrn'.*sequence.*megatron\?": "megatrn",
    "preset.* 3;": 3,
    "preset.*'head'.*heads": {"head": "mdl"},
    r"Softmax\.weight_split_dims_mapping.*\('embed', 'vocab'\).*'mdl'": (
        {**MEGATRON, "embed": ("data", "mdl")}
    ),
    r"TransformerFeedForward\.hidden_split_dims_mapping.*'batch'.*'activation_mlp'.*'data'": {
        "batch": DATA,
        "activation_mlp": ("mdl", "data"),
    },
    r"activation_split_dims_mapping.*'batch'.*'batch'": {"batch": ("data", "data")},
    r"preset\['mlp'\].*0\.5": {"mlp": 0.5},
    r"preset\['mlp_collectives'\].*'rings'.*ring": {"mlp_collectives": "rings"},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_preset_is_an_error_that_names_it(message):
    with pytest.raises(ConfigError, match=message):
        set_sharding_params(small_lm(), WRONG[message])


def test_a_changed_preset_changes_that_name_alone():
    preset = {**MEGATRON, "mlp": ("data", "mdl")}
    actual, before = (specs_of(set_sharding_params(small_lm(), p)) for p in (preset, MEGATRON))
    changed = {path.split("/")[-3] for path, split in actual.items() if split != before[path]}
    assert changed == {"ffn_layer1", "ffn_layer2"}
    into_hidden = "transformer/blocks/ff_layer/ffn_layer1/linear/w"
    assert actual[into_hidden] == (None, ("data", "mdl")) and before[into_hidden] == (None, "mdl")


class OwnFeedForward(BaseLayer):
    """A user's layer."""

    def __init__(
        self,
        input_dims,
        hidden_dims,
        *,
        weight_split_dims_mapping=None,
        activation_split_dims_mapping=None,
        ln_tpl=None,
        rngs: nnx.Rngs,
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
        lm_with_block(tr_fflayer_tpl=EXPERTS),
        "fsdp+tensor",
        "TransformerFeedForwardMoe",
    ),
    "convolutions": (vision.DigitsResNet().network(), "fsdp", None),
    "a convolution": (
        fdl.Partial(layers.ResNet, conv_params=fdl.Partial(layers.ConvBNAct)),
        "fsdp",
        "ConvBNAct",
    ),
    "a dense layer alone": (fdl.Partial(layers.Mlp, 3, (5,), 2), "fsdp", "Mlp"),
    "split by hand": (
        lm_with_block(tr_fflayer_tpl=fdl.Partial(OwnFeedForward, **SET)),
        "megatron",
        None,
    ),
    "experts split by hand": (
        lm_with_block(tr_fflayer_tpl=fdl.copy_with(EXPERTS, **SET)),
        "fsdp+tensor",
        None,
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_no_table_knows_is_said_once(name, caplog):
    config, word, expected = UNKNOWN[name]
    with caplog.at_level(logging.WARNING, "praxis_lite"):
        set_sharding_params(fdl.copy_with(config), word)
    if expected is None:
        assert not caplog.messages
    else:
        (message,) = caplog.messages
        start = f"set_sharding_params does not change {expected}, which is replicated"
        assert message.startswith(start)
        assert "weight_split_dims_mapping" in message


def test_a_model_without_layers_of_this_library_is_reported(caplog):
    set_sharding_params(fdl.Partial(nnx.Linear, 3, 5), "fsdp")
    (message,) = caplog.messages
    assert "weights of Linear" in message and "task.weight_sharding" in message


@pytest.mark.parametrize("model", [preset_runs.UNEVEN, moe_lm, both_ends, image_classifier])
def test_of_this_librarys_models_there_is_nothing_to_say(model, caplog):
    for word in SHARDING_PRESETS.keys() - {"fsdp+tensor"}:
        set_sharding_params(model(), word)
    assert not caplog.messages


class NamedFeedForward(OwnFeedForward):
    splits = splits(weight=("embed", "own"))


def test_a_users_layer_splits_once_it_names_its_dims(caplog):
    config = lm_with_block(tr_fflayer_tpl=NamedFeedForward)
    set_sharding_params(config, {"embed": "data", "own": "mdl"})
    actual = config.transformer_layer_tpl.tr_fflayer_tpl
    assert actual == fdl.Partial(NamedFeedForward, weight_split_dims_mapping=("data", "mdl"))
    assert not caplog.messages


def test_templates_inside_adapters_and_partials_are_reached():
    attention = layers.DotProductAttention
    expected = ("data", "mdl", None)
    for template in (
        fdl.Partial(layers.adapted, base_tpl=attention, rank=2),
        layers.lora(attention, rank=2),
        functools.partial(attention, use_bias=False),
    ):
        specs = specs_of(set_sharding_params(lm_with_block(tr_atten_tpl=template)))
        assert specs["transformer/blocks/self_attention/query/w"] == expected


# Their mappings come from the layer that has them; or are the user's to set.
WITHOUT_NAMES = {
    "AttentionProjection",
    "Bias",
    "CombinedQKVProjectionLayer",
    "Conv2D",
    "ConvBNAct",
    "DepthwiseConv1D",
    "Einsum",
    "FeedForward",
    "Linear",
    "Mlp",
    "OneHeadedAttentionProjection",
    "RgLru",
}


def test_every_layer_with_weights_to_split_names_their_dims_or_has_a_reason():
    without = set()
    for name in layers.__all__:
        layer = getattr(layers, name)
        if (
            inspect.isclass(layer)
            and "weight_split_dims_mapping" in inspect.signature(layer).parameters
            and not issubclass(layer, REPLICATED_LAYERS)
            and not any(layer.splits["weight_split_dims_mapping"])
        ):
            without.add(name)
    assert without == WITHOUT_NAMES


def test_every_field_exists_and_every_name_of_a_preset_is_some_layers():
    names = set()
    for name in layers.__all__:
        layer = getattr(layers, name)
        if inspect.isclass(layer) and issubclass(layer, BaseLayer):
            for field, dims in (*layer.splits.items(), *layer.preset_settings.items()):
                assert field in inspect.signature(layer).parameters, (layer, field)
                names |= {dims} if isinstance(dims, str) else set(dims)
    for preset in SHARDING_PRESETS.values():
        # Model dims of experts are "embed", for which a preset may have another entry.
        assert preset.keys() <= names | {"expert_embed"}
        set_sharding_params(small_lm(), dict(preset))
