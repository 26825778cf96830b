"""Every field of the configuration classes of transformers 5.24 is understood or refused."""

import dataclasses
import json

import fiddle as fdl
import pytest

from praxis_lite import ConfigError
from praxis_lite.huggingface.decoder import lm_config
from praxis_lite.huggingface.family import families, family_of
from tests.support.goldens import GOLDENS

FIELDS = json.loads((GOLDENS / "hf_fields.json").read_text(encoding="utf-8"))
FAMILIES = sorted(set(FIELDS) - {"transformers"})
# Without these a config.json is refused: no default of a size is any use.
SIZES = {
    "vocab_size",
    "hidden_size",
    "n_embd",
    "intermediate_size",
    "num_hidden_layers",
    "n_layer",
    "num_attention_heads",
    "n_head",
}
# Two names of one setting, in transformers' `attribute_map`.
ALIASES = {
    "gpt2": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    "mixtral": {"num_experts": "num_local_experts"},
    "gpt_oss": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_experts": "num_local_experts"},
    "deepseek_v3": {
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
}


def model_of(config):
    settings = family_of(config).decoder_settings(config)
    # Null is as many as there are heads.
    same = {"num_kv_heads": settings.num_kv_heads or settings.num_heads}
    return lm_config(dataclasses.replace(settings, **same))


def defaults_of(family):
    (architecture,) = (name for name, x in families().items() if x.name == family)
    fields = {name: x for name, x in FIELDS[family].items() if name not in ALIASES.get(family, ())}
    # Seven layers have each kind of layer, and are quick to compare.
    layers = {"n_layer": 7} if family == "gpt2" else {"num_hidden_layers": 7}
    return {"architectures": [architecture], **fields, **layers}


def test_the_classes_are_all_families():
    assert {family.name for family in families().values()} == set(FAMILIES)
    assert sum(len(FIELDS[family]) for family in FAMILIES) > 400


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_of_sizes_alone_is_the_whole_default_of_transformers(family):
    whole = defaults_of(family)
    sizes = {name: x for name, x in whole.items() if name in SIZES or name == "architectures"}
    assert model_of(sizes) == model_of(whole)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_each_absent_field_is_as_transformers_has_it(family):
    whole = defaults_of(family)
    expected = model_of(whole)
    for field in whole.keys() - SIZES - {"architectures"}:
        assert model_of({name: x for name, x in whole.items() if name != field}) == expected, field


@pytest.mark.parametrize("family", sorted(ALIASES))
def test_a_field_has_all_its_names_and_one_value(family):
    whole = defaults_of(family)
    for alias, field in ALIASES[family].items():
        renamed = {alias if name == field else name: x for name, x in whole.items()}
        assert model_of(renamed) == model_of(whole)
        with pytest.raises(ConfigError, match=f"{alias}.*{field}|{field}.*{alias}"):
            model_of({**whole, alias: whole[field] + 1})


@pytest.mark.parametrize(
    ("family", "field", "words"),
    [
        ("gpt2", "add_cross_attention", "False"),
        ("gemma", "use_bidirectional_attention", "False"),
        ("gemma3", "use_bidirectional_attention", "False"),
        ("mixtral", "router_jitter_noise", r"0\.0"),
    ],
)
def test_a_field_that_is_refused_has_its_reason(family, field, words):
    value = 0.1 if field == "router_jitter_noise" else True
    with pytest.raises(ConfigError, match=f"{field}.*{value}.*{words}"):
        model_of({**defaults_of(family), field: value})


@pytest.mark.parametrize(
    ("family", "fields", "path", "value"),
    [
        ("mistral", {"sliding_window": None}, "tr_atten_tpl.window", None),
        ("gemma2", {"attn_logit_softcapping": None}, "tr_atten_tpl.atten_logit_cap", 0.0),
        ("gpt2", {"scale_attn_weights": False}, "tr_atten_tpl.hidden_dim", 12),
        ("gpt2", {"resid_pdrop": 0.0}, "residual_dropout_prob", 0.0),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "tr_fflayer_tpl.swiglu_alpha", 1.5),
        ("gemma", {"hidden_act": "gelu"}, "tr_fflayer_tpl.activation", "gelu"),
        ("gemma", {"hidden_act": "silu"}, "tr_fflayer_tpl.activation", "silu"),
        ("llama", {"pretraining_tp": 2}, "tr_atten_tpl.window", None),
        (
            "qwen3_moe",
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 5},
            "tr_atten_tpl.window",
            9,
        ),
    ],
)
def test_a_field_is_followed(family, fields, path, value):
    leaf = model_of({**defaults_of(family), **fields}).transformer_layer_tpl
    leaf = leaf[0] if isinstance(leaf, tuple) else leaf
    for name in path.split("."):
        leaf = getattr(leaf, name, None if value in (None, 0.0) else fdl.NO_VALUE)
    assert leaf == value


def test_a_scaling_that_says_nothing_is_as_if_it_were_not_there():
    for family in ("llama", "gpt_oss"):
        whole = defaults_of(family)
        expected = model_of(whole)
        assert model_of({**whole, "rope_scaling": {}}) == expected
        del whole["rope_parameters"]
        assert model_of({**whole, "rope_scaling": {}, "rope_parameters": None}) == expected


def test_layers_that_divide_their_scores_differ():
    config = {**defaults_of("gpt2"), "scale_attn_by_inverse_layer_idx": True, "n_layer": 3}
    blocks = model_of(config).transformer_layer_tpl
    dims = [block.tr_atten_tpl.hidden_dim for block in blocks]
    # A scale of hidden_dim / num_heads to the -0.5: 1 / (layer + 1) of that of 64 dims a head.
    assert [(x / 12) ** -0.5 for x in dims] == pytest.approx([1 / 8, 1 / 16, 1 / 24])


def test_whole_heads_rotate_but_where_a_family_has_parts():
    scaling = {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
    with pytest.raises(ConfigError, match="partial_rotary_factor.*0.5"):
        model_of({**defaults_of("llama"), "rope_parameters": scaling})
    model_of({**defaults_of("phi3"), "rope_parameters": scaling})
