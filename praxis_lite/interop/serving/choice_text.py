"""Tokens of an answer as text that can be sent: whole characters, no stop string, log-probs."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from praxis_lite.decode.stop_strings import TextUntilStop
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.interop.serving.engine import Piece

STOP, LENGTH = "stop", "length"
_UNKNOWN = "\ufffd"


class Token(NamedTuple):
    """A token beside the text: its own text, its log-prob, and where in the answer it begins."""

    text: str
    logprob: float
    offset: int
    likeliest: Sequence[tuple[str, float]]  # Texts and log-probs.


class ChoiceText:
    """The text of an answer while its tokens come.

    Attributes:
      num_tokens: that were made for it, up to the one that ended it.
      finish_reason: "stop" (an end of text or a stop string) or "length"; None while it goes on.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str], eos_ids: Collection[int],
        has_logprobs: bool,
    ):
        self._tokenizer, self._eos_ids, self._has_logprobs = tokenizer, eos_ids, has_logprobs
        self._text = TextUntilStop(tokenizer, stop)
        self._tokens: list[Token] = []  # That are not taken.
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        """Takes tokens of the model; those behind the end of the answer change nothing."""
        for number, token in enumerate(piece.ids):
            if self._text.is_stopped:
                break
            offset = self._text.length
            self._text.push(token)
            self.num_tokens += 1
            if self._has_logprobs and self._tokenizer.has_text(token, True):
                likeliest = piece.likeliest[number] if piece.likeliest else ()
                self._tokens.append(Token(
                    self._tokenizer.decode([token]), piece.logprobs[number], offset,
                    [(self._tokenizer.decode([other]), x) for other, x in likeliest],
                ))
        if piece.done:
            has_end = bool(piece.ids) and piece.ids[-1] in self._eos_ids
            self.end(STOP if has_end else LENGTH)
        elif self._text.is_stopped:
            self.end(STOP)

    def end(self, reason: str) -> None:
        """Ends the answer, and lets what was held back go."""
        if self.finish_reason is None:
            self._text.end()
            self.finish_reason = STOP if self._text.is_stopped else reason

    def take(self) -> tuple[str, list[Token]]:
        """Returns the text that has become final, and the tokens that begin in it."""
        text, end = self._text.take(), self._text.num_final
        tokens = [token for token in self._tokens if token.offset < end]
        self._tokens = [token for token in self._tokens if token.offset >= end]
        return text, tokens


def bytes_of(text: str) -> Any:
    """Returns a token's bytes as numbers, or None of a part of a character."""
    return None if _UNKNOWN in text else list(text.encode())
