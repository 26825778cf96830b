"""Tokenizers that need no files: bytes, characters, and numbers without text."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError, shortened
from praxis_lite.inputs.tokenizers.base import Tokenizer, checked_text
from praxis_lite.inputs.tokenizers.chat_template import ChatTemplate, chatml


class ByteTokenizer(Tokenizer):
    """A tokenizer whose ids 0 to 255 are bytes; the EOS id 256 separates documents.

    A chat turn starts with byte 2 and ends with byte 3, which messages must not contain, except
    answers of a model in a prompt.
    """

    token_unit = "byte"
    vocab_size = 257
    eos_id = 256
    special_ids = frozenset({eos_id})
    document_start = (eos_id,)
    # ASCII's start of text and end of text.
    chat: ChatTemplate | None = ChatTemplate(
        chatml("\x02", "\x03"), reserved=("\x02", "\x03"), answers_may_be_reserved=False
    )

    def encode(self, text: str | bytes, add_special_tokens: bool = True) -> np.ndarray:
        """Returns the UTF-8 bytes of a text as int32[num_bytes], without EOS."""
        data = text if isinstance(text, bytes) else checked_text(text).encode()
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Encodes a text, and returns the span of the character to which each byte belongs."""
        sizes = [len(item.encode()) for item in checked_text(text)]
        first = np.repeat(np.arange(len(text)), sizes)
        return self.encode(text), np.stack([first, first + 1], axis=-1)

    def name_of(self, token: int) -> str | None:
        return f"<0x{token:02X}>" if 0 <= token < 256 else None

    def encode_documents(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the bytes of each text unchanged, even if they are not valid UTF-8."""
        return [self.encode(text) for text in texts]

    def cut(self, text: bytes, length: int) -> bytes:
        """Returns the first `length` bytes of a text, even if this splits a character."""
        return text[:length]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Returns the text before the first EOS.

        Invalid UTF-8 is replaced by U+FFFD, and so are ids above 256, which may occur if a model
        has a larger vocabulary.
        """
        data = bytearray()
        for token in ids:
            if token == self.eos_id:
                break
            data.append(token if 0 <= token < 256 else 0xFF)  # 0xFF never occurs in UTF-8.
        return data.decode(errors="replace")

    def fingerprint(self) -> dict[str, Any]:
        return {"tokenizer": "ByteTokenizer"}


class CharacterTokenizer(Tokenizer):
    """A tokenizer whose ids are the indices of characters in a string.

    There is no EOS, so documents are concatenated without a separator.

    Args:
      characters: All characters that a text may contain, such as "".join(sorted(set(text))).
    """

    token_unit = "character"

    def __init__(self, characters: str):
        self.characters, self.vocab_size = characters, len(characters)

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {character: i for i, character in enumerate(self.characters)}

    def encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        """Returns the id of each character as int32[num_characters].

        Raises:
          ConfigError: A character is not in `characters`.
        """
        try:
            return np.array([self._ids[character] for character in checked_text(text)], np.int32)
        except KeyError as error:
            raise ConfigError(
                f"The text contains {error.args[0]!r}, which is not one of the "
                f"{self.vocab_size} characters {shortened(self.characters)!r} of the "
                "CharacterTokenizer. Add it to `characters`, or remove it from the text."
            ) from None

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Encodes a text; each token is one character."""
        ids = self.encode(text)
        first = np.arange(len(ids))
        return ids, np.stack([first, first + 1], axis=-1)

    def name_of(self, token: int) -> str | None:
        return self.characters[token] if 0 <= token < len(self.characters) else None

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Returns the characters; an id outside the vocabulary is replaced by U+FFFD."""
        return "".join(self.name_of(int(token)) or "\ufffd" for token in ids)

    def fingerprint(self) -> dict[str, Any]:
        return {"tokenizer": "CharacterTokenizer", "characters": self.characters}


class TokenIds(Tokenizer):
    """A tokenizer for ids without text, such as the ids in synthetic data.

    A text is a list of ids, written as space-separated numbers.
    """

    eos_id = 2**31 - 1  # Larger than any vocabulary, so no token ever ends a text.
    document_start = ()

    def encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        """Parses space-separated numbers such as '3 17 5' as int32[num_tokens].

        Raises:
          ConfigError: A word is not an integer, or does not fit in int32.
        """
        try:
            return np.array([int(word) for word in text.split()], np.int32)
        except (ValueError, OverflowError):
            raise ConfigError(
                f"{shortened(text)!r} is not a list of token ids. These tokens have no text; write "
                "their ids separated by spaces, such as '3 17 5'."
            ) from None

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Returns the ids as space-separated numbers, such as '3 17 5'."""
        return " ".join(map(str, ids))

    def fingerprint(self) -> dict[str, Any]:
        return {"tokenizer": "TokenIds"}
