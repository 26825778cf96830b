"""What a new user does: a model of Hugging Face, a tokenizer, conversations, LoRA, out again."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import praxis_lite
from praxis_lite import huggingface
from tests.support.commands import praxis
from tests.support.goldens import GOLDENS
from tests.support.job_runs import succeed

VOCAB = 290


def with_vocabulary(source: Path, directory: Path) -> Path:
    """Writes a tiny model with rows for other tokens."""
    shutil.copytree(source, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB}))
    (directory / "goldens.npz").unlink()
    tensors, rng = load_file(directory / "model.safetensors"), np.random.default_rng(0)
    for name, x in tensors.items():
        if "embed_tokens" in name or "lm_head" in name or "wte" in name:
            tensors[name] = rng.normal(0, x.std(), (VOCAB, *x.shape[1:])).astype(x.dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A directory with llama, its tokenizer trained on the words of 50 lines of chat.jsonl."""
    root = tmp_path_factory.mktemp("walk")
    directory = with_vocabulary(GOLDENS / "hf" / "llama", root / "llama")
    lines = []
    for number in range(50):
        asked = {"role": "user", "content": f"What comes after {number % 9}?"}
        answer = {"role": "assistant", "content": f"{number % 9 + 1} comes."}
        lines.append(json.dumps({"messages": [asked, answer]}))
    (root / "chat.jsonl").write_text("\n".join(lines))
    size = f"--vocab-size={VOCAB - 3}"
    assert praxis("tokenizers", "train", root / "chat.jsonl", root / "bpe", size) == 0
    shutil.copytree(root / "bpe", directory, dirs_exist_ok=True)
    return root


def finetuned(root, experiment, job, *settings):
    return succeed(
        f"--exp=huggingface.{experiment}",
        f"--job_log_dir={root / job}",
        "--set",
        f"HF_DIR={root / 'llama'}",
        f"run.init_from_huggingface={root / 'llama'}",
        f"CHAT_FILES={root / 'chat.jsonl'}",
        "SEQ_LEN=48",
        "BATCH_SIZE=8",
        "task.decoder.max_decode_steps=12",
        *settings,
    )


def merged_by_hand(base, adapters):
    """Returns W + alpha / r B A of each tensor, of DoRA's at its magnitudes, as PEFT, in NumPy."""
    config = json.loads((adapters / "adapter_config.json").read_text())
    scale, actual = config["lora_alpha"] / config["r"], load_file(base / "model.safetensors")
    tensors = load_file(adapters / "adapter_model.safetensors")
    for name, a in tensors.items():
        if ".lora_A." in name:
            b = tensors[name.replace("lora_A", "lora_B")]
            target = name.removeprefix("base_model.model.").replace("lora_A.", "")
            actual[target] = actual[target] + scale * b @ a
            magnitudes = tensors.get(name.replace("lora_A.weight", "lora_magnitude_vector"))
            assert (magnitudes is not None) == config["use_dora"]
            if config["use_dora"]:
                lengths = np.linalg.norm(actual[target], axis=1)
                actual[target] = actual[target] * (magnitudes / lengths)[:, None]
    return actual, config


def adapters_are_right(root, job):
    for name in ("merged", "peft"):
        shutil.rmtree(root / name, ignore_errors=True)
    assert praxis("hf", "export", root / job, root / "merged", "--adapters=merge") == 0
    assert praxis("hf", "export", root / job, root / "peft", "--adapters=peft") == 0
    expected, config = merged_by_hand(root / "llama", root / "peft")
    actual = load_file(root / "merged" / "model.safetensors")
    assert expected.keys() == actual.keys()
    base = load_file(root / "llama" / "model.safetensors")
    for name, x in expected.items():
        np.testing.assert_allclose(actual[name], x, rtol=1e-5, atol=1e-6, err_msg=name)
    changed = {name for name in actual if not np.array_equal(actual[name], base[name])}
    assert changed == {name for name in base if "_proj." in name}
    assert set(config["target_modules"]) == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    # What is read again computes what the job's model does.
    ids = np.arange(34).reshape(2, 17) % VOCAB
    trained = praxis_lite.load(root / job)
    again = huggingface.load(root / "merged")
    np.testing.assert_allclose(again.logits(ids), trained.predict(ids)[0], atol=1e-4)
    assert huggingface.load_tokenizer(root / "merged").vocab_size == VOCAB - 3


# docs/test_pages_that_run.py does the same with LoRA.
@pytest.mark.slow
def test_dora_learns_from_a_model_of_hugging_face_and_goes_back_to_it(started, capsys):
    finetuned(
        started,
        "ChatLora",
        "dora",
        "run.num_train_steps=2",
        "mesh.ici_mesh_shape=1,2,2",
        "mesh.allow_unused_devices=True",
        "USE_DORA=True",
    )
    assert praxis("hf", "export", started / "dora", started / "refused") == 2
    assert "--adapters merge" in capsys.readouterr().err
    adapters_are_right(started, "dora")


@pytest.mark.parametrize(
    "experiment",
    [
        pytest.param("ChatFull", marks=pytest.mark.nightly),
        pytest.param("ChatDpo", marks=pytest.mark.slow),
        pytest.param("ChatDpoLora", marks=pytest.mark.nightly),
    ],
)
def test_the_other_ways_to_fine_tune_begin_with_the_models_weights(started, experiment):
    if experiment.startswith("ChatDpo"):
        pairs = [json.loads(line) for line in (started / "chat.jsonl").read_text().splitlines()]
        text = "\n".join(
            json.dumps(
                {
                    "prompt": pair["messages"][:1],
                    "chosen": pair["messages"][1:],
                    "rejected": [{"role": "assistant", "content": f"No {number}."}],
                }
            )
            for number, pair in enumerate(pairs)
        )
        (started / "pairs.jsonl").write_text(text)
    files = (f"CHAT_FILES={started / 'pairs.jsonl'}",) if "Dpo" in experiment else ()
    done = finetuned(
        started,
        experiment,
        experiment,
        "run.num_train_steps=2",
        "run.evaluation.every_steps=2",
        *files,
    )
    assert "weights from" in done.out
    if "Dpo" in experiment:
        assert "rewards/margins" in done.out
        first = json.loads((started / experiment / "metrics.jsonl").read_text().splitlines()[0])
        assert first["loss"] == pytest.approx(np.log(2.0), abs=1e-4)
    if experiment == "ChatDpo":  # The frozen copy stays here.
        out = started / "dpo"
        assert praxis("hf", "export", started / experiment, out) == 0
        base = load_file(started / "llama" / "model.safetensors")
        assert load_file(out / "model.safetensors").keys() == base.keys()


@pytest.mark.slow
def test_layers_that_share_a_tensor_are_merged_but_are_no_adapter_of_peft(
    started, tmp_path, capsys
):
    directory = with_vocabulary(GOLDENS / "hf" / "phi3", tmp_path / "phi3")
    job, message = tmp_path / "job", f"HF_DIR={directory}"
    succeed(
        "--exp=huggingface.ChatLora",
        f"--job_log_dir={job}",
        "--set",
        message,
        f"CHAT_FILES={started / 'chat.jsonl'}",
        "SEQ_LEN=120",
        "BATCH_SIZE=2",
        "run.num_train_steps=1",
        "mesh.ici_mesh_shape=1,1,1",
        "mesh.allow_unused_devices=True",
    )
    assert praxis("hf", "export", job, tmp_path / "peft", "--adapters=peft") == 2
    assert "gate_up_proj.weight merges several" in capsys.readouterr().err
    assert praxis("hf", "export", job, tmp_path / "merged", "--adapters=merge") == 0
    ids = np.arange(20).reshape(2, 10)
    actual = huggingface.load(tmp_path / "merged").logits(ids)
    np.testing.assert_allclose(actual, praxis_lite.load(job).predict(ids)[0], atol=0.05)
