"""The text that ids add to a prompt, while they come, and the bytes of parts of characters."""

import os
import re
from collections.abc import Iterable

from praxis_lite.inputs.tokenizers.base import Tokenizer

__all__ = ("StreamingDecoder", "UNKNOWN", "bytes_of_token")

# What decoding gives for bytes that are not a character, or not yet.
UNKNOWN = "\ufffd"
# Ids at the end of a prompt that decide the text of the next ones; a character has 4 bytes at most.
_NUM_CONTEXT = 8


class StreamingDecoder:
    """Turns ids into text as they come: the text of prompt and ids without that of the prompt.

    So the first word after a prompt has its space, which tokenizers such as Llama's omit at the
    beginning of a text. A piece never ends within a character.

    Args:
      tokenizer: Decodes the ids.
      skip_special_tokens: As for `Tokenizer.decode`.
      prompt_ids: The ids that precede those to come.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = False,
        prompt_ids: Iterable[int] = (),
    ):
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        prompt = [i for i in map(int, prompt_ids) if i not in tokenizer.special_ids]
        start = max(0, len(prompt) - _NUM_CONTEXT)
        while start and self._decode(prompt[start:]).startswith(UNKNOWN):  # Within a character.
            start = max(0, start - _NUM_CONTEXT)
        # The ids of the latest text, then those whose text is not complete.
        self._ids, self._num_context = prompt[start:], len(prompt) - start
        self._sent = self._decode(self._ids)

    def push(self, token: int) -> str:
        """Returns the text that has become final; "" while a character is incomplete."""
        self._ids.append(int(token))
        text = self._decode(self._ids)
        is_incomplete = text.endswith(UNKNOWN)
        if is_incomplete and len(self._ids) - self._num_context <= _NUM_CONTEXT:
            return ""
        text = text[: len(text) - is_incomplete]
        new = self._not_sent(text)
        if new:
            start = len(self._ids) - _NUM_CONTEXT if is_incomplete else self._num_context
            self._ids = self._ids[start:]
            self._num_context = len(self._ids)
            text = self._decode(self._ids)
            self._sent = text[: len(text) - is_incomplete]
        return new

    def flush(self) -> str:
        """Returns the text that was held back; U+FFFD for characters that stay incomplete."""
        text = self._decode(self._ids)
        new, self._sent, self._num_context = self._not_sent(text), text, len(self._ids)
        return new

    def text_of(self, token: int) -> str:
        """Returns the text that a token would add next, with U+FFFD for an incomplete character."""
        return self._not_sent(self._decode([*self._ids[: self._num_context], int(token)]))

    def _not_sent(self, text: str) -> str:
        return text[len(os.path.commonprefix([self._sent, text])) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skips)


def bytes_of_token(tokenizer: Tokenizer, token: int) -> bytes | None:
    """Returns the bytes of a token that is part of a character, or None if they are not known."""
    name = tokenizer.name_of(token) or ""
    if match := re.fullmatch("<0x([0-9A-Fa-f]{2})>", name):
        return bytes.fromhex(match[1])
    numbers = [_BYTE_LEVEL.get(character) for character in name]
    return bytes(numbers) if numbers and None not in numbers else None


def _byte_level() -> dict[str, int]:
    """Returns the bytes by the characters that stand for them in vocabularies such as GPT-2's."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


_BYTE_LEVEL = _byte_level()
