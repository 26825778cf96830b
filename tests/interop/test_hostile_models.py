"""Directories of strangers' models: fields of any type, tensors that are no weights, odd files."""

import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from praxis_lite import ConfigError
from praxis_lite.checkpoints.huggingface.decoder import lm_config
from praxis_lite.checkpoints.huggingface.family import family_of, settings_in
from praxis_lite.checkpoints.huggingface.tensor_files import TensorFiles
from praxis_lite.interop import huggingface
from tests.support.goldens import GOLDENS

FAMILIES = sorted(path.name for path in (GOLDENS / "hf").iterdir())
WRONG = [
    None, True, False, 0, -1, 7, 10**12, 2**31, 0.5, 61.0, 1e308, float("inf"), float("nan"), "",
    "false", "x" * 5_000, [], [None], [1.0] * 3, {}, {"a": None}, {"rope_type": "yarn"},
]


def config_of(family):
    return json.loads((GOLDENS / "hf" / family / "config.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_any_value_of_any_field_is_understood_or_refused_in_a_paragraph(family):
    config = config_of(family)
    fields = {*config, *family_of(config).settings, *family_of(config).only}
    refused = 0
    for field in sorted(fields):
        for value in WRONG:
            changed = {**config, field: value}
            try:
                lm_config(family_of(changed).decoder_settings(changed))
            except ConfigError as error:
                assert "config.json" in str(error) and len(str(error)) < 1_500
                refused += 1
    assert refused > 10 * len(family_of(config).settings)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings.*true or false"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers is 2147483648"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None},
         "a divisor of hidden_size"),
        ({"rope_scaling": "linear"}, "rope_scaling.*an object"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear': factor is null or missing"),
    ],
)
def test_what_is_wrong_is_said_by_its_field(fields, words):
    config = {**config_of("llama"), **fields}
    with pytest.raises(ConfigError, match=words):
        lm_config(family_of(config).decoder_settings(config))


def test_harmless_fields_of_fine_tunes_pass_with_one_line():
    config = config_of("llama") | {
        "unsloth_version": "2025.1", "unsloth_fixed": True, "max_length": 20, "do_sample": True,
        "some_field": None,
    }
    family = family_of(config)
    expected = family.decoder_settings(config_of("llama"))
    assert family.decoder_settings(config) == expected
    (line,) = family.not_followed(config)
    assert "unsloth_version" in line and "do_sample" in line and "some_field" not in line
    with pytest.raises(ConfigError, match="the field 'attention_multiplyer' = 2"):
        family.decoder_settings(config | {"attention_multiplyer": 2})


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDENS / "hf/llama" / name, folder)
    return folder


@pytest.mark.parametrize("kind", [np.int32, np.uint8, bool])
def test_integers_are_no_weights(model, kind):
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].astype(kind)}, model / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{name} holds .* which are no weights"):
        huggingface.load(model)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_pipes_folders_and_deep_json_are_refused_at_once(model, name):
    for make in (
        lambda path: os.mkfifo(path), lambda path: path.mkdir(),
        lambda path: path.write_text("[" * 100_000 + "]" * 100_000),
        lambda path: path.symlink_to(path.name),
    ):
        path = model / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)
        with pytest.raises(ConfigError) as refused:
            settings_in(model)
            TensorFiles(model)
        assert len(str(refused.value)) < 1_000


@pytest.mark.parametrize(
    "index",
    [
        [], {}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": ["b"]}},
        {"weight_map": {"a": "../x"}}, {"weight_map": {"a": "/etc/passwd"}},
        {"weight_map": {"a": "x" * 5_000}}, {"weight_map": {"a": ""}}, {"weight_map": {"a": "a\0"}},
        {"weight_map": {"x" * 5_000: "model.safetensors"}},
    ],
)
def test_an_index_of_any_shape_is_refused(model, index):
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="index") as refused:
        TensorFiles(model)
    assert len(str(refused.value)) < 1_000


def test_a_description_has_no_weights(model):
    described = TensorFiles(model).described()
    (model / "model.safetensors").unlink()
    (model / "tensors.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match="describes a model and has none of its weights"):
        huggingface.load(model)


@pytest.mark.parametrize(
    ("family", "field", "setting", "value"),
    [
        ("mixtral", "rms_norm_eps", "epsilon", 1e-5), ("phi3", "rms_norm_eps", "epsilon", 1e-5),
        ("olmo2", "rms_norm_eps", "epsilon", 1e-5), ("gpt_oss", "rms_norm_eps", "epsilon", 1e-5),
        ("gpt_oss", "num_experts_per_tok", "num_experts_per_token", 4),
        ("llama", "rms_norm_eps", "epsilon", 1e-6),
    ],
)
def test_an_absent_field_is_as_transformers_has_it(family, field, setting, value):
    config = config_of(family)
    del config[field]
    if "num_local_experts" in config:
        config["num_local_experts"] = 8
    assert getattr(family_of(config).decoder_settings(config), setting) == value


@pytest.mark.parametrize(
    "content", [[], {"a": 1}, {"a": {}}, {"a": {"dtype": 1, "shape": []}}, {"a": {"shape": [1]}},
                {"a": {"dtype": "F32", "shape": [-1]}}],
)
def test_a_description_of_any_shape_is_refused(model, content):
    (model / "tensors.json").write_text(json.dumps(content))
    TensorFiles(model)  # Its own weights count first.
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"tensors\.json is not as praxis_lite wrote it"):
        TensorFiles(model)
