"""Which tokens are special and which end a text: one answer from all files that may say it."""

import dataclasses
from collections.abc import Callable, Mapping

from praxis_lite.errors import ConfigError, shown
from praxis_lite.inputs.tokenizers.files import CONFIG, GENERATION_CONFIG, TokenizerFiles
from praxis_lite.inputs.tokenizers.named_tokens import MAX_ID, NamedTokens, Token, checked_number


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What the file that cuts text says, before the others beside it are read.

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
    tokens = dict(vocabulary.tokens)
    by_text = {token.text: number for number, token in tokens.items()}

    def id_of(text: str) -> int | None:
        known = by_text.get(text, vocabulary.id_of(text))
        # Another text may have been given the id.
        return None if known in tokens and tokens[known].text != text else known

    # A text ends, whatever the files do not say.
    absent = named.null - {"eos_token"}
    own = {role: i for role, (i, _) in vocabulary.roles.items() if role not in absent}
    defaults = {
        role: token for role, token in named.defaults.items()
        if id_of(token.text) is not None and own.get(role, id_of(token.text)) == id_of(token.text)
    }
    roles = defaults | named.roles
    next_id = max([vocabulary.size, *(number + 1 for number in tokens)])
    fixed, seen = set(tokens), set()
    for token in (*named.added, *roles.values(), *named.extra):
        number = id_of(token.text)
        if number is None:
            if token in (named.roles.get("eos_token"), named.roles.get("bos_token")):
                raise _not_there(token, files)
            number = next_id if token.id is None else token.id
            if number != next_id and not vocabulary.can_rename:
                raise _disagree(files, token, next_id)
        elif token.id not in (None, number):
            raise _disagree(files, token, number)
        before = tokens.get(number)
        if before is not None and before.text != token.text and before.id is not None:
            raise ConfigError(
                f"The tokenizer's files disagree: the id {number} is {shown(repr(before.text))} by "
                f"{before.said_by}, and {shown(repr(token.text))} by {token.said_by}. Correct one."
            )
        if before is not None and before.text == token.text:
            # How it is looked for: as the file says that gives it an id, or else the last field.
            is_known = number in fixed or (token.text, *sorted(token.flags.items())) in seen
            said = before if token.id is None and is_known else token
            is_special = before.is_special or token.is_special
            token = said if said.is_special else dataclasses.replace(said, is_special=is_special)
        tokens[number], by_text[token.text] = token, number
        seen.add((token.text, *sorted(token.flags.items())))
        fixed |= {number} if token.id is not None else set()
        next_id = max(next_id, number + 1)
    ids = own | {role: by_text[token.text] for role, token in roles.items()}
    said_by = dict.fromkeys(own, str(files.directory / files.own))
    said_by |= {role: token.said_by for role, token in roles.items()}
    ends, path = _model_ends(files, next_id)
    if "eos_token" not in ids:
        if ends:
            ids["eos_token"], said_by["eos_token"] = ends[0], path
        elif "eos_token" in named.empty:
            raise ConfigError(
                f"{named.empty['eos_token']} is an empty text, and nothing else says what ends a "
                "text. Name a token of the vocabulary there, or an eos_token_id in "
                f"{GENERATION_CONFIG}."
            )
    texts = {role: text for role, (_, text) in vocabulary.roles.items() if role in own}
    texts |= {role: tokens[number].text for role, number in ids.items() if number in tokens}
    return SpecialTokens(tokens, ids, texts, ends, next_id, said_by, path)


def _model_ends(files: TokenizerFiles, size: int) -> tuple[tuple[int, ...], str]:
    """What ends an answer by generation_config.json, or else by config.json, which is returned."""
    field = "eos_token_id"
    config = files.json(CONFIG)
    for name in (GENERATION_CONFIG, CONFIG):
        fields = files.json(name)
        value = fields.get(field)
        if value is None and isinstance(fields.get("text_config"), dict):
            value = fields["text_config"].get(field)
        if value is not None:
            # A model may have rows for more ids than its tokenizer has tokens.
            parts = [one for one in (config, config.get("text_config")) if isinstance(one, dict)]
            rows = [one.get("vocab_size") for one in parts]
            most = max([size, *(n for n in rows if isinstance(n, int) and n <= MAX_ID)]) - 1
            values = value if isinstance(value, list) else [value]
            path = files.directory / name
            ids = [checked_number(number, path, field, most) for number in values]
            return tuple(dict.fromkeys(ids)), f"{path}: {field}"
    return (), ""


def _not_there(token: Token, files: TokenizerFiles) -> ConfigError:
    return ConfigError(
        f"{token.said_by} is {shown(repr(token.text))}, which the vocabulary of "
        f"{files.directory / files.own} does not have. Name a token there that it has, or null."
    )


def _disagree(files: TokenizerFiles, token: Token, number: int) -> ConfigError:
    return ConfigError(
        f"The tokenizer's files disagree: {shown(repr(token.text))} is {token.id} in "
        f"{token.said_by}, and {number} by {files.directory / files.own}. Correct the former."
    )
