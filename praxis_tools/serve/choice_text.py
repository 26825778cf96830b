"""Tokens of an answer as text that can be sent: complete characters, no stop string, log-probs."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from praxis_lite.decode.stop_strings import ContinuationText
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.streaming import UNKNOWN, bytes_of_token
from praxis_tools.serve.engine import Likeliest, Piece

STOP, LENGTH = "stop", "length"


class NamedToken(NamedTuple):
    """A token that could be made, its log-prob, and its bytes, or None if they are not known.

    The text of a part of a character is its bytes, "bytes:\\xe2\\x82", as in OpenAI's API.
    """

    text: str
    logprob: float
    content: bytes | None


class Token(NamedTuple):
    """A token that was made.

    Attributes:
      text: what it adds to the answer: of the parts of a character only the last one has a text.
      content: its bytes, which together are the answer's; None if they are not known.
      offset: of its text in the answer.
      likeliest: tokens that could be made in its place.
    """

    text: str
    logprob: float
    content: bytes | None
    offset: int
    likeliest: Sequence[NamedToken]


class ChoiceText:
    """The text of an answer while its tokens come.

    Attributes:
      num_tokens: that were made for it, up to the one that ended it.
      finish_reason: "stop" (an end of text or a stop string) or "length"; None before the end.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: np.ndarray, stop: Sequence[str],
        eos_ids: Collection[int], has_logprobs: bool,
    ):
        self._tokenizer, self._eos_ids, self._has_logprobs = tokenizer, eos_ids, has_logprobs
        self._text = ContinuationText(tokenizer, prompt_ids, stop)
        self._tokens: list[Token] = []  # That are not taken.
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        """Takes tokens of the model; those behind the end of the answer change nothing."""
        for number, token in enumerate(piece.ids):
            if self._text.is_stopped:
                break
            self.num_tokens += 1
            if self._has_logprobs and token not in self._tokenizer.special_ids:
                likeliest = piece.likeliest[number] if piece.likeliest else ()
                self._push(token, piece.logprobs[number], likeliest)
            else:
                self._add_rest(self._text.push(token))
        if piece.done:
            has_end = bool(piece.ids) and piece.ids[-1] in self._eos_ids
            self.end(STOP if has_end else LENGTH)
        elif self._text.is_stopped:
            self.end(STOP)

    def end(self, reason: str) -> None:
        """Ends the answer, and lets what was held back go."""
        if self.finish_reason is None:
            self._add_rest(self._text.end())
            self.finish_reason = STOP if self._text.is_stopped else reason

    def take(self) -> tuple[str, list[Token]]:
        """Returns the text that has become final, and the tokens of which all text is final."""
        text, end = self._text.take(), self._text.num_final
        if self._text.is_stopped:  # The tokens of the stop string are not the answer's.
            self._tokens = [
                token._replace(text=token.text[: end - token.offset])
                for token in self._tokens if token.offset < end
            ]
        num_taken = len(self._tokens)
        if self.finish_reason is None:  # Parts of a character wait for the last one.
            num_taken = max((
                place for place, token in enumerate(self._tokens, 1)
                if token.text and token.offset + len(token.text) <= end
            ), default=0)
        taken, self._tokens = self._tokens[:num_taken], self._tokens[num_taken:]
        return text, taken

    def _add_rest(self, text: str) -> None:
        """Gives the last token a text that was held back: parts of a character without its end."""
        if text and self._tokens:
            last = self._tokens[-1]
            self._tokens[-1] = last._replace(text=last.text + text)

    def _push(self, token: int, logprob: float, likeliest: Likeliest) -> None:
        named = self._named(token, logprob)
        others = [(other, self._named(other, x)) for other, x in likeliest]
        offset = len(self._text.text)
        text = self._text.push(token)
        # The chosen one has the same text here as in the answer.
        others = [x._replace(text=text) if other == token else x for other, x in others]
        self._tokens.append(Token(text, logprob, named.content, offset, others))

    def _named(self, token: int, logprob: float) -> NamedToken:
        """Returns a token as it is in the next place of the answer."""
        text = self._text.text_of(token)
        if UNKNOWN not in text:
            return NamedToken(text, logprob, text.encode())
        content = bytes_of_token(self._tokenizer, token)
        if content is not None:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
        return NamedToken(text, logprob, content)
