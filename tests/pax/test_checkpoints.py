"""Checkpoints that the real paxml 1.4.0 wrote are read, and give the real model's logits.

Each zip in pax_checkpoints/ is a job's `checkpoints` directory, and the npz beside it what Pax held
when it saved: its variables without padding, ids, and the logits that it made of them.
- scanned_gda: mesh (1, 2, 2), 13 classes and 3 heads padded; StackedTransformerRepeated.
- unrolled_ocdbt: the same mesh with `tensorstore_use_ocdbt`; StackedTransformer.
- scanned_flax: without a mesh, CheckpointType.FLAX.
"""

import functools
import json
import shutil
import zipfile

import jax
import numpy as np
import pytest

from praxis_lite import ConfigError, layers
from praxis_lite.core import NnxModel
from praxis_lite.pax.checkpoints import read_pax_checkpoint
from praxis_lite.pax.weights import mdl_vars_from_pax
from tests.support.goldens import GOLDENS, golden_arrays
from tests.support.marks import slow_but

STEPS = {"scanned_gda": 10, "unrolled_ocdbt": 20, "scanned_flax": 30}
MADE_BY_PAX = GOLDENS / "pax_checkpoints"
VOCAB, DIMS, HIDDEN, HEADS, LAYERS = 13, 6, 5, 3, 2


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Returns a directory with a job_log_dir by each name."""
    root = tmp_path_factory.mktemp("pax")
    for name in STEPS:
        with zipfile.ZipFile(MADE_BY_PAX / f"{name}.zip") as file:
            file.extractall(root / name)
    return root


@functools.cache
def made_by_pax(name: str) -> dict[str, np.ndarray]:
    return golden_arrays(f"pax_checkpoints/{name}.npz")


def lm(unroll: bool) -> NnxModel:
    return NnxModel(
        functools.partial(
            layers.TransformerLm, VOCAB, DIMS, HIDDEN, HEADS, LAYERS, max_seq_length=7,
            softmax_tpl=functools.partial(layers.SharedEmbeddingSoftmax, scale_sqrt_depth=True),
            stacked_transformer_tpl=functools.partial(layers.Repeat, unroll=unroll),
        )
    )  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_every_variable_is_read_without_its_padding(jobs, name):
    actual = read_pax_checkpoint(jobs / name)
    expected = {p.removeprefix("w/"): w for p, w in made_by_pax(name).items() if p[:2] == "w/"}
    assert actual.step == STEPS[name]
    assert set(actual) == set(expected) and len(actual) == len(expected)
    for path, array in expected.items():
        np.testing.assert_array_equal(actual[path], array)


@pytest.mark.parametrize("name", slow_but({"scanned_flax"}, STEPS))
def test_our_model_gives_paxs_logits_scanned_and_unrolled(jobs, name):
    numbers = made_by_pax(name)
    for unroll in (False, True):
        model = lm(unroll)
        mdl_vars = mdl_vars_from_pax(model, read_pax_checkpoint(jobs / name))
        logits = jax.jit(lambda v, i, m=model: m.module(v)(i)[0])(mdl_vars, numbers["in/ids"])
        np.testing.assert_allclose(logits, numbers["out/logits"], rtol=1e-5, atol=2e-5)


def test_an_array_is_read_once_and_none_before_the_names_are_right(jobs, monkeypatch):
    pax_vars, reads = read_pax_checkpoint(jobs / "scanned_gda"), []
    read = type(pax_vars).__getitem__
    monkeypatch.setattr(
        type(pax_vars), "__getitem__", lambda self, path: reads.append(path) or read(self, path)
    )
    model = lm(unroll=True)  # Asks each stacked array for each of its layers.
    mdl_vars_from_pax(model, pax_vars)
    assert sorted(reads) == sorted(pax_vars)
    reads.clear()
    with pytest.raises(ConfigError, match="missing"):
        mdl_vars_from_pax(NnxModel(functools.partial(layers.Linear, 3, 5)), pax_vars)
    assert not reads


def test_padded_arrays_without_metadata_are_cut_to_the_model(jobs, tmp_path):
    """As in checkpoints before version 1.1, which do not say the unpadded shapes."""
    shutil.copytree(
        jobs / "scanned_gda/checkpoints/checkpoint_00000010/state", tmp_path / "checkpoint_00000010"
    )
    padded = read_pax_checkpoint(tmp_path)
    path = "params/lm/softmax/logits_ffn/linear/w"
    assert padded[path].shape == (6, 14)
    actual = mdl_vars_from_pax(lm(False), padded)
    expected = mdl_vars_from_pax(lm(False), read_pax_checkpoint(jobs / "scanned_gda"))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_the_step_is_the_newest_or_the_one_asked_for(jobs, tmp_path):
    steps = tmp_path / "checkpoints"
    steps.mkdir()
    for name, step in STEPS.items():
        original = next((jobs / name / "checkpoints").iterdir())
        shutil.copytree(original, steps / f"checkpoint_{step:08d}")
    (steps / "checkpoint_00000040.orbax-checkpoint-tmp-17").mkdir()
    assert read_pax_checkpoint(tmp_path).step == 30
    assert read_pax_checkpoint(steps, step=10).step == 10
    assert read_pax_checkpoint(steps / "checkpoint_00000020").step == 20
    with pytest.raises(ConfigError, match=r"11\b.*10, 20, 30"):
        read_pax_checkpoint(tmp_path, step=11)


def test_what_is_no_pax_checkpoint_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="/nowhere "):
        read_pax_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="`checkpoints`"):
        read_pax_checkpoint(tmp_path)
    (tmp_path / "12/mdl_vars").mkdir(parents=True)  # One of ours.
    with pytest.raises(ConfigError, match=r"\(mdl_vars\.\*\)"):
        read_pax_checkpoint(tmp_path)


def test_numbers_in_the_padding_are_an_error(jobs, tmp_path):
    """A shape that is too small: what it would cut off is part of the weight."""
    original = jobs / "scanned_gda/checkpoints/checkpoint_00000010"
    step = tmp_path / "checkpoint_00000010"
    (step / "metadata").mkdir(parents=True)
    shutil.copytree(original / "state", step / "state")
    content = json.loads((original / "metadata/metadata").read_text())
    position = content["train_state_metadata"]["mdl_vars"]["params"]["lm"]["position_emb"]
    position["emb_var"]["unpadded_shape"] = [5, 6]
    (step / "metadata/metadata").write_text(json.dumps(content))
    actual = read_pax_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"emb_var.*\(8.*6\).*\(5.*6\)"):
        actual["params/lm/position_emb/emb_var"]


def test_a_msgpack_checkpoint_without_its_metadata_is_refused(jobs, tmp_path):
    original = next((jobs / "scanned_flax/checkpoints").iterdir())
    (tmp_path / "checkpoint_30").mkdir()
    shutil.copytree(original / "state", tmp_path / "checkpoint_30/state")
    with pytest.raises(ConfigError, match=r"CheckpointType\.GDA"):
        read_pax_checkpoint(tmp_path)
