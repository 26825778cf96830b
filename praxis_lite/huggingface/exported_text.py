"""Writes the tokenizer, chat template and generation config of an exported model."""

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

# Suffixes of the generation_config.json fields that contain token ids.
_TOKEN_ID_SUFFIXES = ("_token_id", "_token_ids", "_words_ids", "suppress_tokens")
Note = Callable[[str], None]


def write_text_files(
    target: Path, base: Path, task: Task, config: Mapping[str, Any], note: Note
) -> dict[str, Any]:
    """Writes the tokenizer files and generation_config.json, with the task's end-of-sequence ids.

    Args:
      target: Directory of the export.
      base: Directory of the model that the job started from. Its tokenizer files are copied if the
        task has the same tokenizer. Its generation settings are always kept, except for token ids
        that no longer apply.
      task: Task of the job.
      config: Fields of the model's config.json.
      note: Called with a message about files that are missing from the export.

    Returns:
      `config`, updated with the task's special tokens if they differ from the tokens in `base`.
    """
    tokenizer = task.tokenizer
    has_files = isinstance(tokenizer, JsonTokenizer)
    fields = read_fields(base / GENERATION_CONFIG)
    eos_ids, is_explicit = _eos_ids(task)
    vocab_size = next(
        (x["vocab_size"] for x in _nested_configs(config) if x.get("vocab_size")), None
    )
    # A tokenizer may have more tokens than the model has rows.
    eos_ids = [i for i in eos_ids if vocab_size is None or i < vocab_size]
    # The job has a different tokenizer: the token ids in the files of `base` no longer apply.
    if has_files and not _has_same_tokenizer(base, tokenizer):
        _copy_tokenizer(tokenizer.directory, target)
        ids = {
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": eos_ids or None,
            "pad_token_id": tokenizer.pad_id,
        }
        fields = {name: x for name, x in fields.items() if not name.endswith(_TOKEN_ID_SUFFIXES)}
        _write_generation(target, fields | {name: x for name, x in ids.items() if x is not None})
        if vocab_size is not None and tokenizer.vocab_size > vocab_size:
            note(
                f"{tokenizer} has {tokenizer.vocab_size} tokens, but the model's embedding has "
                f"only {vocab_size} rows"
            )
        return _with_ids(config, ids)
    # The job has no tokenizer files, so those of `base` would be wrong.
    if has_tokenizer(base) and not has_files:
        note(f"the export has no tokenizer, because the job's tokenizer {tokenizer} has no files")
        copy_files(base, target, [GENERATION_CONFIG])
    else:
        _copy_tokenizer(base, target)
    # Keep the base model's end-of-sequence ids, unless the job ends sequences differently.
    is_changed = has_files and eos_ids and set(eos_ids) != _base_eos_ids(tokenizer, fields, config)
    if is_explicit or is_changed:
        _write_generation(target, fields | {"eos_token_id": eos_ids})
    return _with_ids(config, {"eos_token_id": eos_ids}) if is_explicit else dict(config)


def _eos_ids(task: Task) -> tuple[list[int], bool]:
    """Returns the task's end-of-sequence ids, and whether its decoder sets them explicitly."""
    decoder = task.decoder
    if isinstance(decoder, Decoder) and decoder.eos_ids:
        return list(decoder.eos_ids), not isinstance(decoder.eos_id, TokenizerIds)
    return list(task.tokenizer.eos_ids) if task.tokenizer else [], False


def _base_eos_ids(
    tokenizer: Tokenizer, generation: Mapping[str, Any], config: Mapping[str, Any]
) -> set[int | None]:
    """Returns the base model's end-of-sequence ids from generation_config.json or config.json."""
    for fields in [generation] if generation else _nested_configs(config):
        if (eos_ids := fields.get("eos_token_id")) is not None:
            return set(eos_ids if isinstance(eos_ids, list) else [eos_ids])
    return set() if generation else {tokenizer.eos_id}


def _has_same_tokenizer(base: Path, tokenizer: JsonTokenizer) -> bool:
    """Returns whether a directory's tokenizer has the same ids, EOS tokens and chat template."""
    if not has_tokenizer(base):
        return False
    base_tokenizer = JsonTokenizer(base)
    if tokenizer.fingerprint() != base_tokenizer.fingerprint():
        return False
    templates = [x.chat.sources if x.chat else None for x in (tokenizer, base_tokenizer)]
    return templates[0] == templates[1]


def _nested_configs(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the config and, if it has one, its text_config."""
    return [x for x in (config, config.get("text_config")) if isinstance(x, Mapping)]


def _with_ids(config: Mapping[str, Any], ids: Mapping[str, Any]) -> dict[str, Any]:
    """Updates token ids in a config, and in its text_config if they are repeated there."""
    scalars = {name: x[0] if isinstance(x, list) and len(x) == 1 else x for name, x in ids.items()}
    config = {**config, **scalars}
    if isinstance(text_config := config.get("text_config"), Mapping):
        repeated = {k: x for k, x in scalars.items() if k in text_config}
        config["text_config"] = {**text_config, **repeated}
    return config


def _write_generation(target: Path, fields: Mapping[str, Any]) -> None:
    (target / GENERATION_CONFIG).write_text(json.dumps(fields, indent=2) + "\n", "utf-8")


def _copy_tokenizer(source: Path, target: Path) -> None:
    copy_files(source, target, names_of_tokenizer(source))


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copies the named files that exist."""
    for name in names:
        if (source / name).is_file():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, target / name)
