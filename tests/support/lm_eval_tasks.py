"""Writes small lm_eval tasks and the small Llama that they evaluate.

This module does not import praxis_lite, so that the script for the goldens can use it.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GOLDENS = Path(__file__).parents[1] / "goldens"
TASKS = ("tiny_choice", "tiny_rolling", "tiny_generate")
QUESTIONS = [
    {"question": "the sun is over the", "choices": ["hill", "see", "hill and the sea."], "gold": 0},
    {"question": "a hen ", "choices": [" sat.", "ran over the hill.", "ate"], "gold": 1},
    {"question": "<s>the rat", "choices": ["sat on the hen", "ate the tea", "is thin"], "gold": 2},
    # Longer than the model's 128 positions.
    {"question": "the sun is on the sea and the hen is in the tree. " * 12,
     "choices": ["the sun", "a hen is here and there"], "gold": 1},
    {"question": "here,\nthere", "choices": ["and", "\nand"], "gold": 0},
    # After <s>, the first choice is the most likely token.
    {"question": "is on", "choices": ["tree", "sea"], "gold": 0},
]  # fmt: skip
TEXTS = [
    {"text": "the sea is thin."},
    {"text": "a hen sat in the tree, and the rat ran on and on over the hill. " * 9},
    {"text": "<s>and"},
]
CONTEXTS = [
    {"text": "the sun is", "answer": "x"},
    {"text": "a rat and a hen", "answer": "x"},
    {"text": "over the hill. the hen is in the tea and the rat is there. " * 9, "answer": "x"},
]
USER, ANSWER = {"role": "user", "content": "the sun"}, {"role": "assistant", "content": "is thin "}
CHATS = {
    "question": ([USER], True),
    "begun answer": ([USER, ANSWER], False),
    "system": ([{"role": "system", "content": "a hen"}, USER], True),
}
YAML = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
num_fewshot: 0
{more}"""
MORE = {
    "tiny_choice": """\
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list:
  - metric: acc
""",
    "tiny_rolling": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
""",
    "tiny_generate": """\
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["h"]
  max_gen_toks: 40
  do_sample: false
metric_list:
  - metric: exact_match
""",
}


def write_tasks(folder: Path) -> Path:
    """Writes three tasks to a folder, and returns it as lm_eval's include_path."""
    for name, rows in zip(TASKS, (QUESTIONS, TEXTS, CONTEXTS), strict=True):
        write_task(folder, name, rows, MORE[name])
    return folder


def write_task(folder: Path, name: str, rows: Sequence[Mapping[str, Any]], more: str) -> None:
    """Writes a task and its rows; `more` contains additional lines of YAML."""
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    text = YAML.format(name=name, file=file, more=more)
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def model_directory(folder: Path, tokenizer: str) -> Path:
    """Copies the golden Llama and a tokenizer to a folder, and returns the folder."""
    for path in (*(GOLDENS / "hf/llama").iterdir(), *(GOLDENS / "lm_eval" / tokenizer).iterdir()):
        if path.suffix in (".json", ".safetensors", ".jinja") and path.name != "goldens.json":
            shutil.copyfile(path, folder / path.name)
    return folder
