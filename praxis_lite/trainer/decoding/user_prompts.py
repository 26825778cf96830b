"""Prompts that a user gives, as texts, conversations or token ids, and a batch of them."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from praxis_lite.core.errors import ConfigError, require, shown
from praxis_lite.core.task import Task
from praxis_lite.experiment.experiment import Job
from praxis_lite.host.file_reading import opened
from praxis_lite.inputs.numpy_data import InMemory
from praxis_lite.inputs.sources.faults import none_skipped
from praxis_lite.inputs.sources.files.texts import checked, decoded
from praxis_lite.inputs.sources.json_lines import parsed
from praxis_lite.inputs.text.length_classes import length_of_prompts
from praxis_lite.inputs.text.messages import (
    CONTEXT_KEYS,
    Conversation,
    conversation,
    conversation_of,
    errors_at,
    require_known,
    row_without_nulls,
)
from praxis_lite.inputs.text.token_ids import token_ids
from praxis_lite.inputs.tokenizers.chat_messages import Message, as_messages, text_of
from praxis_lite.inputs.tokenizers.plain import ByteTokenizer, TokenIds
from praxis_lite.job.job_dir import COMMAND_LINE
from praxis_lite.trainer.checks.job_checks import check_parts

__all__ = ("check_language_model", "prompt_ids")

# A mapping is a row of a conversation, which may have tools and documents next to its messages.
Prompt = str | Sequence[int] | Sequence[Message] | Mapping[str, Any] | Conversation
Prompts = str | Mapping[str, Any] | Conversation | Sequence[Prompt]

# What tasks that continue prompts read.
_PROMPT_INPUTS = {"ids", "prefix_lengths", "weights"}
# Keys under which a line of a file may have its prompt.
PROMPT_KEYS = ("prompt", "messages", "conversations")


def read_prompts(path: Path) -> list[Prompt]:
    """Returns the prompts of a file: its lines, or in NAME.jsonl the value of a key of each line.

    The key is "prompt", of a text or of messages, or "messages" or "conversations"; next to
    messages may be the CONTEXT_KEYS. Blank lines are left out.

    Raises:
      ConfigError: the file cannot be read, has no prompt, or a line of it is something else.
    """
    name = f"--prompts={path}"
    try:
        # A pipe of the shell's own, <(command), is read; any other may have no end.
        is_of_shell = str(path) == "/dev/stdin" or path.parent == Path("/dev/fd")
        with path.open("rb") if is_of_shell else opened(path) as file:
            data = file.read()
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error}.") from error
    with none_skipped():
        if path.suffix == ".jsonl":
            numbered = enumerate(data.split(b"\n"), 1)
            prompts = [
                _of_json(line, f"{name}, line {number}") for number, line in numbered
                if line.strip()
            ]
        else:
            # Not splitlines: U+2028 and similar characters may be part of a text.
            lines = re.split("\r\n|\r|\n", decoded(data, name, is_file=True))
            prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"{name} has no prompt: every line is blank.")
    return prompts


def _of_json(line: bytes, where: str) -> Prompt:
    row = row_without_nulls(parsed(line, where), where)
    key = next((name for name in PROMPT_KEYS if name in row), None)
    fix = "Remove them from the file."
    if key == "prompt" and isinstance(row[key], str):
        require_known(row, (key,), where, fix)
        return checked(row[key], where, "prompt")
    if key is not None and _is_conversation(row[key]):
        return conversation_of(row, where, key=key, fix=fix)
    raise ConfigError(
        f'{where} is {shown(line.decode())}; expected {{"prompt": TEXT}}, or {{"messages": '
        f'[{{"role": "user", "content": TEXT}}, ...]}}, perhaps with {", ".join(CONTEXT_KEYS)}.'
    )


def with_prompts(job: Job, prompts: Sequence[Prompt]) -> Job:
    """Returns a job that decodes these prompts alone, see `prompt_batch`."""
    check_parts(job)
    batch = prompt_batch(job.task, prompts, "--mode=decode")
    return dataclasses.replace(job, decode_datasets={COMMAND_LINE: batch})


def prompt_batch(task: Task, prompts: Prompts, what: str = "generate") -> InMemory:
    """Returns a pipeline of a single batch, padded to its length class: each length compiles.

    Args:
      task: of a language model.
      prompts: texts, begun as documents are in training; conversations, by the tokenizer's chat
        template, as lists of messages or as rows {"messages", "tools", ...}; or token ids, taken as
        they are.
      what: was given the prompts, for messages.

    Raises:
      ConfigError: the task continues no prompts, a prompt is empty, or there is no template.
    """
    tokenizer = task.tokenizer
    if set(task.required_decode_inputs) != _PROMPT_INPUTS or tokenizer is None:
        raise ConfigError(
            f"{type(task).__name__} continues no prompts. {what} with prompts is for language "
            "models; --mode=decode without any, or decode(NAME), decodes the job's datasets, "
            "predict(ARRAYS) gives the model's outputs."
        )
    is_one = isinstance(prompts, str | Mapping | Conversation)
    is_list = isinstance(prompts, Iterable) and not isinstance(prompts, bytes)
    given = [prompts] if is_one else list(prompts) if is_list else []
    size = task.num_ids().get("ids")
    rows = [prompt_ids(item, tokenizer, what, size) for item in given]
    if not rows or not all(map(len, rows)):
        raise ConfigError(
            f"{what} was given {prompts!a:.100}; give a prompt, or a list of prompts "
            "with a token each at least."
        )
    num_new, num_positions = task.decoder.max_decode_steps, task.num_ids().get("segment_pos")
    length = length_of_prompts(max(map(len, rows)), num_new, num_positions)
    ids = np.zeros((len(rows), length), np.int32)
    for row, prompt in zip(ids, rows, strict=True):
        row[: len(prompt)] = prompt
    arrays = {
        "ids": ids,
        "prefix_lengths": np.array([len(element) for element in rows], np.int32),
        "weights": np.ones(len(rows), np.float32),
    }
    return InMemory(arrays, batch_size=len(rows), shuffle=False)


def check_language_model(task: Task, user: str) -> None:
    """Checks that a task continues texts with a causal model, in this process alone.

    Args:
      user: What needs it, for messages.

    Raises:
      ConfigError: It does not, or its tokenizer is not the model's; gives the reason.
    """
    tokenizer = task.tokenizer
    if set(task.required_decode_inputs) != _PROMPT_INPUTS or tokenizer is None:
        raise ConfigError(
            f"{type(task).__name__} continues no texts; {user} needs a task that does. Give a job "
            "of a LanguageModelTask."
        )
    kind = getattr(task.model.abstract_module(), "model_type", "causal")
    require(kind == "causal", "task.model.model_type", kind, "'causal'", f"{user} needs it.")
    size = task.num_ids().get("ids")
    # Bytes are what a task without a tokenizer has.
    is_of_other_ids = type(tokenizer) is ByteTokenizer and size not in (256, 257, None)
    if isinstance(tokenizer, TokenIds) or is_of_other_ids:
        raise ConfigError(
            f"The model has {size} ids, and its task no tokenizer that makes them of text. Set the "
            "directory of its tokenizer: task.tokenizer=DIRECTORY."
        )
    require(
        jax.process_count() == 1, "The number of processes", jax.process_count(), "1",
        f"Run {user} in one process, with all the devices of its host.",
    )


def prompt_ids(
    prompt: Prompt, tokenizer: Any, what: str, size: int | None = None
) -> np.ndarray:
    """Returns the ids of a prompt of any kind, int32[length]; of an empty list none.

    Args:
      what: was given the prompt, for messages.
      size: of the vocabulary, which ids that are given must not exceed.

    Raises:
      ConfigError: It is not a prompt, has ids out of range, or there is no chat template.
    """
    with none_skipped():
        if isinstance(prompt, str):
            return tokenizer.encode_prompt(checked(prompt, what, "prompt"))
        if isinstance(prompt, Mapping):
            prompt = conversation_of(prompt, what, fix="Remove them.")
        elif _is_conversation(prompt):
            prompt = Conversation(conversation(prompt, what))
        if isinstance(prompt, Conversation):
            with errors_at(prompt.where or what):
                return tokenizer.apply_chat_template(
                    prompt.messages, add_generation_prompt=True, **prompt.variables
                )
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


def title(prompt: Prompt, tokenizer: Any) -> str:
    """Returns a prompt as a person reads it: of a conversation its last message."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        prompt = conversation_of(prompt, "prompt")
    if isinstance(prompt, Conversation):
        prompt = prompt.messages
    if _is_conversation(prompt):
        return text_of(as_messages(prompt)[-1].get("content"))
    return tokenizer.decode(prompt)


def _is_conversation(result: Any) -> bool:
    is_list = isinstance(result, list | tuple) and len(result) > 0
    return is_list and all(isinstance(item, Mapping) for item in result)
