"""The files of a tokenizer's directory, read without trust, and their digest."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError, few, format_bytes, shown

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
TEMPLATE, GENERATION_CONFIG, CONFIG = (
    "chat_template.jinja", "generation_config.json", "config.json"
)
# SentencePiece's, by the names under which models are published.
MODEL_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
# All that a tokenizer may be read from but config.json, which is the model's.
TOKENIZER_FILES = (
    TOKENIZER_JSON, TOKENIZER_CONFIG, *MODEL_FILES, SPECIAL_TOKENS, ADDED_TOKENS, "vocab.json",
    "merges.txt", TEMPLATE, GENERATION_CONFIG,
)
# Of transformers: further templates by name, such as tool_use.jinja.
TEMPLATES = "additional_chat_templates"
# The largest published, of vocabularies of 260,000 tokens, have 35 MB.
MAX_BYTES = 100 * 2**20


class TokenizerFiles:
    """The files of a directory, each read once, when it is first asked for.

    Args:
      directory: of the tokenizer.
      own: the name of the file that says how text is cut.
    """

    def __init__(self, directory: Path, own: str):
        self.directory, self.own = directory, own
        self._read: dict[str, dict[str, Any]] = {}

    def json(self, name: str) -> dict[str, Any]:
        """Returns the fields of a JSON file, {} if it is absent.

        Raises:
          ConfigError: it is damaged, or something else than an object of JSON.
        """
        if name not in self._read:
            path = self.directory / name
            content = read_file(path) if os.path.lexists(path) else b"{}"
            self._read[name] = json_object(content, path)
        return self._read[name]

    @property
    def former_fields(self) -> dict[str, Any]:
        """The texts of special tokens by role, in the order in which former versions read them."""
        fields = self.json(SPECIAL_TOKENS) | self.json(TOKENIZER_CONFIG)
        return {
            name: value.get("content") if isinstance(value, dict) else value
            for name, value in fields.items()
        }

    @property
    def chat_templates(self) -> dict[str, str]:
        """The chat templates by name, such as "default" and "tool_use", as in transformers.

        Files chat_template.jinja and additional_chat_templates/*.jinja come before the field of
        tokenizer_config.json.

        Raises:
          ConfigError: one is no text in UTF-8, or the field has another form.
        """
        folder = self.directory / TEMPLATES
        paths = {path.stem: path for path in sorted(folder.glob("*.jinja"))}
        if os.path.lexists(self.directory / TEMPLATE):
            paths["default"] = self.directory / TEMPLATE
        if paths:
            return {name: _template(path) for name, path in paths.items()}
        source = self.json(TOKENIZER_CONFIG).get("chat_template")
        if isinstance(source, list):  # Several, by name.
            entries = [entry for entry in source if isinstance(entry, dict)]
            source = {str(entry.get("name")): entry.get("template") for entry in entries}
        if source is None or isinstance(source, str):
            source = {} if source is None else {"default": source}
        if not isinstance(source, dict) or not all(isinstance(x, str) for x in source.values()):
            raise wrong_field(
                self.directory / TOKENIZER_CONFIG, "chat_template", source,
                'a text, a list of {"name": ..., "template": ...}, or an object of texts by name',
            )
        return source

    def sha256(self, decided_besides: str = "") -> str:
        """Returns a hash of what decides the ids of a text.

        Args:
          decided_besides: further facts, of files that former versions did not read; "" where
            they change nothing, so that the hash stays what it was.
        """
        digest = hashlib.sha256()
        for name in (self.own, TOKENIZER_CONFIG, SPECIAL_TOKENS, TEMPLATE, GENERATION_CONFIG):
            path = self.directory / name
            if path.is_file():
                content = read_file(path)
                digest.update(f"{name} {len(content)} ".encode() + content)
        digest.update(decided_besides.encode())
        return digest.hexdigest()


def _template(path: Path) -> str:
    try:
        return read_file(path).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"The chat template {path} is not UTF-8: {error}.") from None


def read_file(path: Path) -> bytes:
    """Returns the content of a regular file of a sound size.

    Raises:
      ConfigError: it cannot be read, is a pipe or a folder, or far larger than any tokenizer's.
    """
    try:
        if not path.is_file():
            raise ConfigError(f"The tokenizer's file {path} is no regular file. Remove it.")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ConfigError(
                f"The tokenizer's file {path} has {format_bytes(size)}, more than any tokenizer "
                f"needs; wanted are at most {format_bytes(MAX_BYTES)}."
            )
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"The tokenizer's file {path} cannot be read: {error.strerror}."
        ) from error


def json_object(content: bytes, path: Path) -> dict[str, Any]:
    """Returns the fields of an object of JSON.

    Raises:
      ConfigError: it is none, or is nested too deep to be read; names the path.
    """
    try:
        fields = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"The tokenizer's file {path} cannot be read: {shown(str(error), 200)}."
        ) from None
    if not isinstance(fields, dict):
        raise ConfigError(f"The tokenizer's file {path} holds no object of JSON.")
    return fields


def wrong_field(
    path: Path, field: str, value: object, wanted: str, change: str = ""
) -> ConfigError:
    """Returns the error for a field of a tokenizer's files."""
    message = f"{path}: {field} is {shown(repr(value))}; wanted is {wanted}."
    return ConfigError(f"{message} {change}".rstrip())


def has_tokenizer(directory: Path) -> bool:
    """Returns True if a directory has a tokenizer that `load_tokenizer` reads."""
    return any(os.path.isfile(directory / name) for name in (TOKENIZER_JSON, *MODEL_FILES))


def names_of_tokenizer(directory: Path) -> tuple[str, ...]:
    """Returns the paths within a directory of all files that a tokenizer may be read from."""
    templates = sorted((directory / TEMPLATES).glob("*.jinja"))
    return (*TOKENIZER_FILES, *(f"{TEMPLATES}/{path.name}" for path in templates))


def names_in(directory: Path) -> str:
    """Returns the first few names of a directory's files, for a message."""
    try:
        return few(sorted(os.listdir(directory)))
    except OSError as error:
        return f"unknown ({error.strerror})"
