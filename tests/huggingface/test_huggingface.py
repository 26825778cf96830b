"""Models of Hugging Face: read, run, trained and written, against the real transformers."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models

from praxis_lite import ConfigError, huggingface
from praxis_lite.checkpoints.init.initial_state import complete_state
from praxis_lite.core import Learner, MeshConfig, Partitioner, make_mesh
from praxis_lite.huggingface.decoder import lm_config
from praxis_lite.huggingface.decoder_settings import LayerKind
from praxis_lite.huggingface.family import family_of
from praxis_lite.huggingface.rotary import rotary
from tests.support.explicit_partitioner import explicit_partitioner
from tests.support.goldens import GOLDENS, golden_arrays
from tests.support.marks import slow_or_nightly

FAMILIES = sorted(path.name for path in (GOLDENS / "hf").iterdir())
# None of them divides the heads, the vocabulary or the hidden dims.
UNEVEN, SINGLE = (1, 4, 2), (1, 1, 1)
# Each family is compared on one of the meshes in `make test-all`, and on the other at night.
ON_UNEVEN = {"llama", "gemma", "gemma3", "gpt2", "mixtral", "phi3", "qwen3_moe"}
TRAINED_ON_UNEVEN = {"llama", "gemma2", "phi3", "mixtral"}
# The other families are trained, and continue texts, at night.
TRAINED = {"gemma", "mixtral", "gpt2"}
CONTINUED = {"llama", "gemma3"}
PLACES = [(family, shape) for family in FAMILIES for shape in (SINGLE, UNEVEN)]


def one_mesh(on_uneven):
    """Returns the cases of each family on one mesh: UNEVEN for some families."""
    return {(family, UNEVEN if family in on_uneven else SINGLE) for family in FAMILIES}


def of_families(cases, families):
    return {case for case in cases if case[0] in families}


FULLY_SHARDED = [(family, (1, 3, 2), "SHARDING_PRESET=fsdp") for family in ("llama", "gemma2")]
SLOW = one_mesh(ON_UNEVEN) | {FULLY_SHARDED[0]}


def mesh_of(shape):
    return make_mesh(MeshConfig(ici_mesh_shape=shape, allow_unused_devices=True))


@functools.cache
def loaded(family, shape=(1, 1, 1), *settings):
    return huggingface.load(GOLDENS / "hf" / family, mesh_of(shape), settings=settings)


@functools.cache
def golden(family):
    return golden_arrays(f"hf/{family}/goldens.npz")


@pytest.mark.parametrize(
    "case",
    slow_or_nightly({("llama", UNEVEN)}, SLOW | {("gemma2", SINGLE)}, [*PLACES, *FULLY_SHARDED]),
    ids=str,
)
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


def greedy(family, *case, **settings):
    """Checks the greedy tokens of a family's prompts."""
    expected = golden(family)
    pairs = zip(expected["greedy_prompts"], expected["greedy_mask"], strict=True)
    prompts = [row[mask == 1].tolist() for row, mask in pairs]
    actual = loaded(family, *case).generate(prompts, max_new_tokens=16, **settings)
    assert actual == expected["greedy_tokens"].tolist()


@pytest.mark.parametrize(
    "case",
    slow_or_nightly({("llama", UNEVEN)}, of_families(SLOW, CONTINUED), [*PLACES, *FULLY_SHARDED]),
    ids=str,
)
def test_greedy_tokens_are_those_of_transformers(case):
    greedy(*case)


@pytest.mark.slow
def test_stop_strings_end_a_continuation_in_any_tokenization(tmp_path):
    expected = golden("llama")
    prompt = expected["greedy_prompts"][0][expected["greedy_mask"][0] == 1].tolist()
    ids = expected["greedy_tokens"][0].tolist()
    with pytest.raises(ConfigError, match="stop_strings.*tokenizer.*stop_sequences"):
        loaded("llama").generate([prompt], max_new_tokens=16, stop_strings=("w",))
    shutil.copytree(GOLDENS / "hf" / "llama", tmp_path, dirs_exist_ok=True)
    words = {f"w{i}.": i for i in range(loaded("llama").partitioner.task.num_ids()["ids"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0."))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    model = huggingface.load(tmp_path)
    # The string ends within a word, so no sequence of ids encodes it.
    stop = f"{ids[5]}. w{ids[6]}"
    assert model.generate([prompt], max_new_tokens=16, stop_strings=(stop,)) == [ids[:7]]


# Of windows, latent attention and experts.
@pytest.mark.parametrize("family", slow_or_nightly((), {"gpt_oss"}, FAMILIES))
def test_greedy_tokens_with_drafts_are_those_of_transformers(family):
    greedy(family, num_speculative_tokens=3)


class Recorded(NamedTuple):
    """The state of an optimizer that records: the gradients of the last step."""

    gradients: Any


def recorded_adamw(learning_rate):
    """Returns torch's AdamW, whose first state is the gradients of the last step."""
    record = optax.GradientTransformation(
        lambda params: Recorded(jax.tree.map(jnp.zeros_like, params)),
        lambda gradients, state, params=None: (gradients, Recorded(gradients)),
    )
    adamw = optax.adamw(learning_rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    return optax.chain(record, adamw)


def gradients_in(state):
    """Returns the gradients of the last step by path."""
    return {
        f"params/{jax.tree_util.keystr(path, simple=True, separator='/')}": x
        for slots in state.opt_states["slots"].values()
        for path, x in jax.tree_util.tree_leaves_with_path(slots[0].gradients)
    }


def trained(family, shape, num_steps, partitioner=Partitioner):
    """Returns losses of steps on the right-padded batch, the first gradients, and the model after.

    Gradients are a pair of models: one whose weights they are, and one of zeros. What a family adds
    to its weights in the file (Gemma 1 to its scales) is in both.
    """
    model, expected = loaded(family, shape), golden(family)
    left_out = model.experiment.task.learner.bprop_variable_exclusion
    learner = fdl.Config(
        Learner,
        optimizer=fdl.Partial(recorded_adamw),
        learning_rate=1e-3,
        bprop_variable_exclusion=left_out,
    )
    task = fdl.build(fdl.copy_with(model.experiment.task, learner=learner))
    item = partitioner(task, model.partitioner.mesh)
    arrays = {f"mdl_vars/{path}": x.copy() for path, x in model.arrays.items()}
    state = complete_state(item, item.key(0), arrays)

    def as_model(arrays):
        return huggingface.HuggingFaceModel(item, arrays, model.experiment, model.pretrained)

    ids, mask = expected["right_ids"], expected["right_mask"].astype(np.float32)
    batch = {"ids": ids[:, :-1], "labels": ids[:, 1:], "weights": mask[:, 1:]}
    losses, gradients = [], None
    for _ in range(num_steps):
        state, outputs = item.train_step(state, item.global_batch(batch), item.key(0))
        losses.append(float(outputs["metrics"]["loss"][0]))
        if gradients is None:
            gradients = {path: x.copy() for path, x in gradients_in(state).items()}
    zeros = {
        path: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)
        for path, x in model.arrays.items()
    }
    assert zeros.keys() >= gradients.keys()
    after = dict(zip(model.arrays, jax.tree.leaves(state.mdl_vars), strict=True))
    return losses, (as_model(zeros | gradients), as_model(zeros)), as_model(after)


def exported(model, directory):
    """Returns the tensors of an export in float64, and without those that are not trained."""
    model.export(directory, "float32")
    tensors = load_file(directory / "model.safetensors")
    return {
        name: x.astype(np.float64)
        for name, x in tensors.items()
        if not name.endswith("e_score_correction_bias")
    }


@pytest.mark.parametrize(
    "case", slow_or_nightly((), of_families(one_mesh(TRAINED_ON_UNEVEN), TRAINED), PLACES), ids=str
)
def test_gradients_and_ten_steps_of_adamw_are_those_of_torch(case, tmp_path):
    losses, gradients, model = trained(*case, 10)
    expected = golden(case[0])
    assert losses[0] == pytest.approx(expected["right_loss"], abs=1e-5)
    np.testing.assert_allclose(losses, expected["train_losses"], atol=1e-4)
    tensors, zeros = (exported(x, tmp_path / str(i)) for i, x in enumerate(gradients))
    assert set(tensors) == set(expected["tensor_names"])
    for name, norm in zip(expected["tensor_names"], expected["gradient_norms"], strict=True):
        actual = np.linalg.norm((tensors[name] - zeros[name]).ravel())
        assert abs(actual - norm) <= 1e-4 + 1e-4 * norm, name
    tensors = exported(model, tmp_path / "after")
    for i, name in enumerate(expected["tensor_names"]):
        off = abs(tensors[name].sum() - expected["train_sums"][i])
        assert off <= expected["train_sums_tolerance"][i], name
        norm = np.sqrt((tensors[name] ** 2).sum())
        assert abs(norm - expected["train_norms"][i]) <= expected["train_norms_tolerance"][i]


@pytest.mark.slow
def test_it_trains_by_hand_as_by_the_compiler():
    losses, *_ = trained("llama", (1, 3, 2), 10, explicit_partitioner)
    np.testing.assert_allclose(losses, golden("llama")["train_losses"], atol=1e-4)


def tensors_in(directory):
    actual = {}
    for path in Path(directory).glob("*.safetensors"):
        actual |= load_file(path)
    return actual


@pytest.mark.parametrize(
    "case", slow_or_nightly({("phi3", UNEVEN), ("mixtral", SINGLE)}, SLOW, PLACES), ids=str
)
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


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"architectures": ["FalconForCausalLM"]}, r"'FalconForCausalLM'.*Qwen3Moe.*add a family"),
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
    ],
)
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


def test_an_unknown_dtype_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match="export: dtype is 'float61'.*bfloat16"):
        loaded("llama").export(tmp_path / "out", "float61")
    assert not list(tmp_path.iterdir())


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
    _, settings, _ = settings_of("gpt2", attn_pdrop=0.1, resid_pdrop=0.2, embd_pdrop=0.3)
    lm = lm_config(settings)
    block = lm.transformer_layer_tpl
    assert (block.atten_dropout_prob, block.residual_dropout_prob) == (0.1, 0.2)
    assert lm.stacked_transformer_tpl.input_dropout_prob == 0.3
    family, _, config = settings_of("mixtral", output_router_logits=True)
    assert "moe_load_balance_loss_weight" in family.ignored_fields(config)[0]
    assert not settings_of("llama")[0].ignored_fields(settings_of("llama")[2])
