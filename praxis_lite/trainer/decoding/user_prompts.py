"""Prompts that a user gives, as texts, conversations or token ids, and a batch of them."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from praxis_lite.errors import ConfigError, shown
from praxis_lite.experiment.experiment import Job
from praxis_lite.inputs import InMemory
from praxis_lite.inputs.text.token_ids import token_ids
from praxis_lite.job.job_dir import COMMAND_LINE
from praxis_lite.task import Task
from praxis_lite.trainer.job_checks import check_parts

Message = Mapping[str, Any]  # With a "role" and a "content".
Prompt = str | Sequence[int] | Sequence[Message]
Prompts = str | Sequence[Prompt]


def read_prompts(path: Path) -> list[Prompt]:
    """Returns the prompts of a file: lines, or of NAME.jsonl what stands under a key of each.

    The key is "prompt", of a text, or "messages", of a conversation. Blank lines are left out.

    Raises:
      ConfigError: the file cannot be read, has no prompt, or a line of it is something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--prompts={path} cannot be read: {error}.") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"--prompts={path} has no prompt: every line is blank.")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_of_json(line, f"--prompts={path}, line {number}") for number, line in numbered]


def _of_json(line: str, where: str) -> Prompt:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}.") from None
    if isinstance(found, dict):
        if isinstance(found.get("prompt"), str):
            return found["prompt"]
        if _is_conversation(found.get("messages")):
            return found["messages"]
    raise ConfigError(
        f'{where} is {shown(line)}; wanted is {{"prompt": TEXT}}, or {{"messages": [{{"role": '
        '"user", "content": TEXT}, ...]}.'
    )


def as_conversations(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Returns the prompts with each text as what a user says."""
    return [
        [{"role": "user", "content": one}] if isinstance(one, str) else one for one in prompts
    ]


def with_prompts(job: Job, prompts: Sequence[Prompt]) -> Job:
    """Returns a job that decodes these prompts alone, see `prompt_batch`."""
    check_parts(job)
    batch = prompt_batch(job.task, prompts, "--mode=decode")
    return dataclasses.replace(job, decode_datasets={COMMAND_LINE: batch})


def prompt_batch(
    task: Task, prompts: Prompts, what: str = "generate", *, multiple_of: int = 1
) -> InMemory:
    """Returns a pipeline of one batch.

    Args:
      task: of a language model.
      prompts: texts, begun as documents are in training; conversations, by the tokenizer's chat
        template; or token ids, taken as they are.
      what: was given the prompts, for messages.
      multiple_of: the length to which prompts are padded is a multiple of it.

    Raises:
      ConfigError: the task continues no prompts, a prompt is empty, or there is no template.
    """
    wanted = {"ids", "prefix_lengths", "weights"}
    tokenizer = getattr(task, "tokenizer", None)
    if set(task.required_decode_inputs) != wanted or tokenizer is None:
        raise ConfigError(
            f"{type(task).__name__} continues no prompts. {what} with prompts is for language "
            "models; --mode=decode without any, or decode(NAME), decodes the job's datasets, "
            "predict(ARRAYS) gives the model's outputs."
        )
    is_list = isinstance(prompts, Iterable) and not isinstance(prompts, str | bytes | Mapping)
    given = [prompts] if isinstance(prompts, str) else list(prompts) if is_list else []
    size = task.num_ids().get("ids")
    rows = [_ids(one, tokenizer, what, size) for one in given]
    if not rows or not all(map(len, rows)):
        raise ConfigError(
            f"{what} was given {prompts!a:.100}; give a prompt, or a list of prompts "
            "with a token each at least."
        )
    longest = max(map(len, rows))
    ids = np.zeros((len(rows), -(-longest // multiple_of) * multiple_of), np.int32)
    for row, prompt in zip(ids, rows, strict=True):
        row[: len(prompt)] = prompt
    arrays = {
        "ids": ids,
        "prefix_lengths": np.array([len(one) for one in rows], np.int32),
        "weights": np.ones(len(rows), np.float32),
    }
    return InMemory(arrays, batch_size=len(rows), shuffle=False)


def title(prompt: Prompt, tokenizer: Any) -> str:
    """Returns a prompt as a person reads it: of a conversation its last message."""
    if isinstance(prompt, str):
        return prompt
    if _is_conversation(prompt):
        return str(prompt[-1]["content"])
    return tokenizer.decode(prompt)


def _is_conversation(found: Any) -> bool:
    return isinstance(found, list) and bool(found) and all(
        isinstance(one, Mapping) and {"role", "content"} <= one.keys() for one in found
    )


def _ids(prompt: Prompt, tokenizer: Any, what: str, size: int | None) -> np.ndarray:
    if isinstance(prompt, str):
        return tokenizer.encode_prompt(prompt)
    if _is_conversation(prompt):
        return tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
    try:
        ids = np.asarray(prompt)
        kind = f"{ids.dtype}{list(ids.shape)}"
        is_right = ids.ndim == 1 and (not ids.size or ids.dtype.kind in "iu")
    except (TypeError, ValueError, OverflowError):
        kind, is_right = shown(repr(prompt)), False
    if not is_right:
        raise ConfigError(
            f"{what} was given a prompt of {kind}; give a text, a "
            'conversation [{"role": ..., "content": ...}, ...], or the token ids of one prompt, '
            "int[length]."
        )
    return token_ids(ids, f"{what}: a prompt", size, ndim=1) if ids.size else ids
