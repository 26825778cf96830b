"""A tokenizer.json, as the library `tokenizers` writes it and most models of the hub have it."""

import functools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from praxis_lite.errors import ConfigError
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.chat_template import ChatTemplate
from praxis_lite.inputs.tokenizers.files import TokenizerFiles

TOKENIZER_JSON = "tokenizer.json"


class JsonTokenizer(Tokenizer):
    """The tokenizer of a directory with a tokenizer.json; the others beside it say the rest.

    Special tokens that stand in a text become their ids, as in transformers. Decoding adds and
    removes no blanks: `clean_up_tokenization_spaces` is not followed, which loses text.

    Args:
      path: the directory.

    Raises:
      ConfigError: a file is absent or damaged, when it is first needed.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path).expanduser()

    def encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        found = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return np.array(found.ids, np.int32)

    def encode_with_places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return np.array(found.ids, np.int32), np.array(found.offsets, int).reshape(-1, 2)

    def encode_documents(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        decoded = [one.decode(errors="replace") for one in texts]
        found = self._tokenizer.encode_batch(decoded, add_special_tokens=False)
        return [np.array(one.ids, np.int32) for one in found]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        given = [int(one) for one in ids]
        return self._tokenizer.decode(given, skip_special_tokens=skip_special_tokens)

    def fingerprint(self) -> dict[str, Any]:
        return {"tokenizer": "JsonTokenizer", "sha256": self._sha256}

    @functools.cached_property
    def vocab_size(self) -> int:
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @property
    def eos_id(self) -> int | None:
        named = self._special_id("eos_token")
        return named if named is not None else next(iter(self._files.model_eos_ids), None)

    @property
    def model_eos_ids(self) -> tuple[int, ...]:
        return self._files.model_eos_ids

    @property
    def bos_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def pad_id(self) -> int | None:
        return self._special_id("pad_token")

    @property
    def begin_ids(self) -> tuple[int, ...]:
        return self._around[0]

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self._around[1]

    @functools.cached_property
    def run_ids(self) -> frozenset[int]:
        model = self._tokenizer.model
        if not getattr(model, "byte_fallback", False):
            return frozenset()
        numbers = (self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(one for one in numbers if one is not None)

    @functools.cached_property
    def chat(self) -> ChatTemplate | None:
        return self._files.chat

    @functools.cached_property
    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What stands before and after a text."""
        whole, plain = self.encode("a").tolist(), self.encode("a", False).tolist()
        places = range(len(whole) - len(plain) + 1)
        at = next((i for i in places if whole[i : i + len(plain)] == plain), 0)
        return tuple(whole[:at]), tuple(whole[at + len(plain) :])

    @functools.cached_property
    def _files(self) -> TokenizerFiles:
        return TokenizerFiles(self.path, TOKENIZER_JSON)

    @functools.cached_property
    def _sha256(self) -> str:
        _ = self._tokenizer  # Its errors first.
        return self._files.sha256()

    def _special_id(self, name: str) -> int | None:
        text = self._files.special_tokens.get(name)
        return None if text is None else self._tokenizer.token_to_id(text)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        # tokenizers: the library that wrote the file; its Rust reads and runs every kind there is.
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Read

        path = self.path / TOKENIZER_JSON
        if not path.is_file():
            raise ConfigError(f"The tokenizer has no file {path}. Name its directory.")
        try:
            read = Read.from_file(str(path))
        except Exception as error:  # The library raises nothing narrower.
            raise ConfigError(f"The tokenizer's file {path} cannot be read: {error}.") from error
        read.no_truncation()
        read.no_padding()
        for number, entry in self._files.added_tokens.items():
            if read.token_to_id(entry["content"]) is None:
                kinds = ("single_word", "lstrip", "rstrip", "normalized", "special")
                given = {kind: entry[kind] for kind in kinds if kind in entry}
                read.add_tokens([AddedToken(entry["content"], **given)])
            found = read.token_to_id(entry["content"])
            if found != number:
                raise ConfigError(
                    f"The tokenizer's files disagree: {entry['content']!r} is {number} in "
                    f"{self.path / 'tokenizer_config.json'}, and {found} by {path}."
                )
        return read
