"""Fields of config.json that the families' own goldens have not, against the real transformers."""

import functools

import numpy as np
import pytest

from praxis_lite import huggingface
from tests.support.goldens import GOLDENS, golden_arrays
from tests.support.marks import nightly_but

NAMES = sorted(path.name for path in (GOLDENS / "hf_options").iterdir())


@functools.cache
def loaded(name):
    # "dynamic" has angles for texts of any length; the others are read for 128 positions.
    return huggingface.load(GOLDENS / "hf_options" / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_transformers(name):
    expected = golden_arrays(f"hf_options/{name}/goldens.npz")
    actual = loaded(name).logits(expected["ids"])
    np.testing.assert_allclose(actual, expected["logits"], atol=2e-4)
    # Only dynamic angles depend on what comes later: other models need no second program.
    short = loaded(name).logits(expected["ids"][:, :7]) if "dynamic" in name else actual[:, :7]
    np.testing.assert_allclose(short, expected["short"], atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    nightly_but({"llama_dynamic", "qwen3_moe_windows"}, NAMES),
)
def test_greedy_tokens_equal_those_of_transformers(name):
    expected = golden_arrays(f"hf_options/{name}/goldens.npz")
    prompts = expected["ids"][:, :4].tolist()
    assert loaded(name).generate(prompts, max_new_tokens=5) == expected["tokens"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", nightly_but({"deepseek_v3_absent", "gpt_oss_absent"}, NAMES))
def test_what_is_read_is_written_bit_for_bit(name, tmp_path):
    from safetensors.numpy import load_file

    loaded(name).export(tmp_path / "out")
    actual = load_file(tmp_path / "out/model.safetensors")
    expected = load_file(GOLDENS / "hf_options" / name / "model.safetensors")
    assert actual.keys() == expected.keys()
    for tensor, array in expected.items():
        np.testing.assert_array_equal(actual[tensor], array)
