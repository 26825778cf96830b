"""The tokens that the files beside a vocabulary name, in the order in which the files count.

The order is that of `PreTrainedTokenizerBase._from_pretrained` of transformers 5:
tokenizer_config.json; where that has no added_tokens_decoder, as before 2023,
special_tokens_map.json counts over it, and added_tokens.json is read.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.inputs.tokenizers.files import (
    ADDED_TOKENS,
    CONFIG,
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    TokenizerFiles,
    wrong_field,
)
from praxis_lite.inputs.tokenizers.special.tokenizer_classes import (
    ROLES,
    class_of,
    default_tokens,
)

# No vocabulary has as many.
MAX_ID = 2**24 - 1
_NOTHING = None, Path()
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


@dataclasses.dataclass(frozen=True)
class Token:
    """A token that a file names.

    Attributes:
      text: as it stands in a text.
      said_by: the file and its field.
      id: that the file gives it, or None.
      is_special: True: decoding may leave it out.
      flags: how it is looked for in a text, those of FLAGS that the file says.
    """

    text: str
    said_by: str
    id: int | None = None
    is_special: bool = True
    flags: Mapping[str, bool] = dataclasses.field(default_factory=dict)


class NamedTokens:
    """The tokens that the files of a directory name.

    Attributes:
      class_name: of the tokenizer in transformers, as "Llama"; "" if no file says it.
      added: those that have ids, by rising id.
      roles: by role, "eos_token" and others; an empty text is left out, and stands in `empty`.
      extra: further special ones.
      empty: the files that give a role the empty text, by role.
      null: the roles of which a file says that there is no token.
      defaults: the special tokens of the class, by roles of which no file says anything.

    Raises:
      ConfigError: a field has another type; names the file and the field.
    """

    def __init__(self, files: TokenizerFiles):
        directory = files.directory
        fields = {
            name: (value, directory / TOKENIZER_CONFIG)
            for name, value in files.json(TOKENIZER_CONFIG).items()
        }
        self.class_name = class_of(files.json(TOKENIZER_CONFIG), files.json(CONFIG))
        is_named_anew = fields.get("extra_special_tokens", _NOTHING)[0]
        if "additional_special_tokens" in fields and not is_named_anew:
            fields["extra_special_tokens"] = fields.pop("additional_special_tokens")
        # The roles of a model's own that this file names by texts count over the other's.
        by_role = {role: entry for role, entry in _own_roles(fields) if isinstance(entry[0], str)}
        fields = {name: entry for name, entry in fields.items() if name not in by_role}
        by_role |= _by_role(fields)
        is_former = "added_tokens_decoder" not in fields
        if is_former:
            _overlay(fields, files)
            by_role |= _by_role(fields)
        else:
            self.added = _added(*fields["added_tokens_decoder"])
        self.roles, self.empty = _roles(fields, by_role)
        former = fields.get("additional_special_tokens", _NOTHING)
        self.extra = _list(*fields.get("extra_special_tokens", former))
        self.null = {role for role in ROLES if role in fields and fields[role][0] is None}
        self.defaults = {
            role: Token(text, f"the class {self.class_name}Tokenizer")
            for role, text in default_tokens(self.class_name).items()
            if role not in self.roles and role not in self.null
        }
        if is_former:
            special = {token.text for token in (*self.roles.values(), *self.extra)}
            self.added = _former_added(files.json(ADDED_TOKENS), directory / ADDED_TOKENS, special)


def checked_number(value: Any, path: Path, field: str, most: int = MAX_ID) -> int:
    """Returns an id, or a number of ids, that a file gives.

    Raises:
      ConfigError: it is no whole number from 0 to `most`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise wrong_field(path, field, value, f"a whole number from 0 to {most}")
    return value


def checked_switch(
    entry: Mapping[str, Any], name: str, path: Path, field: str = ""
) -> bool | None:
    """Returns a switch of an object of JSON, None if it is absent or null.

    Raises:
      ConfigError: it is neither true nor false.
    """
    value = entry.get(name)
    if value is not None and not isinstance(value, bool):
        raise wrong_field(path, f"{field}: {name}".removeprefix(": "), value, "true or false")
    return value


def _overlay(fields: dict[str, tuple[Any, Path]], files: TokenizerFiles) -> None:
    path = files.directory / SPECIAL_TOKENS
    for name, value in files.json(SPECIAL_TOKENS).items():
        given = fields.get(name, (None,))[0]
        if name == "extra_special_tokens" and isinstance(value, list) and isinstance(given, list):
            value = [*given, *(entry for entry in value if entry not in given)]
        fields[name] = value, path


def _roles(
    fields: Mapping[str, tuple[Any, Path]], by_role: Mapping[str, tuple[Any, Path]]
) -> tuple[dict[str, Token], dict[str, str]]:
    given = {name: fields[name] for name in ROLES if name in fields}
    given |= dict(_own_roles(fields)) | dict(by_role)
    roles, empty = {}, {}
    for role, (value, path) in given.items():
        if value is None:
            continue
        token = _token(value, path, role)
        if token.text:
            roles[role] = token
        else:
            empty[role] = token.said_by
    return roles, empty


def _own_roles(fields: Mapping[str, tuple[Any, Path]]) -> Iterator[tuple[str, tuple[Any, Path]]]:
    """The roles that a model has besides ROLES, such as "image_token"."""
    for name, entry in fields.items():
        # Other fields that end so are switches: add_bos_token.
        if name.endswith("_token") and name not in ROLES and isinstance(entry[0], str | Mapping):
            yield name, entry


def _by_role(fields: dict[str, tuple[Any, Path]]) -> dict[str, tuple[Any, Path]]:
    """Takes tokens by roles of the model's own out of the fields, and returns them."""
    tokens, path = fields.get("extra_special_tokens", _NOTHING)
    if not isinstance(tokens, Mapping):
        return {}
    del fields["extra_special_tokens"]
    return {role: (value, path) for role, value in tokens.items()}


def _added(entries: Any, path: Path) -> list[Token]:
    """The tokens of added_tokens_decoder."""
    field = "added_tokens_decoder"
    if not isinstance(entries, Mapping):
        raise wrong_field(path, field, entries, "an object of tokens by id")
    tokens = []
    for key, entry in entries.items():
        where = f"{field}[{key!r}]"
        if not (key.isascii() and key.isdigit()) or len(key) > 12:
            raise wrong_field(path, f"a key of {field}", key, f"an id from 0 to {MAX_ID}")
        number = checked_number(int(key), path, f"a key of {field}")
        if not isinstance(entry, Mapping):
            raise wrong_field(path, where, entry, 'an object with a "content"')
        is_special = checked_switch(entry, "special", path, where) or False
        token = _token(entry, path, where)
        tokens.append(dataclasses.replace(token, id=number, is_special=is_special))
    return sorted(_not_empty(tokens), key=lambda token: token.id)


def _former_added(entries: Mapping[str, Any], path: Path, special: set[str]) -> list[Token]:
    """The tokens of added_tokens.json, ids by text."""
    tokens = [
        Token(
            _checked_text(text, path, "a key"), f"{path}: {shown(repr(text))}",
            checked_number(number, path, shown(repr(text))), text in special,
        )
        for text, number in entries.items()
    ]
    return sorted(_not_empty(tokens), key=lambda token: token.id)


def _list(value: Any, path: Path) -> list[Token]:
    field = "extra_special_tokens or additional_special_tokens"
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong_field(path, field, value, "a list of tokens")
    return _not_empty([_token(entry, path, f"{field}[{i}]") for i, entry in enumerate(value)])


def _not_empty(tokens: list[Token]) -> list[Token]:
    for token in tokens:
        if not token.text:
            raise ConfigError(f"{token.said_by} is an empty text, which is no token. Remove it.")
    return tokens


def _token(value: Any, path: Path, field: str) -> Token:
    """A special token, given its text, or an object with that as its content."""
    flags = {}
    if isinstance(value, Mapping):
        flags = {flag: checked_switch(value, flag, path, field) for flag in FLAGS}
        flags = {flag: is_set for flag, is_set in flags.items() if is_set is not None}
        text = value.get("content")
    else:
        text = value
    if not isinstance(text, str):
        raise wrong_field(path, field, value, 'a text, or an object with a "content"')
    return Token(_checked_text(text, path, field), f"{path}: {field}", flags=flags)


def _checked_text(text: str, path: Path, field: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise wrong_field(path, field, text, "a text", "It has half of a character.") from None
    return text
