"""Text while ids come, never a part of a character."""

from praxis_lite.inputs.tokenizers.base import Tokenizer

# What stands for bytes that are no character, perhaps because more of it is to come.
_UNKNOWN = "\ufffd"
# How many ids may stand before an id that its text depends on: a blank, the bytes of a character.
_CONTEXT = 8


class StreamingDecoder:
    """Turns ids into text as they come; the pieces together are the text of all of them.

    Args:
      tokenizer: of the ids.
      skip_special_tokens: as of `Tokenizer.decode`.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = False):
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        # The last ids, behind the first one that gave more than blanks: tokenizers leave out the
        # blanks before a text.
        self._ids: list[int] = []
        self._first: list[int] = []
        self._num_sent = 0  # Characters of the text of `_ids` that are out.
        self._is_ended = False

    def push(self, token: int) -> str:
        """Returns the text that has become final; "" while a character is incomplete."""
        token = int(token)
        is_ended, self._is_ended = self._is_ended, token in self._tokenizer.closing_ids
        if is_ended or not self._tokenizer.has_text(token, self._skips):
            self._is_ended |= is_ended
            return ""
        self._ids.append(token)
        if token in self._tokenizer.run_ids:
            return ""
        text = self._text()
        sent, self._num_sent = self._num_sent, len(text) - text.endswith(_UNKNOWN)
        final = text[sent : self._num_sent]
        self._forget(token)
        return final

    def flush(self) -> str:
        """Returns the text of what was held back; U+FFFD for characters that stay incomplete."""
        text = self._text()
        sent, self._num_sent = self._num_sent, len(text)
        return text[sent:]

    def _text(self) -> str:
        return self._tokenizer.decode(self._ids, self._skips)

    def _forget(self, token: int) -> None:
        if not self._first:
            alone = self._tokenizer.decode([token], self._skips)
            self._first = [token] if alone.strip() and _UNKNOWN not in alone else []
        if len(self._ids) > (4 if self._first else 64) * _CONTEXT:
            self._ids = [*self._first, *self._ids[-_CONTEXT:]]
            text = self._text()
            self._num_sent = len(text) - text.endswith(_UNKNOWN)
