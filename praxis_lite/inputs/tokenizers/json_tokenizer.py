"""A tokenizer that is loaded from a directory with the `tokenizers` library."""

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from praxis_lite.inputs.tokenizers.base import Tokenizer, checked_text
from praxis_lite.inputs.tokenizers.chat_template import ChatTemplate
from praxis_lite.inputs.tokenizers.files import (
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    chat_templates,
    model_eos_ids,
    read_fields,
    special_tokens,
    tokenizer_folder,
)
from praxis_lite.inputs.tokenizers.normalized import opened

_MAX_ID = 2**32 - 1  # The library's ids are uint32. Decoding ignores ids without a token.


class JsonTokenizer(Tokenizer):
    """A tokenizer with the same ids and chat templates as transformers' AutoTokenizer.

    A tokenizer.json that transformers would load unchanged is read directly. Any other directory is
    first normalized by transformers; see `normalized`. Decoding never adds or removes spaces:
    `clean_up_tokenization_spaces` is ignored, because the cleanup loses text.

    The files are read on first use, which raises ConfigError if a file is damaged, or if
    transformers is needed but not installed.

    Args:
      path: Directory of the tokenizer, or hf://org/name[@revision] on the Hugging Face Hub.
      documents_start_with_eos: Whether training documents and prompts start with EOS if the
        tokenizer does not add a BOS token.
    """

    path: Path

    def __init__(self, path: str | os.PathLike[str], *, documents_start_with_eos: bool = False):
        self.path = tokenizer_folder(path)
        self.documents_start_with_eos = documents_start_with_eos

    def encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        encoding = self._tokenizer.encode(checked_text(text), add_special_tokens=add_special_tokens)
        return np.array(encoding.ids, np.int32)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        encoding = self._tokenizer.encode(checked_text(text), add_special_tokens=False)
        return np.array(encoding.ids, np.int32), np.array(encoding.offsets, int).reshape(-1, 2)

    def encode_documents(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        decoded = [text.decode(errors="replace") for text in texts]
        encodings = self._tokenizer.encode_batch(decoded, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        valid_ids = [number for number in map(int, ids) if 0 <= number <= _MAX_ID]
        return self._tokenizer.decode(valid_ids, skip_special_tokens=skip_special_tokens)

    def name_of(self, token: int) -> str | None:
        return self._tokenizer.id_to_token(token)

    @property
    def directory(self) -> Path:
        """The normalized directory: `path`, or its normalized copy in the cache."""
        return self._opened[0]

    @property
    def _tokenizer(self) -> Any:
        return self._opened[1]

    @functools.cached_property
    def _opened(self) -> tuple[Path, Any]:
        directory, tokenizer = opened(self.path)
        fields = read_fields(directory / TOKENIZER_CONFIG)
        tokenizer.encode_special_tokens = bool(fields.get("split_special_tokens"))
        return directory, tokenizer

    # mypy rejects read-only overrides of the attributes of Tokenizer. They must be properties,
    # because their values are only known after the files have been read.

    @functools.cached_property
    def vocab_size(self) -> int:  # type: ignore[override]
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @functools.cached_property
    def roles(self) -> dict[str, str]:
        """The special tokens, keyed by role, such as "eos_token". Chat templates may use them."""
        return special_tokens(self.directory)

    @property
    def eos_id(self) -> int | None:  # type: ignore[override]
        # If no tokenizer file specifies EOS, fall back to the model's configs.
        token = self._id_of("eos_token")
        return next(iter(self.model_eos_ids), None) if token is None else token

    @property
    def bos_id(self) -> int | None:  # type: ignore[override]
        return self._id_of("bos_token")

    @property
    def pad_id(self) -> int | None:  # type: ignore[override]
        return self._id_of("pad_token")

    def _id_of(self, role: str) -> int | None:
        return self._tokenizer.token_to_id(self.roles[role]) if role in self.roles else None

    @functools.cached_property
    def model_eos_ids(self) -> tuple[int, ...]:  # type: ignore[override]
        return model_eos_ids(self.directory)

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:  # type: ignore[override]
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    @property
    def begin_ids(self) -> tuple[int, ...]:  # type: ignore[override]
        return self._added_ids[0]

    @property
    def end_ids(self) -> tuple[int, ...]:  # type: ignore[override]
        return self._added_ids[1]

    @functools.cached_property
    def _added_ids(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids of the special tokens that `encode` adds before and after a text."""
        full, plain = self.encode("a").tolist(), self.encode("a", False).tolist()
        starts = range(len(full) - len(plain) + 1)
        start = next((i for i in starts if full[i : i + len(plain)] == plain), 0)
        return tuple(full[:start]), tuple(full[start + len(plain) :])

    @property
    def document_start(self) -> tuple[int, ...]:
        if self.documents_start_with_eos and not self.begin_ids and self.eos_id is not None:
            return (self.eos_id,)
        return self.begin_ids

    @functools.cached_property
    def chat(self) -> ChatTemplate | None:  # type: ignore[override]
        sources = chat_templates(self.directory)
        default = sources.get("default", sources.get("tool_use"))
        if default is None:
            return None
        # An answer may contain special tokens on purpose, such as <|python_tag|>.
        return ChatTemplate(default, self.roles, sources.get("tool_use"), self._read_as_special)

    @property
    def _read_as_special(self) -> list[str]:
        """The texts that `encode` reads as special tokens."""
        if self._tokenizer.encode_special_tokens:
            return []
        added = self._tokenizer.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    def fingerprint(self) -> dict[str, Any]:
        return {"tokenizer": type(self).__name__, "sha256": self._sha256}

    @functools.cached_property
    def _sha256(self) -> str:
        settings = [
            self.roles,
            self.eos_ids,
            self.document_start,
            self._tokenizer.encode_special_tokens,
        ]
        digest = hashlib.sha256((self.directory / TOKENIZER_JSON).read_bytes())
        digest.update(json.dumps(settings, sort_keys=True).encode())
        return digest.hexdigest()
