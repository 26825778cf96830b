"""LoRA over weights in 4 bits: read from a model of Hugging Face, trained, exported."""

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

import praxis_lite
from praxis_lite import huggingface
from praxis_lite.layers.whole_model.four_bit_weights import NF4
from tests.huggingface.test_finetuning import VOCAB, finetuned, merged_by_hand
from tests.huggingface.test_finetuning import started as started  # A fixture.
from tests.support.commands import praxis
from tests.support.job_runs import launch, lines_of
from tests.support.marks import nightly_but

pytestmark = pytest.mark.slow
# Of the model: [out, in] of each tensor whose weight is kept in 4 bits, in each of three layers.
D, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 48, 109, 6, 2, 12, 3


def rounded_by_hand(tensors, qtype):
    """Returns the tensors, those of layers rounded in blocks of 64 inputs of an output."""
    result = dict(tensors)
    for name, x in tensors.items():
        if "_proj." not in name:
            continue
        # Heads of the output projection are dims of their own, so a block ends with a head.
        size = HEAD_DIM if "o_proj" in name else 64
        blocks = []
        for start in range(0, x.shape[1], size):
            block = x[:, start : start + size].astype(np.float32)
            scale = np.abs(block).max(axis=1, keepdims=True)
            if qtype == "nf4":
                table = np.array(NF4, np.float32)
                nearest = np.abs((block / scale)[..., None] - table).argmin(axis=-1)
                blocks.append(table[nearest] * scale)
            else:
                scale = scale / np.float32(7)
                blocks.append(np.round(block / scale) * scale)
        result[name] = np.concatenate(blocks, axis=1)
    return result


def train(started, qtype, job, mesh_shape):
    """Trains adapters of a model with 4-bit weights for three steps."""
    return finetuned(
        started,
        "ChatLora",
        job,
        f"task.quantization={qtype}",
        "run.num_train_steps=3",
        f"mesh.ici_mesh_shape={mesh_shape}",
        "mesh.allow_unused_devices=True",
    )


@pytest.fixture(scope="module")
def alone(started):
    """The output of a job with NF4 on one device, in the directory `nf4`."""
    return train(started, "nf4", "nf4", "1,1,1")


def losses_of(job):
    return [line["loss"] for line in lines_of(job / "metrics.jsonl")]


@pytest.mark.nightly
def test_on_a_mesh_the_losses_are_those_of_one_device(started, alone):
    train(started, "nf4", "nf4_on_a_mesh", "1,2,2")
    expected = losses_of(started / "nf4")
    np.testing.assert_allclose(losses_of(started / "nf4_on_a_mesh"), expected, rtol=1e-5)


@pytest.mark.parametrize("qtype", nightly_but({"nf4"}, ["nf4", "int4"]))
def test_lora_over_4_bits_learns_and_goes_back_to_hugging_face(started, alone, qtype):
    done = alone if qtype == "nf4" else train(started, qtype, qtype, "1,2,2")
    assert "weights from" in done.out
    losses = losses_of(started / qtype)
    assert losses[-1] < losses[0]
    for name in ("merged", "peft"):
        shutil.rmtree(started / name, ignore_errors=True)
        adapters = f"--adapters={name.removesuffix('d')}"
        assert praxis("hf", "export", started / qtype, started / name, adapters) == 0
    expected, _ = merged_by_hand(started / "llama", started / "peft")
    base = load_file(started / "llama" / "model.safetensors")
    rounded = rounded_by_hand(base, qtype)
    actual = load_file(started / "merged" / "model.safetensors")
    assert expected.keys() == actual.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(
            actual[name], x - base[name] + rounded[name], rtol=1e-5, atol=1e-6, err_msg=name
        )
    ids = np.arange(34).reshape(2, 17) % VOCAB
    trained = praxis_lite.load(started / qtype)
    again = huggingface.load(started / "merged")
    np.testing.assert_allclose(again.logits(ids), trained.predict(ids)[0], atol=1e-4)


def test_a_weight_takes_half_a_byte_and_its_part_of_a_scale(started, alone):
    layout = praxis_lite.load(started / "nf4").partitioner.layout
    leaves = {leaf.path: leaf for leaf in layout.leaves()}
    actual = {"codes": 0, "scale": 0}
    for path, leaf in leaves.items():
        if "/w/" in path:
            kind = path.rpartition("/")[2]
            actual[kind] += leaf.bytes_per_device
            assert leaf.dtype == ("uint8" if kind == "codes" else "float32")
    num_weights = D * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * D * HIDDEN
    # Of hidden dims, 109 inputs, there are two blocks of 64: the last one is filled.
    filled = num_weights + D * (128 - HIDDEN)
    num_scales = HEAD_DIM * (HEADS + 2 * KV_HEADS) + HEADS * D + 2 * HIDDEN + 2 * D
    assert actual == {"codes": LAYERS * filled // 2, "scale": LAYERS * 4 * num_scales}
    # They are frozen: slots are of the adapters alone.
    slots = [path for path in leaves if path.startswith("opt_states/slots")]
    assert slots and not any("codes" in path or "scale" in path for path in slots)


def test_weights_in_4_bits_are_not_trained(started):
    message = launch(
        "--exp=huggingface.ChatFull",
        f"--job_log_dir={started / 'refused'}",
        "--set",
        f"HF_DIR={started / 'llama'}",
        f"CHAT_FILES={started / 'chat.jsonl'}",
        "SEQ_LEN=48",
        "task.quantization=nf4",
    ).err
    assert "w/codes" in message and "bprop_variable_inclusion" in message
