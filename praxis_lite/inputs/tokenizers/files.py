"""The files of a tokenizer's directory: their names, and their fields."""

import json
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError, shown

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
TEMPLATE, GENERATION_CONFIG, CONFIG = (
    "chat_template.jinja", "generation_config.json", "config.json"
)
# Of transformers: further templates by name, such as tool_use.jinja.
TEMPLATES = "additional_chat_templates"
# Each is a vocabulary: of tokenizers, SentencePiece, BPE, WordPiece or tiktoken.
_VOCABULARIES = (
    TOKENIZER_JSON, "*.model", "*.spm", "vocab.json", "vocab.txt", "tekken.json", "*.tiktoken"
)
# All that a tokenizer may be read from but config.json, which is the model's.
_PATTERNS = (
    *_VOCABULARIES, "merges.txt", TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS, TEMPLATE,
    f"{TEMPLATES}/*.jinja", GENERATION_CONFIG,
)


def has_tokenizer(directory: Path) -> bool:
    """Returns True if a directory has the vocabulary of a tokenizer."""
    return any(path.is_file() for name in _VOCABULARIES for path in directory.glob(name))


def names_of_tokenizer(directory: Path) -> tuple[str, ...]:
    """Returns the paths within a directory of the files that its tokenizer is read from."""
    paths = {path for pattern in _PATTERNS for path in directory.glob(pattern) if path.is_file()}
    return tuple(sorted(str(path.relative_to(directory)) for path in paths))


def read_fields(path: Path) -> dict[str, Any]:
    """Returns the fields of a JSON file, {} if it is absent.

    Raises:
      ConfigError: it cannot be read, or is not an object of JSON.
    """
    if not path.exists():
        return {}
    try:
        fields = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The tokenizer's file {path} cannot be read: {shown(str(error), 200)}. Copy it again."
        ) from None
    if not isinstance(fields, dict):
        raise ConfigError(f"The tokenizer's file {path} is not an object of JSON. Copy it again.")
    return fields


def chat_templates(directory: Path) -> dict[str, str]:
    """Returns the chat templates of a directory by name, such as "default" and "tool_use".

    Files chat_template.jinja and additional_chat_templates/*.jinja take precedence over the field
    of tokenizer_config.json, as in transformers.

    Raises:
      ConfigError: the field has another form.
    """
    paths = {path.stem: path for path in sorted((directory / TEMPLATES).glob("*.jinja"))}
    if (directory / TEMPLATE).is_file():
        paths["default"] = directory / TEMPLATE
    if paths:
        return {name: path.read_text("utf-8") for name, path in paths.items()}
    source = read_fields(directory / TOKENIZER_CONFIG).get("chat_template") or {}
    if isinstance(source, str):
        return {"default": source}
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}
    if not isinstance(source, dict):
        raise ConfigError(
            f"{directory / TOKENIZER_CONFIG}: chat_template is {shown(repr(source))}; expected a "
            'text, or a list of {"name": ..., "template": ...}.'
        )
    return source


def special_tokens(directory: Path) -> dict[str, str]:
    """Returns the special tokens that tokenizer_config.json names, by role, such as "eos_token"."""
    fields = read_fields(directory / TOKENIZER_CONFIG)
    tokens = {
        role: value.get("content") if isinstance(value, dict) else value
        for role, value in fields.items() if role.endswith("_token")
    }
    return {role: text for role, text in tokens.items() if isinstance(text, str)}


def model_eos_ids(directory: Path) -> tuple[int, ...]:
    """Returns the ends of an answer that generation_config.json, else config.json, names."""
    for name in (GENERATION_CONFIG, CONFIG):
        fields = read_fields(directory / name)
        ends = fields.get("eos_token_id", (fields.get("text_config") or {}).get("eos_token_id"))
        if ends is not None:
            return tuple(dict.fromkeys(ends if isinstance(ends, list) else [ends]))
    return ()
