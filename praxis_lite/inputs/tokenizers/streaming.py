"""Decodes ids to text while a model generates them."""

import os
import re
from collections.abc import Iterable

from praxis_lite.inputs.tokenizers.base import Tokenizer

__all__ = ("StreamingDecoder", "UNKNOWN", "bytes_of_token")

# The replacement character for invalid or incomplete UTF-8 in decoded text.
UNKNOWN = "\ufffd"
# Number of ids at the end of a prompt on which the text of the next ids may depend. A character has
# at most 4 bytes.
_NUM_CONTEXT = 8


class StreamingDecoder:
    """Decodes ids one at a time into pieces of text that never split a character.

    Ids are decoded together with the end of the prompt, whose text is then removed. This keeps the
    space before the first word, which tokenizers such as Llama's omit at the start of a text.

    Args:
      tokenizer: Tokenizer that decodes the ids.
      skip_special_tokens: As in `Tokenizer.decode`.
      prompt_ids: Ids of the prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = False,
        prompt_ids: Iterable[int] = (),
    ):
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        prompt = [i for i in map(int, prompt_ids) if i not in tokenizer.special_ids]
        start = max(0, len(prompt) - _NUM_CONTEXT)
        while start and self._decode(prompt[start:]).startswith(UNKNOWN):  # Splits a character.
            start = max(0, start - _NUM_CONTEXT)
        # The ids of the text returned last, followed by the ids whose text is still incomplete.
        self._ids, self._num_context = prompt[start:], len(prompt) - start
        self._sent = self._decode(self._ids)

    def push(self, token: int) -> str:
        """Adds an id and returns the text that it completes, or "" in the middle of a character."""
        # Wait until the new ids end with a complete character. If more than _NUM_CONTEXT new ids
        # still end with an incomplete character, they are invalid UTF-8: return the text before the
        # replacement character.
        self._ids.append(int(token))
        text = self._decode(self._ids)
        is_incomplete = text.endswith(UNKNOWN)
        if is_incomplete and len(self._ids) - self._num_context <= _NUM_CONTEXT:
            return ""
        text = text[: len(text) - is_incomplete]
        new = self._not_sent(text, self._ids[self._num_context :])
        if new:
            start = len(self._ids) - _NUM_CONTEXT if is_incomplete else self._num_context
            # Other ids of the first character may be in the prompt. Without them, a tokenizer with
            # byte tokens, such as Llama's, decodes all bytes that follow as UNKNOWN.
            start = next(
                (i for i in range(start, max(start - 4, -1), -1) if self._is_whole(i)), start
            )
            self._ids = self._ids[start:]
            self._num_context = len(self._ids)
            text = self._decode(self._ids)
            self._sent = text[: len(text) - is_incomplete]
        return new

    def flush(self) -> str:
        """Returns the remaining text, with U+FFFD for incomplete characters."""
        text = self._decode(self._ids)
        new = self._not_sent(text, self._ids[self._num_context :])
        self._sent, self._num_context = text, len(self._ids)
        return new

    def text_of(self, token: int) -> str:
        """Returns the text that a token would add, with U+FFFD for an incomplete character."""
        return self._not_sent(self._decode([*self._ids[: self._num_context], token]), [token])

    def _is_whole(self, start: int) -> bool:
        """Returns whether a character starts at `self._ids[start]`."""
        return not self._decode(self._ids[start:]).startswith(UNKNOWN)

    def _not_sent(self, text: str, new_ids: list[int]) -> str:
        """Returns the part of `text` after the text that was returned before."""
        size = len(os.path.commonprefix([self._sent, text]))
        # If a byte is not part of a character, a tokenizer with byte tokens also decodes the bytes
        # before it as UNKNOWN, although their text has been returned.
        is_changed = size < len(self._sent.rstrip(UNKNOWN))
        return self._decode(new_ids) if is_changed else text[size:]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skips)


def bytes_of_token(tokenizer: Tokenizer, token: int) -> bytes | None:
    """Returns a token's bytes, which may be part of a character, or None if they are unknown."""
    name = tokenizer.name_of(token) or ""
    if match := re.fullmatch("<0x([0-9A-Fa-f]{2})>", name):
        return bytes.fromhex(match[1])
    if not name or not all(character in _BYTE_LEVEL for character in name):
        return None
    return bytes(_BYTE_LEVEL[character] for character in name)


def _byte_level() -> dict[str, int]:
    """Returns the mapping from characters to bytes in byte-level vocabularies such as GPT-2's."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_LEVEL = _byte_level()
