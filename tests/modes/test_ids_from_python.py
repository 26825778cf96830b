"""Ids, positions and lengths that Python hands to a model of Hugging Face are looked at first."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from praxis_lite import ConfigError, huggingface
from praxis_lite.config.experiment_overrides import configured
from praxis_lite.experiment import registry
from praxis_lite.experiments.huggingface import TINY, trained_positions
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
    "beyond": ([[1, "V"]], "{V} at .0, 1.;"),
    "negative": ([[-1, 1]], "-1 .*.0, 0.;.* 100"),
    "a float": (np.ones((1, 2), np.float32), "float32.1, 2."),
    "an empty row": ([[]], "float64.1, 0."),
    "one row": ([1, 2], "int64.2.;.* int.B, T."),
    "too large for int32": ([[BIG + 1]], "2147483649 .*.0, 0."),
}


@pytest.mark.parametrize("name", IDS)
def test_logits_take_ids_of_the_model_alone(rotary, name):
    given, words = IDS[name]
    size = size_of(rotary, "ids")
    if name == "beyond":
        given = [[1, size]]
    with pytest.raises(ConfigError, match=f"logits: ids .*{words.format(V=size)}"):
        rotary.logits(given)
    if name != "one row":
        with pytest.raises(ConfigError, match="generate: prompt 1 "):
            rotary.generate([[1], given[0]])


@pytest.mark.parametrize(
    "given, words",
    [
        ({"attention_mask": [1, 1, 1]}, ".*attention_mask.*3.*1, 2"),
        ({"position_ids": [[7, "P"]]}, "position_ids.* {P} .*.0, 1.;"),
        ({"position_ids": [[0, 1, 2]]}, "position_ids.* ids, .1, 2."),
        ({"segment_ids": [[-1, 1]]}, "segment_ids.*-1"),
        ({"ids": [list(range(1, 12)) * 3]}, "ids.* {P}"),
    ],
)
@pytest.mark.parametrize("kind", ["rotary", "learned"])
def test_arguments_next_to_ids_are_checked(kind, given, words, request):
    model = request.getfixturevalue(kind)
    most = size_of(model, "segment_pos")
    given = {
        name: [[most if x == "P" else x for x in x] if isinstance(x, list) else x for x in value]
        for name, value in given.items()
    }
    if "ids" in given:
        given["ids"] = [(given["ids"][0] * 40)[: most + 1]]
        words = f".* ids .*{most + 1};.* {most}"
    with pytest.raises(ConfigError, match=f"logits: {words.format(P=most)}"):
        model.logits(**{"ids": [[1, 2]], **given})


@pytest.mark.parametrize(
    "given, words",
    [
        ({"max_new_tokens": 0}, "max_new_tokens.* 0;.* 1"),
        ({"max_new_tokens": 2.0}, "max_new_tokens.*2.0"),
        ({"max_new_tokens": 15}, "max_new_tokens=15.*2.*17.*16"),
        ({"prompts": [[1] * 16]}, "max_new_tokens=2.*16.*18"),
        ({"eos_id": 10**6}, "eos_id.*1000000"),
        ({"eos_id": "</s>"}, "eos_id.*<U4"),
        ({"weights_dtype": "int8"}, "weights_dtype.*'int8'.* None.*task.decoder.weights_dtype"),
        ({"prompts": []}, "prompts.* ..;"),
        ({"prompts": "ab"}, "prompts.* 'ab';"),
        ({"prompts": [1, 2]}, "prompt 0.*int64..;.* int.T."),
    ],
)
def test_generate_checks_its_arguments(rotary, given, words):
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
