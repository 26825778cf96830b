"""Converts users' prompts, which are strings, conversations or token ids, to a batch."""

import dataclasses
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from praxis_lite.core.errors import ConfigError, require, shortened
from praxis_lite.core.task import Task
from praxis_lite.experiment.experiment import Job
from praxis_lite.host.file_reading import has_extension, opened, parse_json
from praxis_lite.inputs.numpy_data import InMemory
from praxis_lite.inputs.sources.faults import none_skipped
from praxis_lite.inputs.sources.files.texts import decode_utf8, require_valid_unicode
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

# A mapping is a row with one of the PROMPT_KEYS, and may have tools and documents.
Prompt = str | Sequence[int] | Sequence[Message] | Mapping[str, Any] | Conversation
Prompts = str | Mapping[str, Any] | Conversation | Sequence[Prompt]

# Decoding inputs for a task that continues prompts.
_PROMPT_INPUTS = {"ids", "prefix_lengths", "weights"}
# Keys under which a JSON line may contain a prompt.
PROMPT_KEYS = ("prompt", "messages", "conversations")
_JSON_LINES = (".jsonl", ".ndjson", ".json")


def read_prompts(path: Path) -> list[Prompt]:
    """Reads prompts from a file with one prompt per line, and skips blank lines.

    In a file NAME.jsonl, NAME.ndjson or NAME.json, each line is an object with the key "prompt" (a
    string or messages), "messages" or "conversations", and optionally the CONTEXT_KEYS.

    Args:
      path: The file, which may be a pipe created by the shell.

    Raises:
      ConfigError: The file cannot be read or contains no prompts, or a line is invalid.
    """
    name = f"--prompts={path}"
    try:
        # Read from shell pipes such as <(command). `opened` rejects all other pipes, because
        # they may never end.
        is_shell_pipe = str(path) == "/dev/stdin" or path.parent == Path("/dev/fd")
        with path.open("rb") if is_shell_pipe else opened(path) as file:
            data = file.read()
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error}.") from error
    with none_skipped():
        if has_extension(path, *_JSON_LINES):
            prompts = list[Prompt]()
            for number, line in enumerate(data.split(b"\n"), 1):
                if line.strip():
                    where = f"{name}, line {number}"
                    row = parsed(line, where)
                    prompts.append(_prompt_of_row(row, where, "Remove them from the file."))
        else:
            # Do not use `splitlines`, which also splits at U+2028 and similar characters.
            lines = re.split("\r\n|\r|\n", decode_utf8(data, name, is_file=True))
            texts = [line for line in lines if line.strip()]
            prompts = [*texts]
            if texts and all(map(_is_json_prompt, texts)):
                _log.warning(
                    "%s contains JSON, but each line is read as the text of a prompt. To read the "
                    "prompts in the JSON, give the file a name that ends in .jsonl.",
                    name,
                )
    if not prompts:
        raise ConfigError(f"{name} contains no prompts: every line is blank.")
    return prompts


def _is_json_prompt(line: str) -> bool:
    try:
        value = parse_json(line)
    except ValueError:
        return False
    return isinstance(value, dict) and not value.keys().isdisjoint(PROMPT_KEYS)


def _prompt_of_row(row: Mapping[str, Any], where: str, fix: str) -> str | Conversation:
    """Returns the prompt in a row.

    Args:
      row: An object with one of the PROMPT_KEYS and, for messages, the CONTEXT_KEYS.
      where: Location of the row for error messages.
      fix: Advice for the error message about unknown keys.

    Raises:
      ConfigError: The row has another form.
    """
    given, row = row, row_without_nulls(row, where)
    key = next((name for name in PROMPT_KEYS if name in row), None)
    if key == "prompt" and isinstance(row[key], str):
        require_known(row, (key,), where, fix)
        return row[key]
    if key is not None and _is_conversation(row[key]):
        return conversation_of(row, where, key=key, fix=fix)
    raise ConfigError(
        f"{where} is {shortened(json.dumps(given, default=repr))}; expected "
        '{"prompt": TEXT}, or {"messages": [{"role": "user", "content": TEXT}, ...]}, optionally '
        f"with {', '.join(CONTEXT_KEYS)}."
    )


def with_prompts(job: Job, prompts: Sequence[Prompt]) -> Job:
    """Returns the job with these prompts as its only decode dataset; see `prompt_batch`."""
    check_parts(job)
    batch = prompt_batch(job.task, prompts, "praxis decode")
    return dataclasses.replace(job, decode_datasets={COMMAND_LINE: batch})


def prompt_batch(task: Task, prompts: Prompts, caller: str = "generate") -> InMemory:
    """Returns a pipeline with a single batch of prompts.

    The prompts are padded to one of a few lengths, because each length requires a separate
    compilation.

    Args:
      task: The task of a language model.
      prompts: Strings, conversations, token ids, or rows {"messages" or "prompt", "tools", ...}.
        Strings are preceded by the start token that training documents have. Conversations are
        lists of messages, and are formatted by the tokenizer's chat template. Token ids are used
        unchanged.
      caller: The function or flag to which the prompts were passed, for error messages.

    Raises:
      ConfigError: The task does not generate text, a prompt is empty, or the chat template is
        missing.
    """
    tokenizer = task.tokenizer
    if not continues_prompts(task):
        raise ConfigError(
            f"{caller} requires a language model task, but {type(task).__name__} does not continue "
            "prompts. Use `praxis decode` without prompts, or decode(NAME), to decode the job's "
            "datasets, or predict(ARRAYS) to compute the model's outputs."
        )
    prompt_list: list[Prompt] = []
    if isinstance(prompts, str | Mapping | Conversation):
        prompt_list = [prompts]
    elif isinstance(prompts, Iterable) and not isinstance(prompts, bytes):
        prompt_list = list(prompts)
    size = task.num_ids().get("ids")
    rows = [prompt_ids(prompt, tokenizer, caller, size) for prompt in prompt_list]
    if not rows or not all(map(len, rows)):
        raise ConfigError(
            f"{caller} was given {prompts!a:.100}; expected a prompt or a list of prompts, each "
            "with at least one token."
        )
    num_new, num_positions = task.decoder.max_decode_steps, task.num_ids().get("segment_pos")
    length = length_of_prompts(max(map(len, rows)), num_new, num_positions)
    ids = np.zeros((len(rows), length), np.int32)
    for row, prompt in zip(ids, rows, strict=True):
        row[: len(prompt)] = prompt
    arrays = {
        "ids": ids,
        "prefix_lengths": np.array([len(row) for row in rows], np.int32),
        "weights": np.ones(len(rows), np.float32),
    }
    return InMemory(arrays, batch_size=len(rows), shuffle=False)


def continues_prompts(task: Task) -> bool:
    """Returns whether a task decodes prompts of text, as a language model does."""
    return set(task.required_decode_inputs) == _PROMPT_INPUTS and task.tokenizer is not None


def check_language_model(task: Task, user: str) -> None:
    """Checks that a task continues text with a causal model, in a single process.

    Args:
      task: The task.
      user: Name of the feature that requires this, for error messages.

    Raises:
      ConfigError: The task does not generate text with a causal model, its tokenizer does not match
        the model's vocabulary, or there are several processes.
    """
    tokenizer = task.tokenizer
    if not continues_prompts(task):
        raise ConfigError(
            f"{user} requires a task that generates text, but {type(task).__name__} does not. Use "
            "a job with a LanguageModelTask."
        )
    kind = getattr(task.model.abstract_module(), "model_type", "causal")
    require(kind == "causal", "task.model.model_type", kind, "'causal'", f"{user} needs it.")
    size = task.num_ids().get("ids")
    # A task without a tokenizer has the byte tokenizer by default.
    is_default = type(tokenizer) is ByteTokenizer and size not in (256, 257, None)
    if isinstance(tokenizer, TokenIds) or is_default:
        raise ConfigError(
            f"The model has a vocabulary of {size} ids, but its task has no tokenizer. Set "
            "task.tokenizer to the directory of a tokenizer."
        )
    require(
        jax.process_count() == 1,
        "The number of processes",
        jax.process_count(),
        "1",
        f"Run {user} in one process, with all the devices of its host.",
    )


def prompt_ids(prompt: Prompt, tokenizer: Any, caller: str, size: int | None = None) -> np.ndarray:
    """Returns a prompt's token ids as int32[length]; the length is 0 for an empty list.

    Args:
      prompt: A string, a conversation or token ids.
      tokenizer: The task's tokenizer.
      caller: The function or flag to which the prompt was passed, for error messages.
      size: Vocabulary size, used to check the range of token ids; None to skip the check.

    Raises:
      ConfigError: The prompt has the wrong type, an id is out of range, or the chat template is
        missing.
    """
    with none_skipped():
        if isinstance(prompt, Mapping):
            prompt = _prompt_of_row(prompt, caller, "Remove them.")
        elif _is_conversation(prompt):
            prompt = Conversation(conversation(prompt, caller))
        if isinstance(prompt, str):
            return tokenizer.encode_prompt(require_valid_unicode(prompt, caller, "prompt"))
        if isinstance(prompt, Conversation):
            with errors_at(prompt.where or caller):
                return tokenizer.apply_chat_template(
                    prompt.messages, add_generation_prompt=True, **prompt.variables
                )
    try:
        ids = np.asarray(prompt)
        kind = f"{ids.dtype}{list(ids.shape)}"
        # NumPy converts an empty list to floats.
        is_valid = ids.ndim == 1 and (not ids.size or ids.dtype.kind in "iu")
    except (TypeError, ValueError, OverflowError):
        kind, is_valid = shortened(repr(prompt)), False
    if not is_valid:
        raise ConfigError(
            f"{caller} was given a prompt of {kind}; expected a string, a conversation "
            '[{"role": ..., "content": ...}, ...], or the token ids of one prompt, int[length].'
        )
    return token_ids(ids, f"{caller}: a prompt", size, ndim=1) if ids.size else ids


def title(prompt: Prompt, tokenizer: Any) -> str:
    """Returns a prompt, or the last message in a conversation, as text for display."""
    if isinstance(prompt, Mapping):
        prompt = _prompt_of_row(prompt, "prompt", "")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Conversation):
        prompt = prompt.messages
    if _is_conversation(prompt):
        return text_of(as_messages(prompt)[-1].get("content"))
    return tokenizer.decode(prompt)


def _is_conversation(value: Any) -> bool:
    is_list = isinstance(value, list | tuple) and len(value) > 0
    return is_list and all(isinstance(message, Mapping) for message in value)


_log = logging.getLogger(__name__)
