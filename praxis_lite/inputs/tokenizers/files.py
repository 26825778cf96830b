"""Finds and reads the files in a tokenizer directory."""

import json
import os
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError, shortened
from praxis_lite.host.places import local_folder

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
TEMPLATE, GENERATION_CONFIG, CONFIG = (
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)
# Subdirectory in which transformers stores additional templates, such as tool_use.jinja.
TEMPLATES = "additional_chat_templates"
# Vocabulary files for the libraries tokenizers, SentencePiece and tiktoken, and for the algorithms
# BPE and WordPiece.
_VOCABULARIES = (
    TOKENIZER_JSON,
    "*.model",
    "*.spm",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "*.tiktoken",
)
# All files of a tokenizer, without config.json, which belongs to the model.
PATTERNS = (
    *_VOCABULARIES,
    "merges.txt",
    TOKENIZER_CONFIG,
    SPECIAL_TOKENS,
    ADDED_TOKENS,
    TEMPLATE,
    f"{TEMPLATES}/*.jinja",
    GENERATION_CONFIG,
)


def tokenizer_folder(path: str | os.PathLike[str]) -> Path:
    """Returns the folder of a tokenizer, after downloading it if the path is a URL.

    Raises:
      ConfigError: See `local_folder`.
    """
    return local_folder(path, (*PATTERNS, CONFIG))


def has_tokenizer(path: str | os.PathLike[str]) -> bool:
    """Returns whether a directory or URL contains a tokenizer's vocabulary."""
    directory = tokenizer_folder(path)
    return any(path.is_file() for name in _VOCABULARIES for path in directory.glob(name))


def names_of_tokenizer(directory: Path) -> tuple[str, ...]:
    """Returns the relative paths of a directory's tokenizer files."""
    paths = {path for pattern in PATTERNS for path in directory.glob(pattern) if path.is_file()}
    return tuple(sorted(str(path.relative_to(directory)) for path in paths))


def read_fields(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, or {} if the file does not exist.

    Raises:
      ConfigError: The file cannot be read, or does not contain a JSON object.
    """
    if not path.exists():
        return {}
    try:
        fields = json.loads(_text_of(path))
    except json.JSONDecodeError as error:
        raise _unreadable(path, error) from None
    if not isinstance(fields, dict):
        raise ConfigError(f"The tokenizer file {path} is not a JSON object. Copy it again.")
    return fields


def _text_of(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")  # A BOM would be at the start of every prompt.
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"The tokenizer file {path} cannot be read: {shortened(str(error), 200)}. Copy it again."
    )


def chat_templates(directory: Path) -> dict[str, str]:
    """Returns a directory's chat templates, keyed by name, such as "default" and "tool_use".

    As in transformers, the files chat_template.jinja and additional_chat_templates/*.jinja take
    precedence over chat_template in tokenizer_config.json.

    Raises:
      ConfigError: A file cannot be read, or chat_template in tokenizer_config.json has the wrong
        type.
    """
    paths = {path.stem: path for path in sorted((directory / TEMPLATES).glob("*.jinja"))}
    if (directory / TEMPLATE).is_file():
        paths["default"] = directory / TEMPLATE
    if paths:
        return {name: _text_of(path) for name, path in paths.items()}
    source = read_fields(directory / TOKENIZER_CONFIG).get("chat_template") or {}
    if isinstance(source, str):
        return {"default": source}
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}
    if not isinstance(source, dict):
        raise ConfigError(
            f"{directory / TOKENIZER_CONFIG}: chat_template is {shortened(repr(source))}; expected "
            "a "
            'string or a list of {"name": ..., "template": ...}.'
        )
    return source


def special_tokens(directory: Path) -> dict[str, str]:
    """Returns the special tokens in tokenizer_config.json, keyed by role, such as "eos_token"."""
    fields = read_fields(directory / TOKENIZER_CONFIG)
    tokens = {
        role: value.get("content") if isinstance(value, dict) else value
        for role, value in fields.items()
        if role.endswith("_token")
    }
    return {role: text for role, text in tokens.items() if isinstance(text, str)}


def model_eos_ids(directory: Path) -> tuple[int, ...]:
    """Returns the EOS ids in generation_config.json, or else in config.json."""
    for name in (GENERATION_CONFIG, CONFIG):
        fields = read_fields(directory / name)
        ends = fields.get("eos_token_id", (fields.get("text_config") or {}).get("eos_token_id"))
        if ends is not None:
            return tuple(dict.fromkeys(ends if isinstance(ends, list) else [ends]))
    return ()
