"""Text while ids come, never a part of a character."""

from praxis_lite.inputs.tokenizers.base import Tokenizer

# What stands for bytes that are no character, perhaps because more of it is to come.
_UNKNOWN = "\ufffd"


class StreamingDecoder:
    """Turns ids into text one by one; the pieces together are the text of all of them.

    Args:
      tokenizer: of the ids.
      skip_special_tokens: as of `Tokenizer.decode`.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = False):
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        # Ids whose text is out, kept because what follows may depend on them, such as a blank
        # before a word; and those whose text is not out yet.
        self._before: list[int] = []
        self._waiting: list[int] = []

    def push(self, token: int) -> str:
        """Returns the text that has become final; "" while a character is incomplete."""
        self._waiting.append(int(token))
        if token in self._tokenizer.run_ids:
            return ""
        text = self._text()
        if text.endswith(_UNKNOWN):
            return ""
        self._before, self._waiting = self._waiting, []
        return text

    def flush(self) -> str:
        """Returns the text of what was held back; U+FFFD for characters that stay incomplete."""
        text = self._text()
        self._before, self._waiting = self._waiting, []
        return text

    def _text(self) -> str:
        before = self._tokenizer.decode(self._before, self._skips)
        return self._tokenizer.decode([*self._before, *self._waiting], self._skips)[len(before) :]
