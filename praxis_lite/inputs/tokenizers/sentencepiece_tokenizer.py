"""A SentencePiece model, as Llama 2, Mistral, Gemma and T5 were published with."""

import functools
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from praxis_lite.errors import ConfigError
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.chat_template import ChatTemplate
from praxis_lite.inputs.tokenizers.files import TokenizerFiles

MODEL_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")


class SentencePieceTokenizer(Tokenizer):
    """The tokenizer of a directory with a tokenizer.model (or spiece.model), or of such a file.

    A text begins with the model's beginning of a text, if it has one, and has no end; add_bos_token
    and add_eos_token of tokenizer_config.json say otherwise. Special tokens that stand in a text
    become their ids; what follows one has no blank of the model put before it.

    Args:
      path: the directory, or the model's file.

    Raises:
      ConfigError: a file is absent or damaged, when it is first needed.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path).expanduser()

    def encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        ids, _ = self.encode_with_places(text)
        around = (self.begin_ids, self.end_ids) if add_special_tokens else ((), ())
        return np.array([*around[0], *ids, *around[1]], np.int32)

    def encode_with_places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        start = 0
        for number, part in enumerate(self._special.split(text) if self._by_text else [text]):
            if number % 2:
                ids.append(self._by_text[part])
                places.append((start, start + len(part)))
            elif part:
                # Behind something the blank that the model puts before a text stands before that.
                mark = self._MARK if ids else ""
                pieces = self._model.encode(mark + part, return_type="proto").pieces
                # The model counts bytes.
                character = np.repeat(np.arange(len(part)), [len(x.encode()) for x in part])
                for piece in pieces[len(self._mark_ids) if mark else 0 :]:
                    ids.append(piece.id)
                    # Bytes of a character are pieces of no width, but for its last.
                    ends = (piece.begin, max(piece.begin, piece.end - 1))
                    first, last = np.clip(np.subtract(ends, len(mark)), 0, len(character) - 1)
                    places.append((start + int(character[first]), start + int(character[last]) + 1))
            start += len(part)
        return np.array(ids, np.int32), np.array(places, int).reshape(-1, 2)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        parts: list[str] = []
        run: list[int] = []
        for one in map(int, ids):
            if one in self._by_id:
                text = "" if skip_special_tokens else self._by_id[one]
                parts += [self._decoded(run, not parts), text]
                run = []
            else:
                run.append(one)
        return "".join([*parts, self._decoded(run, not parts)])

    def fingerprint(self) -> dict[str, Any]:
        return {"tokenizer": "SentencePieceTokenizer", "sha256": self._sha256}

    @functools.cached_property
    def vocab_size(self) -> int:
        return 1 + max([self._model.get_piece_size() - 1, *self._by_id])

    @property
    def eos_id(self) -> int | None:
        return self._of_model("eos")

    @property
    def model_eos_ids(self) -> tuple[int, ...]:
        return self._files.model_eos_ids

    @property
    def bos_id(self) -> int | None:
        return self._of_model("bos")

    @property
    def pad_id(self) -> int | None:
        return self._of_model("pad")

    @property
    def begin_ids(self) -> tuple[int, ...]:
        is_wanted = self._files.config.get("add_bos_token", True)
        return (self.bos_id,) if is_wanted and self.bos_id is not None else ()

    @property
    def end_ids(self) -> tuple[int, ...]:
        is_wanted = self._files.config.get("add_eos_token", False)
        return (self.eos_id,) if is_wanted and self.eos_id is not None else ()

    @functools.cached_property
    def run_ids(self) -> frozenset[int]:
        model = self._model
        return frozenset(i for i in range(model.get_piece_size()) if model.is_byte(i))

    @functools.cached_property
    def chat(self) -> ChatTemplate | None:
        return self._files.chat

    @functools.cached_property
    def _by_id(self) -> dict[int, str]:
        """The texts of special tokens: those of the model, and those that its files add."""
        model = self._model
        found = {
            i: model.id_to_piece(i) for i in range(model.get_piece_size()) if model.is_control(i)
        }
        return found | {i: entry["content"] for i, entry in self._files.added_tokens.items()}

    @functools.cached_property
    def _by_text(self) -> dict[str, int]:
        return {text: number for number, text in self._by_id.items()}

    @functools.cached_property
    def _special(self) -> re.Pattern[str]:
        longest_first = sorted(self._by_text, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def _decoded(self, ids: list[int], is_first: bool) -> str:
        if is_first or not ids:
            return self._model.decode(ids)
        return self._model.decode([*self._mark_ids, *ids])[len(self._MARK) :]

    # No piece of a model begins before a line's end and goes on behind it.
    _MARK = "\n"

    @functools.cached_property
    def _mark_ids(self) -> list[int]:
        return self._model.encode(self._MARK)

    def _of_model(self, name: str) -> int | None:
        text = self._files.special_tokens.get(f"{name}_token")
        number = getattr(self._model, f"{name}_id")() if text is None else self._by_text.get(text)
        return None if number is None or number < 0 else number

    @functools.cached_property
    def _file(self) -> Path:
        if self.path.is_file():
            return self.path
        found = [self.path / name for name in MODEL_FILES if (self.path / name).is_file()]
        if not found:
            wanted = ", ".join(MODEL_FILES)
            raise ConfigError(f"There is no SentencePiece model ({wanted}) in {self.path}.")
        return found[0]

    @functools.cached_property
    def _files(self) -> TokenizerFiles:
        return TokenizerFiles(self._file.parent, self._file.name)

    @functools.cached_property
    def _sha256(self) -> str:
        _ = self._model  # Its errors first.
        return self._files.sha256()

    @functools.cached_property
    def _model(self) -> Any:
        # sentencepiece: the library that made these models; nothing else gives the same pieces.
        from sentencepiece import SentencePieceProcessor

        try:
            return SentencePieceProcessor(model_file=str(self._file))
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"The SentencePiece model {self._file} cannot be read: {error}."
            ) from error
