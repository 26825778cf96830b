"""Tokenizers that need no file: bytes, and numbers that stand for no text."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.inputs.tokenizers.base import Tokenizer, checked_text
from praxis_lite.inputs.tokenizers.chat_template import ChatTemplate, chatml


class ByteTokenizer(Tokenizer):
    """Bytes as ids 0 to 255, and 256 for the end of a text, which also begins the next text.

    A turn of a chat begins with the byte 2 and ends with the byte 3.
    """

    token_unit = "byte"
    vocab_size = 257
    eos_id = 256
    special_ids = frozenset({eos_id})
    document_start = (eos_id,)
    chat = ChatTemplate(chatml("\x02", "\x03"))  # The start and the end of a text, in ASCII.

    def encode(self, text: str | bytes, add_special_tokens: bool = True) -> np.ndarray:
        """Returns int32[num_bytes], without an EOS; a str is taken as UTF-8."""
        data = text if isinstance(text, bytes) else checked_text(text).encode()
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def encode_with_places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the bytes, and the character of each."""
        sizes = [len(item.encode()) for item in checked_text(text)]
        first = np.repeat(np.arange(len(text)), sizes)
        return self.encode(text), np.stack([first, first + 1], axis=-1)

    def name_of(self, token: int) -> str | None:
        return f"<0x{token:02X}>" if 0 <= token < 256 else None

    def encode_documents(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the bytes of each text as they are."""
        return [self.encode(text) for text in texts]

    def cut(self, text: bytes, length: int) -> bytes:
        """Returns the first bytes of a text, whatever they are."""
        return text[:length]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Returns the text before the first EOS.

        Invalid UTF-8, and ids above 256, which a model's vocabulary may have, show as U+FFFD.
        """
        data = bytearray()
        for token in ids:
            if token == self.eos_id:
                break
            data.append(token if 0 <= token < 256 else 0xFF)  # UTF-8 has no byte 0xFF.
        return data.decode(errors="replace")

    def fingerprint(self) -> dict[str, Any]:
        return {"tokenizer": "ByteTokenizer"}


class TokenIds(Tokenizer):
    """Tokens without text, such as made-up tokens; as text they are numbers with blanks."""

    eos_id = 2**31 - 1  # No vocabulary has it: no token ends a text, and none begins the next.
    document_start = ()

    def encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        """Returns int32[num_tokens] of '3 17 5'.

        Raises:
          ConfigError: a word is no number, or one that int32 does not hold.
        """
        try:
            return np.array([int(word) for word in text.split()], np.int32)
        except (ValueError, OverflowError):
            raise ConfigError(
                f"{shown(text)!r} is no text of these tokens, which stand for no words. Write "
                "their numbers with blanks between: '3 17 5'."
            ) from None

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Returns '3 17 5'."""
        return " ".join(map(str, ids))

    def fingerprint(self) -> dict[str, Any]:
        return {"tokenizer": "TokenIds"}
