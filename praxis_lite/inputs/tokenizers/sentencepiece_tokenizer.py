"""A SentencePiece model, as Llama 2, Mistral, Gemma and T5 were published with."""

import functools
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.inputs.tokenizers.base import checked_text
from praxis_lite.inputs.tokenizers.directory_tokenizer import DirectoryTokenizer
from praxis_lite.inputs.tokenizers.files import (
    CONFIG,
    MODEL_FILES,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    TokenizerFiles,
    read_file,
)
from praxis_lite.inputs.tokenizers.special.named_tokens import (
    Token,
    checked_number,
    checked_switch,
)
from praxis_lite.inputs.tokenizers.special.special_tokens import (
    SpecialTokens,
    Vocabulary,
    resolved,
)
from praxis_lite.inputs.tokenizers.special.tokenizer_classes import (
    ENDED,
    class_of,
    is_renumbered,
)

# Sentinels of T5, of which published models have 100, and models of other kinds up to 1,000.
MAX_EXTRA_IDS = 10_000
# Appended to a model it is merged into it: its normalizer_spec with add_dummy_prefix set or not.
_WITH_PREFIX, _WITHOUT_PREFIX = b"\x1a\x02\x18\x01", b"\x1a\x02\x18\x00"


class SentencePieceTokenizer(DirectoryTokenizer):
    """The tokenizer of a directory with a tokenizer.model (or spiece.model), or of such a file.

    A text begins with the model's beginning of a text, if it has one, and has no end; add_bos_token
    and add_eos_token of tokenizer_config.json say otherwise. Special tokens that stand in a text
    become their ids; what follows one has no blank of the model put before it, unless the model
    leaves out ends of lines, as T5's does.

    Args:
      path: the directory, or the model's file.

    Raises:
      ConfigError: a file is absent or damaged, when it is first needed.
    """

    # The model has its own normalization, which no added token goes through.
    _flags = ("single_word", "lstrip", "rstrip")

    def encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        ids, _ = self.encode_with_places(text)
        around = (self.begin_ids, self.end_ids) if add_special_tokens else ((), ())
        return np.array([*around[0], *ids, *around[1]], np.int32)

    def encode_with_places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        start = 0
        for number, part in enumerate(self._pattern.split(checked_text(text))):
            if number % 2:
                ids.append(self._by_text.get(part, self._by_text.get(part.strip())))
                places.append((start, start + len(part)))
            elif part:
                # Behind a token the blank that the model puts before a text stands before that.
                model = self._behind(part.startswith(" ")) if ids else self._model
                # The model counts bytes.
                character = np.repeat(np.arange(len(part)), [len(x.encode()) for x in part])
                for piece in model.encode(part, return_type="proto").pieces:
                    ids.append(piece.id)
                    # Bytes of a character are pieces of no width, but for its last.
                    ends = piece.begin, max(piece.begin, piece.end - 1)
                    first, last = character[np.minimum(ends, len(character) - 1)].tolist()
                    places.append((start + first, start + last + 1))
            start += len(part)
        return np.array(ids, np.int32), np.array(places, int).reshape(-1, 2)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        given = [i for i in map(int, ids) if self.has_text(i, skip_special_tokens)]
        parts: list[str] = []
        run: list[int] = []
        for number in given:
            if number in self._by_id:
                parts += [self._decoded(run, not parts), self._by_id[number]]
                run = []
            else:
                run.append(number)
        return "".join([*parts, self._decoded(run, not parts)])

    def has_text(self, token: int, skip_special_tokens: bool = False) -> bool:
        # A model may have rows for ids that stand for no piece.
        is_known = 0 <= token < self._num_pieces or token in self._by_id
        return is_known and super().has_text(token, skip_special_tokens)

    @property
    def begin_ids(self) -> tuple[int, ...]:
        is_wanted = self._is_set("add_bos_token", True)
        return (self.bos_id,) if is_wanted and self.bos_id is not None else ()

    @property
    def end_ids(self) -> tuple[int, ...]:
        is_wanted = self._is_set("add_eos_token", self._class in ENDED)
        return (self.eos_id,) if is_wanted and self.eos_id is not None else ()

    @functools.cached_property
    def run_ids(self) -> frozenset[int]:
        return frozenset(i for i in range(self._num_pieces) if self._model.is_byte(i))

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        unknown = self.special.roles.get("unk_token")
        return self.special.special_ids | ({unknown} - {None})

    @functools.cached_property
    def special(self) -> SpecialTokens:
        self._say_what_is_not_followed()
        model, size = self._model, self._num_pieces
        pieces = {self._model.id_to_piece(i): i for i in range(size)}
        said_by = str(self._file)
        tokens = {
            i: Token(model.id_to_piece(i), said_by) for i in range(size) if model.is_control(i)
        }
        if self._class == "T5":
            # They are no pieces, and no file of before 2023 lists them.
            path = self._files.directory / TOKENIZER_CONFIG
            count = self._files.json(TOKENIZER_CONFIG).get("extra_ids", 100)
            count = checked_number(count, path, "extra_ids", MAX_EXTRA_IDS)
            for i in range(count):
                tokens[size + i] = Token(f"<extra_id_{count - 1 - i}>", said_by)
        ids = {name: getattr(model, f"{name}_id")() for name in ("bos", "eos", "unk", "pad")}
        roles = {
            f"{name}_token": (i, model.id_to_piece(i)) for name, i in ids.items() if i >= 0
        }
        vocabulary = Vocabulary(pieces.get, size, tokens, roles, can_rename=True)
        return resolved(self._files, vocabulary)

    @functools.cached_property
    def _by_id(self) -> dict[int, str]:
        """The texts of the tokens that are no pieces."""
        return {number: token.text for number, token in self.special.tokens.items()}

    @functools.cached_property
    def _by_text(self) -> dict[str, int]:
        return {text: number for number, text in self._by_id.items()}

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        tokens = sorted(self.special.tokens.values(), key=lambda token: -len(token.text))
        return re.compile(f"({'|'.join(map(_pattern_of, tokens))})" if tokens else "(?!)()")

    def _decoded(self, ids: list[int], is_first: bool) -> str:
        if is_first or not ids:
            return self._model.decode(ids)
        # The model leaves a blank out before a text's first piece.
        before = self._model.decode(self._inner)
        return self._model.decode([*self._inner, *ids])[len(before) :]

    @functools.cached_property
    def _inner(self) -> list[int]:
        """A piece, if any, that decodes to something else than blanks."""
        model = self._model
        for i in range(self._num_pieces):
            is_piece = not (model.is_control(i) or model.is_unknown(i) or model.is_unused(i))
            if is_piece and not model.is_byte(i) and model.decode([i]).strip():
                return [i]
        return []

    def _is_set(self, name: str, default: bool) -> bool:
        fields, path = self._files.json(TOKENIZER_CONFIG), self._files.directory / TOKENIZER_CONFIG
        value = checked_switch(fields, name, path)
        return default if value is None else value

    def _behind(self, is_blank_first: bool) -> Any:
        """Returns the model for a part of a text behind a token, as if the text had gone on."""
        if not self._model.normalize("\n"):
            return self._model
        strips = self._model.normalize(" a") == self._model.normalize("a")
        # Where the model leaves out the first blanks, the one that it puts stands for them.
        return self._with_prefix if strips and is_blank_first else self._without_prefix

    @functools.cached_property
    def _with_prefix(self) -> Any:
        return self._loaded(_WITH_PREFIX)

    @functools.cached_property
    def _without_prefix(self) -> Any:
        return self._loaded(_WITHOUT_PREFIX)

    @functools.cached_property
    def _class(self) -> str:
        return class_of(self._files.json(TOKENIZER_CONFIG), self._files.json(CONFIG))

    @functools.cached_property
    def _file(self) -> Path:
        if os.path.isfile(self.path):
            return self.path
        paths = [self.path / name for name in MODEL_FILES if (self.path / name).is_file()]
        if not paths:
            expected = ", ".join(MODEL_FILES)
            raise ConfigError(f"There is no SentencePiece model ({expected}) in {self.path}.")
        return paths[0]

    @functools.cached_property
    def _files(self) -> TokenizerFiles:
        return TokenizerFiles(self._file.parent, self._file.name)

    @functools.cached_property
    def _num_pieces(self) -> int:
        return self._model.get_piece_size()

    @functools.cached_property
    def _model(self) -> Any:
        if is_renumbered(self._class):
            raise ConfigError(
                f"{self._file} is of a {self._class}Tokenizer, whose ids are not the model's own. "
                f"Let transformers write a {TOKENIZER_JSON}: AutoTokenizer.from_pretrained(DIR)"
                ".save_pretrained(DIR)."
            )
        model = self._loaded(b"")
        try:
            for number in range(model.get_piece_size()):
                model.id_to_piece(number)
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"The SentencePiece model {self._file} cannot be read: piece {number}: {error}."
            ) from None
        return model

    def _loaded(self, settings: bytes) -> Any:
        # sentencepiece: the library that made these models; nothing else gives the same pieces.
        library = optional_module("sentencepiece", f"The tokenizer {self._file}")
        content = read_file(self._file)
        try:
            if content:  # The library takes nothing for a model that is to come.
                return library.SentencePieceProcessor(model_proto=content + settings)
            error: object = "the file is empty"
        except (OSError, RuntimeError) as caught:
            error = caught
        raise ConfigError(
            f"The SentencePiece model {self._file} cannot be read: {shown(str(error), 200)}."
        )

    def _former_tokens(self) -> dict[int, Token]:
        model, tokens = self._model, self.special.tokens
        control = {i: Token(model.id_to_piece(i), "") for i in tokens
                   if i < self._num_pieces and model.is_control(i)}
        added = self._files.json(TOKENIZER_CONFIG).get("added_tokens_decoder") or {}
        return control | {int(i): Token(tokens[int(i)].text, "") for i in added}

    def _former_role(self, role: str, text: object) -> int | None:
        if text is None:
            number = getattr(self._model, f"{role.removesuffix('_token')}_id")()
            return None if number < 0 else number
        ids = {token.text: i for i, token in self._former_tokens().items()}
        return ids.get(text) if isinstance(text, str) else None


def _pattern_of(token: Token) -> str:
    """The pattern of a special token in a text, with the blanks that it takes away."""
    flags = token.flags
    before = r"\s*" if flags.get("lstrip") else ""
    after = r"\s*" if flags.get("rstrip") else ""
    text = re.escape(token.text)
    if flags.get("single_word"):
        text = rf"(?<!\w){text}(?!\w)"
    return before + text + after
