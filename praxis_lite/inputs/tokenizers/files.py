"""The files beside a tokenizer's own: special tokens, chat template, what ends a model's answer."""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from praxis_lite.errors import ConfigError
from praxis_lite.inputs.tokenizers.chat_template import ChatTemplate

TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE, GENERATION_CONFIG = "chat_template.jinja", "generation_config.json"
_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class TokenizerFiles:
    """What the files of a directory say besides how text is cut.

    Args:
      directory: of the tokenizer.
      own: the name of the file that says how text is cut.

    Raises:
      ConfigError: from the attributes, when a file is damaged.
    """

    def __init__(self, directory: Path, own: str):
        self.directory, self.own = directory, own

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """tokenizer_config.json, with what only special_tokens_map.json says."""
        return {**self._json(SPECIAL_TOKENS), **self._json(TOKENIZER_CONFIG)}

    @property
    def special_tokens(self) -> dict[str, str]:
        """The texts of the special tokens that have a name, such as "bos_token"."""
        found = {name: _text(self.config.get(name)) for name in _NAMES}
        return {name: text for name, text in found.items() if text is not None}

    @property
    def added_tokens(self) -> dict[int, dict[str, Any]]:
        """The tokens that tokenizer_config.json adds, by id."""
        added = self.config.get("added_tokens_decoder") or {}
        return {int(number): entry for number, entry in sorted(added.items(), key=_number)}

    @property
    def model_eos_ids(self) -> tuple[int, ...]:
        """What ends a model's answer, of generation_config.json."""
        found = self._json(GENERATION_CONFIG).get("eos_token_id")
        if found is None:
            return ()
        return tuple(found) if isinstance(found, list) else (found,)

    @property
    def chat(self) -> ChatTemplate | None:
        """The template in chat_template.jinja, or that of tokenizer_config.json, or None."""
        path = self.directory / TEMPLATE
        source = path.read_text("utf-8") if path.is_file() else self.config.get("chat_template")
        if isinstance(source, list):  # Several, by name.
            by_name = {one["name"]: one["template"] for one in source}
            source = by_name.get("default")
        return None if source is None else ChatTemplate(source, self.special_tokens)

    def sha256(self) -> str:
        """Returns a hash of what decides the ids of a text."""
        digest = hashlib.sha256()
        for name in (self.own, TOKENIZER_CONFIG, SPECIAL_TOKENS, TEMPLATE, GENERATION_CONFIG):
            path = self.directory / name
            if path.is_file():
                content = path.read_bytes()
                digest.update(f"{name} {len(content)} ".encode() + content)
        return digest.hexdigest()

    def _json(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        if not path.is_file():
            return {}
        try:
            found = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"The tokenizer's file {path} cannot be read: {error}.") from error
        if not isinstance(found, dict):
            raise ConfigError(f"The tokenizer's file {path} holds no object of JSON.")
        return found


def _text(entry: Any) -> str | None:
    return entry.get("content") if isinstance(entry, dict) else entry


def _number(item: tuple[str, Any]) -> int:
    return int(item[0])
