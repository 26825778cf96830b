"""Writes an export's tokenizer, chat template, special tokens and end tokens."""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from praxis_lite.core.task import Task
from praxis_lite.decode.decoder import Decoder, TokenizerIds
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.files import (
    GENERATION_CONFIG,
    has_tokenizer,
    names_of_tokenizer,
    read_fields,
)
from praxis_lite.inputs.tokenizers.json_tokenizer import JsonTokenizer

# Endings of fields of generation_config.json that name ids of a tokenizer.
_OF_IDS = ("_token_id", "_token_ids", "_words_ids", "suppress_tokens")
Note = Callable[[str], None]


def write_text_files(
    target: Path, base: Path, task: Task, config: Mapping[str, Any], note: Note
) -> dict[str, Any]:
    """Writes the tokenizer of a task, and generation_config.json with the task's end tokens.

    Args:
      target: directory of the export.
      base: directory of the model that the task began with. Its files are copied if the task has
        the same tokenizer; its settings of generation, except ids, in any case.
      task: as the job ran it.
      config: fields of the model's config.json.
      note: called with what the export lacks.

    Returns:
      `config`, with the task's special tokens if they differ from those of `base`.
    """
    tokenizer = task.tokenizer
    is_named = isinstance(tokenizer, JsonTokenizer)
    fields = read_fields(base / GENERATION_CONFIG)
    ends, is_set = _ends(task)
    size = next((x["vocab_size"] for x in _parts(config) if x.get("vocab_size")), None)
    ends = [i for i in ends if size is None or i < size]
    if is_named and not _is_of(base, tokenizer):
        _copy(tokenizer.directory, target)
        ids = {
            "bos_token_id": tokenizer.bos_id, "eos_token_id": ends or None,
            "pad_token_id": tokenizer.pad_id,
        }
        fields = {name: x for name, x in fields.items() if not name.endswith(_OF_IDS)}
        _write_generation(target, fields | {name: x for name, x in ids.items() if x is not None})
        if size is not None and tokenizer.vocab_size > size:
            note(f"{tokenizer} has {tokenizer.vocab_size} tokens, but the model only {size} rows")
        return _with_ids(config, ids)
    if has_tokenizer(base) and not is_named:
        note(f"the export has no tokenizer, because the job's, {tokenizer}, has no files")
        copy_files(base, target, [GENERATION_CONFIG])
    else:
        _copy(base, target)
    if is_set or (is_named and ends and set(ends) != _stated_ends(tokenizer, fields, config)):
        _write_generation(target, fields | {"eos_token_id": ends})
    return _with_ids(config, {"eos_token_id": ends}) if is_set else dict(config)


def _ends(task: Task) -> tuple[list[int], bool]:
    """Returns the ids that end an answer, and whether the job's decoder sets them explicitly."""
    decoder = task.decoder
    if isinstance(decoder, Decoder) and decoder.eos_ids:
        return list(decoder.eos_ids), not isinstance(decoder.eos_id, TokenizerIds)
    return list(task.tokenizer.eos_ids) if task.tokenizer else [], False


def _stated_ends(
    tokenizer: Tokenizer, generation: Mapping[str, Any], config: Mapping[str, Any]
) -> set[int | None]:
    """Returns the end tokens that transformers reads: generation_config.json, else config.json."""
    for fields in [generation] if generation else _parts(config):
        if (ends := fields.get("eos_token_id")) is not None:
            return set(ends if isinstance(ends, list) else [ends])
    return set() if generation else {tokenizer.eos_id}


def _is_of(base: Path, tokenizer: JsonTokenizer) -> bool:
    """Returns whether a directory's tokenizer has the same ids, end tokens and chat template."""
    if not has_tokenizer(base):
        return False
    ours, others = tokenizer, JsonTokenizer(base)
    if ours.fingerprint() != others.fingerprint():
        return False
    sources = [item.chat.sources if item.chat else None for item in (ours, others)]
    return sources[0] == sources[1]


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [x for x in (config, config.get("text_config")) if isinstance(x, Mapping)]


def _with_ids(config: Mapping[str, Any], ids: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config with these token ids at the top, and in text_config if it has them."""
    of_one = {name: x[0] if isinstance(x, list) and len(x) == 1 else x for name, x in ids.items()}
    config = {**config, **of_one}
    if isinstance(inside := config.get("text_config"), Mapping):
        config["text_config"] = {**inside, **{k: x for k, x in of_one.items() if k in inside}}
    return config


def _write_generation(target: Path, fields: Mapping[str, Any]) -> None:
    (target / GENERATION_CONFIG).write_text(json.dumps(fields, indent=2) + "\n", "utf-8")


def _copy(source: Path, target: Path) -> None:
    copy_files(source, target, names_of_tokenizer(source))


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copies those of the named files that exist."""
    for name in names:
        if (source / name).is_file():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, target / name)
