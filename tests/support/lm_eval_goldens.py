"""Creates tests/goldens/lm_eval, the results of lm_eval's transformers adapter (`hf`).

    pip install torch transformers accelerate lm_eval
    python -m tests.support.lm_eval_goldens

The script does not import praxis_lite. It uses the model in tests/goldens/hf/llama.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"

import lm_eval  # noqa: E402
import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from tokenizers import decoders, models, pre_tokenizers, processors, trainers  # noqa: E402

from tests.support.lm_eval_tasks import (  # noqa: E402
    CHATS,
    GOLDENS,
    TASKS,
    model_directory,
    write_tasks,
)

FOLDER = GOLDENS / "lm_eval"
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
TEXT = [
    "the sun is over the hill and the sea. a hen sat in the tree, and the rat ran on and on.\n"
    "here and there, the thin rat ate the tea. the hen is on the hill. user assistant system.\n"
] * 4
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('no system') }}{% endif %}{{ '<|im_start|>' + m['role'] + '\n' "
    "+ m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# They start a text in different ways: like Llama, like GPT-2, and like Qwen (no start token).
TOKENIZERS = {"llama": (True, "<s>"), "gpt2": (False, "<s>"), "qwen": (False, None)}
TEXTS = ["the sun", " the sun", "a hen ", "<s>the sun", "</s>the sun", "", " ", "tea\n"]
PAIRS = [
    ("the sun", " is"), ("the sun ", "is"), ("the sun  ", " is"), ("the", "n"), ("a\n", "hen"),
    ("<s>the sun", " is"), ("the sun", "</s>"),
]  # fmt: skip


def write_tokenizer(folder: Path, adds_bos: bool, bos: str | None) -> None:
    """Writes a tokenizer with at most 101 ids, like the model's vocabulary."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=101, special_tokens=SPECIAL))
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def model(name: str, **settings: Any) -> HFLM:
    """Returns lm_eval's transformers adapter for the model with a given tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        directory = model_directory(Path(folder), name)
        return HFLM(str(directory), device="cpu", dtype="float32", batch_size=3, **settings)


def encoded(name: str, add_bos_token: bool | None) -> dict[str, Any]:
    """Returns the ids of texts and of pairs, and of the texts without special tokens."""
    adapter = model(name, add_bos_token=add_bos_token)
    return {
        "tokenizer": name,
        "add_bos_token": add_bos_token,
        "prefix_token_id": adapter.prefix_token_id,
        "texts": [[text, adapter.tok_encode(text)] for text in TEXTS],
        "bare": [[text, adapter.tok_encode(text, add_special_tokens=False)] for text in TEXTS],
        "pairs": [[*pair, *adapter._encode_pair(*pair)] for pair in PAIRS],
    }


def evaluated(name: str) -> dict[str, Any]:
    """Returns the responses to each task's requests, and the task's metrics."""
    with tempfile.TemporaryDirectory() as folder:
        tasks = TaskManager(include_path=str(write_tasks(Path(folder))))
        results = lm_eval.simple_evaluate(
            model(name), tasks=[*TASKS], task_manager=tasks, bootstrap_iters=0
        )
    return {
        task: {
            "answers": [sample["resps"] for sample in results["samples"][task]],
            "metrics": {
                key: value
                for key, value in results["results"][task].items()
                if isinstance(value, float) and "stderr" not in key
            },
        }
        for task in TASKS
    }


def main() -> None:
    """Writes the tokenizers and goldens.json."""
    torch.manual_seed(0)
    for name, settings in TOKENIZERS.items():
        write_tokenizer(FOLDER / name, *settings)
    llama = model("llama")
    goldens = {
        "versions": {
            module.__name__: module.__version__ for module in (lm_eval, transformers, torch)
        },
        "max_length": llama.max_length,
        "encoded": [encoded(name, adds) for name in TOKENIZERS for adds in (None, True, False)],
        "chats": {name: llama.apply_chat_template(*chat) for name, chat in CHATS.items()},
        "tasks": {name: evaluated(name) for name in ("llama", "qwen")},
    }
    (FOLDER / "goldens.json").write_text(json.dumps(goldens, indent=1) + "\n")


if __name__ == "__main__":
    main()
