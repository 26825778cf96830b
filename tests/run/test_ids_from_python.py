"""Ids, positions and lengths that Python hands to a model of Hugging Face are looked at first."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.experiments.huggingface import TINY, trained_positions
from praxis_lite.run.config.class_attributes import configured
from praxis_lite.run.experiment import registry
from praxis_lite.tools import huggingface
from tests.support.goldens import GOLDENS

BIG = 2**31


@pytest.fixture(scope="module")
def rotary(tmp_path_factory):
    """Returns a llama of some ids and 16 positions."""
    directory = tmp_path_factory.mktemp("rotary") / "hf"
    shutil.copytree(GOLDENS / "hf/llama", directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16}))
    return huggingface.load(directory)


@pytest.fixture(scope="module")
def learned():
    return huggingface.load(GOLDENS / "hf/gpt2")


def size_of(model, name):
    return model.partitioner.task.num_ids()[name]


IDS = {
    "beyond": ([[1, "V"]], "has {V} at .0, 1.; wanted are ids from 0 to"),
    "negative": ([[-1, 1]], "has -1 at .0, 0."),
    "a fraction": ([[1.7]], "is float64.1, 1.; wanted are whole numbers, int.B, T."),
    "a float": (np.ones((1, 2), np.float32), "is float32.1, 2."),
    "NaN": ([[np.nan, 1]], "is float64"),
    "bools": ([[True, False]], "is bool.1, 2."),
    "texts": ([["a", "b"]], "wanted are whole numbers"),
    "a text": ("ab", "wanted are whole numbers"),
    "nothing": ([], "at least one of them"),
    "an empty row": ([[]], "at least one of them"),
    "None": (None, "wanted are whole numbers"),
    "ragged": ([[1, 2], [1]], "cannot be an array .*rows of one length. Pad them"),
    "one row": ([1, 2], "is int64.2.; wanted are whole numbers, int.B, T."),
    "three dims": ([[[1]]], "is int64.1, 1, 1."),
    "too large for int32": ([[BIG + 1]], "has 2147483649 at .0, 0."),
    "uint64": (np.array([[2**64 - 1]], np.uint64), "has 18446744073709551615 at"),
    "too large for any": ([[10**30]], "is object"),
}


@pytest.mark.parametrize("name", IDS)
def test_logits_take_ids_of_the_model_alone(rotary, name):
    given, words = IDS[name]
    size = size_of(rotary, "ids")
    if name == "beyond":
        given = [[1, size]]
    with pytest.raises(ConfigError, match=f"logits: ids .*{words.format(V=size)}"):
        rotary.logits(given)
    if name not in ("ragged", "one row", "three dims", "nothing", "None", "a text"):
        with pytest.raises(ConfigError, match="generate: prompt 1 "):
            rotary.generate([[1], given[0]])


@pytest.mark.parametrize("given, words", [
    ({"attention_mask": [[1, 2]]}, "attention_mask is int64.1, 2.; wanted .* of 1 for tokens and"),
    ({"attention_mask": [[1, np.nan]]}, "attention_mask is float64"),
    ({"attention_mask": [1, 1, 1]}, "attention_mask is int64.3.; wanted is an array .1, 2."),
    ({"attention_mask": [[[1, 1]]]}, "attention_mask is int64.1, 1, 2."),
    ({"attention_mask": [["a", "b"]]}, "attention_mask is <U1"),
    ({"position_ids": [[7, "P"]]}, "position_ids has {P} at .0, 1.; wanted are positions from 0"),
    ({"position_ids": [[-1, 0]]}, "position_ids has -1"),
    ({"position_ids": [[0.5, 1]]}, "position_ids is float64"),
    ({"position_ids": [[0, 1, 2]]}, "position_ids have another shape than ids, .1, 2."),
    ({"segment_ids": [[-1, 1]]}, "segment_ids has -1"),
    ({"segment_ids": [[1, 2, 3]]}, "segment_ids have another shape"),
    ({"segment_ids": [[True, True]]}, "segment_ids is bool"),
    ({"ids": [list(range(1, 12)) * 3]}, "the length of ids is 33; wanted is {P} at most"),
])
@pytest.mark.parametrize("kind", ["rotary", "learned"])
def test_what_stands_beside_ids_is_looked_at(kind, given, words, request):
    model = request.getfixturevalue(kind)
    most = size_of(model, "segment_pos")
    given = {name: [[most if x == "P" else x for x in x] if isinstance(x, list) else x
                    for x in value] for name, value in given.items()}
    if "ids" in given:
        given["ids"] = [(given["ids"][0] * 40)[: most + 1]]
        words = f"the length of ids is {most + 1}; wanted is {most} at most"
    with pytest.raises(ConfigError, match=f"logits: {words.format(P=most)}"):
        model.logits(**{"ids": [[1, 2]], **given})


@pytest.mark.parametrize("given, words", [
    ({"max_new_tokens": 0}, "max_new_tokens is 0; wanted is a whole number from 1"),
    ({"max_new_tokens": -3}, "max_new_tokens is -3"),
    ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0"),
    ({"max_new_tokens": True}, "max_new_tokens is True"),
    ({"max_new_tokens": "2"}, "max_new_tokens is '2'"),
    ({"max_new_tokens": None}, "max_new_tokens is None"),
    ({"max_new_tokens": 10**12}, "max_new_tokens is 1000000000000"),
    ({"max_new_tokens": 15}, "max_new_tokens=15 after a prompt of 2 tokens is 17; wanted is 16"),
    ({"prompts": [[1] * 16]}, "max_new_tokens=2 after a prompt of 16 tokens is 18; wanted"),
    ({"eos_id": 10**6}, "eos_id has 1000000"),
    ({"eos_id": -1}, "eos_id has -1"),
    ({"eos_id": 1.0}, "eos_id is float64"),
    ({"eos_id": True}, "eos_id is bool"),
    ({"eos_id": [1, 10**6]}, "eos_id has 1000000"),
    ({"eos_id": []}, "eos_id is float64.0."),
    ({"eos_id": "</s>"}, "eos_id is <U4"),
    ({"prompts": []}, "prompts is ..; wanted is a list of prompts"),
    ({"prompts": "ab"}, "prompts is .*; wanted is a list of prompts"),
    ({"prompts": b"ab"}, "prompts is .*; wanted is a list of prompts"),
    ({"prompts": 7}, "prompts is .*; wanted is a list of prompts"),
    ({"prompts": {"a": [1]}}, "prompts is .*; wanted is a list of prompts"),
    ({"prompts": [1, 2]}, "prompt 0 is int64..; wanted are whole numbers, int.T."),
])
def test_generate_looks_at_its_arguments(rotary, given, words):
    with pytest.raises(ConfigError, match=f"generate: {words}"):
        rotary.generate(**{"prompts": [[1, 2]], "max_new_tokens": 2, **given})


@pytest.mark.slow
def test_padding_may_have_any_number_below_0(rotary):
    true = rotary.logits([[3, 4]])
    padded = rotary.logits([[3, 4, -100]], attention_mask=[[1, 1, 0]])
    np.testing.assert_allclose(padded[:, :2], true, atol=1e-5)
    left = rotary.logits([[-100, 3, 4]], attention_mask=np.array([[False, True, True]]))
    np.testing.assert_allclose(left[:, 1:], true, atol=1e-5)
    np.testing.assert_allclose(rotary.logits([[3, 4]], position_ids=[0, 1]), true, atol=1e-6)


def test_a_job_trains_within_the_positions_of_its_model(rotary):
    directory = rotary.pretrained.files.directory
    experiment = registry.get_experiment("huggingface.CausalLm")
    assert configured(experiment, []).task.model.max_positions is None
    task = configured(experiment, [f"HF_DIR={directory}"]).task
    assert task.model.max_positions == 16
    task = rotary.partitioner.task
    def spec(length):
        leaf = jax.ShapeDtypeStruct((2, length), "int32")
        return dict.fromkeys(task.required_inputs, leaf)

    task.check_inputs(spec(16), task.required_inputs, "datasets.train")
    with pytest.raises(ConfigError, match="max_positions.*16.*17"):
        task.check_inputs(spec(17), task.required_inputs, "datasets.train")


def test_angles_that_follow_the_text_have_no_end():
    settings = dataclasses.replace(
        TINY, max_positions=16, rope_scaling={"type": "dynamic", "factor": 2.0}
    )
    assert trained_positions(settings) is None
    linear = {"rope_type": "linear", "factor": 2.0}
    assert trained_positions(dataclasses.replace(settings, rope_scaling=linear)) == 16
