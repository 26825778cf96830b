"""Directories of models with mistakes: fields of config.json, tensors, indexes, tied heads."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from praxis_lite import ConfigError, huggingface
from praxis_lite.huggingface.decoder import lm_config
from praxis_lite.huggingface.family import family_of
from praxis_lite.huggingface.pretrained import Pretrained
from praxis_lite.huggingface.tensors.tensor_files import TensorFiles
from tests.support.goldens import GOLDENS


def config_of(family):
    return json.loads((GOLDENS / "hf" / family / "config.json").read_text())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings.*'false'"),
        ({"num_hidden_layers": True}, "num_hidden_layers.*True"),
        ({"rms_norm_eps": [1e-5]}, r"rms_norm_eps.*\[1e-05\]"),
        ({"rope_scaling": "linear"}, "rope_scaling.*'linear'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear'.*factor"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_its_field(fields, words):
    config = {**config_of("llama"), **fields}
    with pytest.raises(ConfigError, match=words):
        lm_config(family_of(config).decoder_settings(config))


def test_harmless_fields_of_fine_tunes_pass_with_one_line():
    config = config_of("llama") | {
        "unsloth_version": "2025.1",
        "unsloth_fixed": True,
        "max_length": 20,
        "do_sample": True,
        "some_field": None,
    }
    family = family_of(config)
    expected = family.decoder_settings(config_of("llama"))
    assert family.decoder_settings(config) == expected
    (line,) = family.ignored_fields(config)
    assert "unsloth_version" in line and "do_sample" in line and "some_field" not in line
    with pytest.raises(ConfigError, match="'attention_multiplyer'.*=.*2"):
        family.decoder_settings(config | {"attention_multiplyer": 2})


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDENS / "hf/llama" / name, folder)
    return folder


@pytest.mark.parametrize("kind", [np.int32, np.uint8])
def test_integer_tensors_are_refused(model, kind):
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].astype(kind)}, model / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{name}.*{np.dtype(kind)}"):
        huggingface.load(model)


def test_a_description_has_no_weights(model):
    described = TensorFiles(model).description()
    (model / "model.safetensors").unlink()
    (model / "tensors.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match="/model .*export JOB DIR"):
        huggingface.load(model)


def split(folder, listed, files=2):
    """Writes the tensors into several files, and an index that lists those of which `listed`."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    file_of = {name: f"part-{i % files}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(file_of.values()):
        save_file({name: tensors[name] for name in tensors if file_of[name] == file}, folder / file)
    weight_map = {name: file for name, file in file_of.items() if listed(name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors, file_of


def test_tensors_that_the_index_does_not_list_are_read_and_unknown_ones_refused(model):
    whole = TensorFiles(model)
    expected = {name: whole.tensor(name).copy() for name in whole.file_of}
    tensors, file_of = split(model, lambda name: "norm" not in name)
    files = TensorFiles(model)
    assert files.file_of == file_of
    assert all((files.tensor(name) == x).all() for name, x in expected.items())
    extra = {"model.layers.0.self_attn.gate.weight": np.ones((2, 2), np.float32)}
    of_first = {name: x for name, x in tensors.items() if file_of[name] == "part-0.safetensors"}
    save_file({**of_first, **extra}, model / "part-0.safetensors")
    with pytest.raises(ConfigError, match="self_attn.gate.weight"):
        huggingface.load(model)


def test_an_incomplete_download_and_two_models_in_a_directory_are_refused(model):
    tensors, _ = split(model, lambda name: True)
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors .*model\.safetensors\.index\.json"):
        TensorFiles(model)
    (model / "part-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"index\.json.*part-1\.safetensors"):
        TensorFiles(model)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_said_by_their_tensor(model, value, caplog):
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 4] = value
    save_file(tensors, model / "model.safetensors")
    huggingface.load(model)
    (line,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert name in line and line.count("layers") == 1


def test_frequencies_are_skipped_wherever_they_lie(model):
    tensors = load_file(model / "model.safetensors")
    for name in ("model.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq"):
        tensors[name] = np.ones(6, np.float32)
    save_file(tensors, model / "model.safetensors")
    huggingface.load(model)


def rewritten(folder, family, **fields):
    """Copies a model of a family into a folder, with other fields; returns its tensors."""
    (folder / "config.json").write_text(json.dumps({**config_of(family), **fields}))
    shutil.copy(GOLDENS / "hf" / family / "model.safetensors", folder)
    return load_file(folder / "model.safetensors")


def test_the_head_of_a_tied_model_has_its_familys_name(model):
    tensors = rewritten(model, "gpt_neox", tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="embed_out.weight"):
        huggingface.load(model)
    tensors["embed_out.weight"] = tensors["gpt_neox.embed_in.weight"].copy()
    save_file(tensors, model / "model.safetensors")
    huggingface.load(model)
    del tensors["embed_out.weight"]
    save_file(tensors, model / "model.safetensors")
    rewritten_config = {**config_of("gpt_neox"), "tie_word_embeddings": False}
    (model / "config.json").write_text(json.dumps(rewritten_config))
    with pytest.raises(ConfigError, match="embed_out.weight.*tie_word_embeddings"):
        huggingface.load(model)


@pytest.mark.parametrize("names", [["dtype"], ["dtype", "torch_dtype"], []])
def test_an_export_names_its_dtype_as_the_config_did(model, names, tmp_path):
    config = {**config_of("llama"), **dict.fromkeys(names, "float32")}
    for name in {"dtype", "torch_dtype"} - set(names):
        config.pop(name, None)
    (model / "config.json").write_text(json.dumps(config))
    huggingface.load(model).export(tmp_path / "out", "bfloat16")
    written = json.loads((tmp_path / "out/config.json").read_text())
    actual = {name: written[name] for name in ("dtype", "torch_dtype") if name in written}
    assert actual == dict.fromkeys(names or ["torch_dtype"], "bfloat16")


def test_two_directories_of_different_models_are_said_as_that():
    layout = huggingface.load(GOLDENS / "hf/llama").pretrained.layout
    for family in ("qwen3", "gemma2", "gpt2", "mixtral"):
        with pytest.raises(ConfigError, match=f"{family}/config.json.*HF_DIR") as refused:
            Pretrained(GOLDENS / "hf" / family, layout)
        assert len(str(refused.value)) < 800
