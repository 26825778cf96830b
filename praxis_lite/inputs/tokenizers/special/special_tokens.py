"""Special tokens and ends of a text: a single answer from all files that may say it."""

import dataclasses
from collections.abc import Callable, Mapping

from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.inputs.tokenizers.files import CONFIG, GENERATION_CONFIG, TokenizerFiles
from praxis_lite.inputs.tokenizers.special.named_tokens import (
    MAX_ID,
    NamedTokens,
    Token,
    checked_number,
)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Vocabulary of the file that cuts text, before the others beside it are read.

    Attributes:
      id_of: returns the id of a token's text, or None.
      size: ids of new tokens begin there.
      tokens: its added and special tokens, by id.
      roles: the ids and texts that it names itself, by role.
      can_rename: True: a file may give a token the id of another text.
    """

    id_of: Callable[[str], int | None]
    size: int
    tokens: Mapping[int, Token]
    roles: Mapping[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    can_rename: bool = False


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """The tokens of a directory that are no pieces of text, and what some of them are for.

    Attributes:
      tokens: by id: special tokens, and those that are added to the vocabulary.
      roles: ids by role, such as "eos_token".
      texts: texts by role, as chat templates know them.
      model_eos_ids: what ends a model's answer, of generation_config.json, or else config.json.
      vocab_size: ids are below it.
      said_by: by role, the file and the field.
      model_eos_said_by: the file and the field of `model_eos_ids`; "" if there are none.
    """

    tokens: Mapping[int, Token]
    roles: Mapping[str, int]
    texts: Mapping[str, str]
    model_eos_ids: tuple[int, ...]
    vocab_size: int
    said_by: Mapping[str, str]
    model_eos_said_by: str

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(number for number, token in self.tokens.items() if token.is_special)


def resolved(files: TokenizerFiles, vocabulary: Vocabulary) -> SpecialTokens:
    """Returns the special tokens of a directory.

    Raises:
      ConfigError: a field has another type; the beginning or the end of a text is no token of the
        vocabulary; an id is none; files disagree. Each names the file and the field.
    """
    named = NamedTokens(files)
    # A text ends, whatever the files do not say.
    local = {
        role: (number, text) for role, (number, text) in vocabulary.roles.items()
        if role == "eos_token" or role not in named.null
    }
    numbered = _Numbered(files, vocabulary)
    roles = dict(named.roles)
    for role, token in named.defaults.items():
        number = numbered.id_of(token.text)
        if number is not None and local.get(role, (number,))[0] == number:
            roles[role] = token
    ends = [named.roles[role] for role in ("eos_token", "bos_token") if role in named.roles]
    for token in (*named.added, *roles.values(), *named.extra):
        numbered.add(token, must_be_there=token in ends)
    ids = {role: number for role, (number, _) in local.items()}
    ids |= {role: numbered.by_text[token.text] for role, token in roles.items()}
    said_by = dict.fromkeys(local, str(files.directory / files.own))
    said_by |= {role: token.said_by for role, token in roles.items()}
    model_ends, path = _model_ends(files, numbered.next_id)
    if "eos_token" not in ids:
        if model_ends:
            ids["eos_token"], said_by["eos_token"] = model_ends[0], path
        elif "eos_token" in named.empty:
            raise ConfigError(
                f"{named.empty['eos_token']} is an empty text, and nothing else says what ends a "
                "text. Name a token of the vocabulary there, or an eos_token_id in "
                f"{GENERATION_CONFIG}."
            )
    tokens = numbered.tokens
    texts = {role: text for role, (_, text) in local.items()}
    texts |= {role: tokens[number].text for role, number in ids.items() if number in tokens}
    return SpecialTokens(tokens, ids, texts, model_ends, numbered.next_id, said_by, path)


class _Numbered:
    """The tokens of a vocabulary, and those that files add to it, by their ids.

    Attributes:
      tokens: by id.
      by_text: their ids.
      next_id: of the next token that has none.
    """

    def __init__(self, files: TokenizerFiles, vocabulary: Vocabulary):
        self._files, self._vocabulary = files, vocabulary
        self.tokens = dict(vocabulary.tokens)
        self.by_text = {token.text: number for number, token in self.tokens.items()}
        self.next_id = max([vocabulary.size, *(number + 1 for number in self.tokens)])
        self._fixed, self._seen = set(self.tokens), set()

    def id_of(self, text: str) -> int | None:
        """Returns the id of a token's text; None if there is none, or another text has got it."""
        known = self.by_text.get(text, self._vocabulary.id_of(text))
        renamed = known in self.tokens and self.tokens[known].text != text
        return None if renamed else known

    def add(self, token: Token, must_be_there: bool) -> None:
        """Adds a token that a file names, or changes how a known token is looked for.

        Raises:
          ConfigError: it has another id already, or another token has its id; it must be there,
            and is not.
        """
        number = self.id_of(token.text)
        if number is None:
            if must_be_there:
                raise ConfigError(
                    f"{token.said_by} is {shown(repr(token.text))}, which the vocabulary of "
                    f"{self._files.directory / self._files.own} does not have. Name a token there "
                    "that it has, or null."
                )
            number = self.next_id if token.id is None else token.id
            if number != self.next_id and not self._vocabulary.can_rename:
                raise self._disagree(token, self.next_id)
        elif token.id not in (None, number):
            raise self._disagree(token, number)
        before = self.tokens.get(number)
        if before is not None and before.text == token.text:
            token = self._merged(before, token, number)
        elif before is not None and before.id is not None:
            raise ConfigError(
                f"The tokenizer's files disagree: the id {number} is {shown(repr(before.text))} by "
                f"{before.said_by}, and {shown(repr(token.text))} by {token.said_by}. Correct one."
            )
        self.tokens[number], self.by_text[token.text] = token, number
        self._seen.add(_in_text(token))
        self._fixed |= {number} if token.id is not None else set()
        self.next_id = max(self.next_id, number + 1)

    def _merged(self, before: Token, token: Token, number: int) -> Token:
        """Returns a token as two fields name it."""
        # How it is looked for: as the file says that gives it an id, or else the last field.
        is_known = number in self._fixed or _in_text(token) in self._seen
        text = before if token.id is None and is_known else token
        is_special = before.is_special or token.is_special
        return text if text.is_special else dataclasses.replace(text, is_special=is_special)

    def _disagree(self, token: Token, number: int) -> ConfigError:
        return ConfigError(
            f"The tokenizer's files disagree: {shown(repr(token.text))} is {token.id} in "
            f"{token.said_by}, and {number} by {self._files.directory / self._files.own}. Correct "
            "the former."
        )


def _in_text(token: Token) -> tuple[object, ...]:
    return token.text, *sorted(token.flags.items())


def _model_ends(files: TokenizerFiles, size: int) -> tuple[tuple[int, ...], str]:
    """Returns the ends of an answer, and the field of generation_config.json or config.json."""
    field = "eos_token_id"
    config = files.json(CONFIG)
    for name in (GENERATION_CONFIG, CONFIG):
        fields = files.json(name)
        value = fields.get(field)
        if value is None and isinstance(fields.get("text_config"), dict):
            value = fields["text_config"].get(field)
        if value is not None:
            # A model may have rows for more ids than its tokenizer has tokens.
            parts = [item for item in (config, config.get("text_config")) if isinstance(item, dict)]
            rows = [part.get("vocab_size") for part in parts]
            most = max([size, *(n for n in rows if isinstance(n, int) and n <= MAX_ID)]) - 1
            values = value if isinstance(value, list) else [value]
            path = files.directory / name
            ids = [checked_number(number, path, field, most) for number in values]
            return tuple(dict.fromkeys(ids)), f"{path}: {field}"
    return (), ""
