"""Models of Hugging Face: read, run, trained and written, against the real transformers."""

import functools
import json
import shutil
from pathlib import Path

import fiddle as fdl
import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from praxis_lite import ConfigError, huggingface
from praxis_lite.checkpoints.init.initial_state import completed
from praxis_lite.core import Learner, MeshConfig, Partitioner, make_mesh
from praxis_lite.huggingface.decoder import lm_config
from praxis_lite.huggingface.decoder_settings import LayerKind
from praxis_lite.huggingface.family import family_of
from praxis_lite.huggingface.rotary import rotary
from tests.support.explicit_partitioner import explicit_partitioner
from tests.support.goldens import GOLDENS, golden_arrays
from tests.support.marks import slow_but

FAMILIES = sorted(path.name for path in (GOLDENS / "hf").iterdir())
# None of them divides the heads, the vocabulary or the hidden dims.
UNEVEN = (1, 4, 2)


def mesh_of(shape):
    return make_mesh(MeshConfig(ici_mesh_shape=shape, allow_unused_devices=True))


@functools.cache
def loaded(family, shape=(1, 1, 1), *settings):
    return huggingface.load(GOLDENS / "hf" / family, mesh_of(shape), settings=settings)


@functools.cache
def golden(family):
    return golden_arrays(f"hf/{family}/goldens.npz")


def places(quick):
    """Returns (family, mesh, settings) of the tests of what a model computes."""
    cases = [(family, shape) for family in FAMILIES for shape in ((1, 1, 1), UNEVEN)]
    cases += [(family, (1, 3, 2), "SHARDING_PRESET=fsdp") for family in ("llama", "gemma2")]
    return slow_but(quick, cases)


@pytest.mark.parametrize("case", places({("llama", UNEVEN), ("gemma2", (1, 1, 1))}), ids=str)
def test_logits_equal_those_of_transformers(case):
    model, expected = loaded(*case), golden(case[0])
    for side in ("right", "left"):
        mask = expected[f"{side}_mask"]
        actual = model.logits(expected[f"{side}_ids"], attention_mask=mask)
        assert np.abs(actual - expected[f"{side}_logits"])[mask == 1].max() < 1e-4
        assert np.isfinite(actual).all()
    segments = expected["packed_segment_ids"]
    actual = model.logits(
        expected["packed_ids"], position_ids=expected["packed_position_ids"], segment_ids=segments
    )
    assert np.abs(actual - expected["packed_logits"])[segments != 0].max() < 1e-4
    actual = model.logits(expected["shifted_ids"], position_ids=expected["shifted_position_ids"])
    assert np.abs(actual - expected["shifted_logits"]).max() < 1e-4


@pytest.mark.parametrize("case", places({("llama", UNEVEN)}), ids=str)
def test_greedy_tokens_are_those_of_transformers(case):
    model, expected = loaded(*case), golden(case[0])
    pairs = zip(expected["greedy_prompts"], expected["greedy_mask"], strict=True)
    prompts = [row[mask == 1].tolist() for row, mask in pairs]
    assert model.generate(prompts, max_new_tokens=16) == expected["greedy_tokens"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_with_drafts_are_those_of_transformers(family):
    model, expected = loaded(family), golden(family)
    pairs = zip(expected["greedy_prompts"], expected["greedy_mask"], strict=True)
    prompts = [row[mask == 1].tolist() for row, mask in pairs]
    actual = model.generate(prompts, max_new_tokens=16, num_speculative_tokens=3)
    assert actual == expected["greedy_tokens"].tolist()


def trained(family, shape, optimizer, learning_rate, num_steps, partitioner=Partitioner):
    """Returns the losses of steps on the right-padded batch, and the model with what they made."""
    model, expected = loaded(family, shape), golden(family)
    left_out = model.experiment.task.learner.bprop_variable_exclusion
    learner = fdl.Config(
        Learner, optimizer=optimizer, learning_rate=learning_rate,
        bprop_variable_exclusion=left_out,
    )
    task = fdl.build(fdl.copy_with(model.experiment.task, learner=learner))
    item = partitioner(task, model.partitioner.mesh)
    arrays = {f"mdl_vars/{path}": x.copy() for path, x in model.arrays.items()}
    state = completed(item, item.key(0), arrays)
    ids, mask = expected["right_ids"], expected["right_mask"].astype(np.float32)
    batch = {"ids": ids[:, :-1], "labels": ids[:, 1:], "weights": mask[:, 1:]}
    losses = []
    for _ in range(num_steps):
        state, outputs = item.train_step(state, item.global_batch(batch), item.key(0))
        losses.append(float(outputs["metrics"]["loss"][0]))
    after = jax.tree.leaves(state.mdl_vars)
    arrays = dict(zip(model.arrays, after, strict=True))
    return losses, huggingface.HuggingFaceModel(item, arrays, model.experiment, model.pretrained)


ADAMW = fdl.Partial(optax.adamw, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
TRAINED = [(family, (1, 1, 1)) for family in FAMILIES if "train_losses" in golden(family)]
TRAINED += [(family, UNEVEN) for family in ("llama", "gemma2", "phi3")]


@pytest.mark.parametrize("case", slow_but((), TRAINED), ids=str)
def test_ten_steps_of_adamw_give_the_losses_and_weights_of_torch(case, tmp_path):
    losses, model = trained(*case, ADAMW, 1e-3, 10)
    expected = golden(case[0])
    np.testing.assert_allclose(losses, expected["train_losses"], atol=1e-4)
    model.export(tmp_path / "out", "float32")
    tensors = load_file(tmp_path / "out/model.safetensors")
    not_trained = {name for name in tensors if name.endswith("e_score_correction_bias")}
    assert set(tensors) - not_trained == set(expected["tensor_names"])
    for i, name in enumerate(expected["tensor_names"]):
        actual = tensors[name].astype(np.float64)
        off = abs(actual.sum() - expected["train_sums"][i])
        assert off <= expected["train_sums_tolerance"][i], name
        norm = np.sqrt((actual**2).sum())
        assert abs(norm - expected["train_norms"][i]) <= expected["train_norms_tolerance"][i]


@pytest.mark.parametrize(
    "case", slow_but(set(), [*((family, (1, 1, 1)) for family in FAMILIES), ("mixtral", UNEVEN)]),
    ids=str,
)
def test_gradients_have_the_norms_of_torch(case, tmp_path):
    # A step of plain descent at a rate of 1 takes off the gradient.
    (loss,), model = trained(*case, fdl.Partial(optax.sgd), 1.0, 1)
    expected = golden(case[0])
    assert loss == pytest.approx(expected["right_loss"], abs=1e-5)
    model.export(tmp_path / "after", "float32")
    loaded(*case).export(tmp_path / "before", "float32")
    after, before = (load_file(tmp_path / x / "model.safetensors") for x in ("after", "before"))
    for name, norm in zip(expected["tensor_names"], expected["gradient_norms"], strict=True):
        actual = np.linalg.norm((before[name].astype(np.float64) - after[name]).ravel())
        assert abs(actual - norm) <= 1e-4 + 1e-4 * norm, name


@pytest.mark.slow
def test_it_trains_by_hand_as_by_the_compiler():
    expected = golden("llama")["train_losses"]
    losses, _ = trained("llama", (1, 3, 2), ADAMW, 1e-3, 10, explicit_partitioner)
    np.testing.assert_allclose(losses, expected, atol=1e-4)


def tensors_in(directory):
    actual = {}
    for path in Path(directory).glob("*.safetensors"):
        actual |= load_file(path)
    return actual


@pytest.mark.parametrize("case", slow_but(
    {("phi3", UNEVEN), ("mixtral", (1, 1, 1))},
    [(family, shape) for family in FAMILIES for shape in ((1, 1, 1), UNEVEN)],
), ids=str)
def test_what_is_read_is_written_bit_for_bit(case, tmp_path):
    loaded(*case).export(tmp_path / "out", max_file_bytes=100_000)
    expected, actual = tensors_in(GOLDENS / "hf" / case[0]), tensors_in(tmp_path / "out")
    assert set(actual) == set(expected)
    for name, x in expected.items():
        assert actual[name].dtype == x.dtype
        assert actual[name].tobytes() == x.tobytes(), name
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in expected.values())


def copy_of(tmp_path, family="llama", **fields):
    """Returns a copy of a model's directory, with other fields in config.json; None: without."""
    target = shutil.copytree(GOLDENS / "hf" / family, tmp_path / "model")
    path = target / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return target


@pytest.mark.parametrize("fields, said", [
    ({"architectures": ["LlamaForCasualLM"]}, "'LlamaForCasualLM'"),
    ({"archs": 1}, "'archs'.*=.*1"),
    ({"head_dim": 16, "num_attention_heads": 4}, r"self_attn\.q_proj\.weight"),
    ({"hidden_size": None}, "hidden_size"),
    ({"rope_scaling": {"rope_type": "static", "factor": 2.0}}, "'static'"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, r"\['beta'\]"),
    ({"hidden_act": "mish"}, "activation.*'mish'"),
    ({"intermediate_size": 108}, r"\(109, 48\).*config.json.*\(108, 48\)"),
    ({"num_hidden_layers": 4}, "model.layers.3"),
    ({"num_hidden_layers": 2}, "model.layers.2"),
    ({"tie_word_embeddings": True}, "lm_head.weight"),
])
def test_a_config_that_is_not_understood_is_refused_by_name(fields, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        huggingface.load(copy_of(tmp_path, **fields))


def test_files_that_are_missing_damaged_or_pickled_are_refused(tmp_path):
    target = copy_of(tmp_path)
    file = target / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    with pytest.raises(ConfigError, match=r"model\.safetensors .*Error while"):
        huggingface.load(target)
    file.rename(target / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="pytorch_model.bin"):
        huggingface.load(target)
    (target / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}')
    with pytest.raises(ConfigError, match=r"weight_map.*'\.\./b'"):
        huggingface.load(target)


def test_the_head_of_a_tied_model_may_be_stored_besides_if_it_is_the_embedding(tmp_path):
    target = copy_of(tmp_path, "qwen3")
    tensors = load_file(target / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, target / "model.safetensors")
    assert huggingface.load(target).partitioner.mesh.size == 1


def test_an_export_overwrites_nothing(tmp_path):
    with pytest.raises(ConfigError, match=".config.json"):
        loaded("llama").export(copy_of(tmp_path))


def settings_of(family, **changed):
    config = json.loads((GOLDENS / "hf" / family / "config.json").read_text()) | changed
    return family_of(config), family_of(config).decoder_settings(config), config


def test_longrope_has_the_factor_of_its_lengths_where_the_config_has_none():
    scaling = {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
    given = {"max_position_embeddings": 2048, "rope_scaling": scaling}
    _, settings, _ = settings_of("phi3", **given)
    layer = rotary(settings, LayerKind(False, False))
    # transformers: sqrt(1 + ln(2048 / 128) / ln(128)).
    assert layer.attention_factor == pytest.approx(np.sqrt(1 + np.log(16) / np.log(128)))
    _, settings, _ = settings_of("phi3", **given | {"rope_scaling": scaling | {"factor": 1.0}})
    assert rotary(settings, LayerKind(False, False)).attention_factor == 1.0


def test_dropout_of_a_config_is_ours_and_ignored_fields_are_reported():
    family, settings, config = settings_of("gpt2", attn_pdrop=0.1, resid_pdrop=0.2, embd_pdrop=0.3)
    block = lm_config(settings).transformer_layer_tpl
    assert (block.atten_dropout_prob, block.residual_dropout_prob) == (0.1, 0.2)
    (message,) = family.ignored_fields(config)
    assert "embd_pdrop = 0.3" in message
    family, _, config = settings_of("mixtral", output_router_logits=True)
    assert "moe_load_balance_loss_weight" in family.ignored_fields(config)[0]
    assert not settings_of("llama")[0].ignored_fields(settings_of("llama")[2])
