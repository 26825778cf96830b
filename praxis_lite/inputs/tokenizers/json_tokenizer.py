"""A tokenizer.json, as the library `tokenizers` writes it and most models of the hub have it."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.inputs.tokenizers.base import checked_text
from praxis_lite.inputs.tokenizers.directory_tokenizer import DirectoryTokenizer
from praxis_lite.inputs.tokenizers.files import (
    GENERATION_CONFIG,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    TokenizerFiles,
)
from praxis_lite.inputs.tokenizers.rust_library import errors_of_rust, read_tokenizer
from praxis_lite.inputs.tokenizers.special.named_tokens import FLAGS, Token
from praxis_lite.inputs.tokenizers.special.special_tokens import (
    SpecialTokens,
    Vocabulary,
    resolved,
)

_MOST = 2**32  # Ids are so many to the library; it leaves out those that stand for no token.


class JsonTokenizer(DirectoryTokenizer):
    """The tokenizer of a directory with a tokenizer.json; the others beside it say the rest.

    Special tokens that stand in a text become their ids, as in transformers. Decoding adds and
    removes no blanks: `clean_up_tokenization_spaces` is not followed, which loses text. What a
    tokenizer.json says of dropout, truncation and padding is not followed: a text has one
    encoding, of all of it.

    Args:
      path: the directory.

    Raises:
      ConfigError: a file is absent or damaged, when it is first needed.
    """

    def encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        text = checked_text(text)
        with errors_of_rust(self._file):
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return np.array(encoding.ids, np.int32)

    def encode_with_places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        text = checked_text(text)
        with errors_of_rust(self._file):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int32), np.array(encoding.offsets, int).reshape(-1, 2)

    def encode_documents(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        decoded = [text.decode(errors="replace") for text in texts]
        with errors_of_rust(self._file):
            encodings = self._tokenizer.encode_batch(decoded, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        given = [number for number in map(int, ids) if 0 <= number < _MOST]
        with errors_of_rust(self._file):
            return self._tokenizer.decode(given, skip_special_tokens=skip_special_tokens)

    def name_of(self, token: int) -> str | None:
        return self._tokenizer.id_to_token(token)

    def has_text(self, token: int, skip_special_tokens: bool = False) -> bool:
        is_known = 0 <= token < _MOST and self._tokenizer.id_to_token(token) is not None
        return is_known and super().has_text(token, skip_special_tokens)

    @property
    def begin_ids(self) -> tuple[int, ...]:
        return self._around[0]

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self._around[1]

    @functools.cached_property
    def run_ids(self) -> frozenset[int]:
        # Its decoder joins them, whether or not its model makes them.
        decoder = self._own.decoder
        if decoder is None or b'"ByteFallback"' not in decoder.__getstate__():
            return frozenset()
        forms = ("<0x{:02X}>", "<0x{:02x}>")
        names = {form.format(byte) for form in forms for byte in range(256)}
        numbers = map(self._own.token_to_id, names)
        return frozenset(number for number in numbers if number is not None)

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

    @property
    def _file(self) -> Any:
        return self.path / TOKENIZER_JSON

    @functools.cached_property
    def _own(self) -> Any:
        """The library's tokenizer, of tokenizer.json alone."""
        return read_tokenizer(self._file)

    @functools.cached_property
    def _own_tokens(self) -> dict[int, Token]:
        return {
            number: Token(
                token.content, f"{self._file}: added_tokens", None, token.special,
                {flag: getattr(token, flag) for flag in FLAGS},
            )
            for number, token in self._own.get_added_tokens_decoder().items()
        }

    @functools.cached_property
    def _own_ids(self) -> list[int]:
        return list(self._own.get_vocab(with_added_tokens=True).values())

    @functools.cached_property
    def special(self) -> SpecialTokens:
        self._say_what_is_not_followed()
        local = self._own
        size = max([local.get_vocab_size(with_added_tokens=False), *(i + 1 for i in self._own_ids)])
        return resolved(self._files, Vocabulary(local.token_to_id, size, self._own_tokens))

    @functools.cached_property
    def _tokenizer(self) -> Any:
        added_token = optional_module("tokenizers", f"The tokenizer {self._file}").AddedToken
        local = self._own_tokens
        new = {
            number: added_token(token.text, special=token.is_special, **token.flags)
            for number, token in sorted(self.special.tokens.items())
            if number not in local or token is not local[number]
        }
        # All at once: the library goes through all of the vocabulary's added tokens each time.
        with errors_of_rust(self._file):
            self._own.add_tokens([*new.values()])
        for number, token in new.items():
            given = self._own.token_to_id(token.content)
            if given != number:
                raise ConfigError(
                    f"The tokenizer's files disagree: {shown(repr(token.content))} is {number} in "
                    f"{self.special.tokens[number].said_by}, and {given} by {self._file}, which "
                    "skips ids. Let transformers write the directory anew."
                )
        return self._own

    def _former_tokens(self) -> dict[int, Token]:
        added = self._files.json(TOKENIZER_CONFIG).get("added_tokens_decoder") or {}
        size = max([-1, *self._own_ids]) + 1
        new = {int(i): self.special.tokens[int(i)] for i in added if int(i) >= size}
        return new | self._own_tokens

    def _former_role(self, role: str, text: object) -> int | None:
        if role == "bos_token":  # What begins a text is the file's own.
            return self.special.roles.get(role)
        if isinstance(text, str) and text:
            return self._tokenizer.token_to_id(text)
        ends = self._files.json(GENERATION_CONFIG).get("eos_token_id")
        return next(iter(ends), None) if isinstance(ends, list) else ends
