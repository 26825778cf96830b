"""Converts the tokens of an answer to text that can be sent.

Only complete characters are sent, and the text ends before a stop string. If requested, log-probs
are added.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from praxis_lite.decode.stop_strings import ContinuationText
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.streaming import UNKNOWN, bytes_of_token
from praxis_tools.serve.engine import Likeliest, Piece

STOP, LENGTH = "stop", "length"


class NamedToken(NamedTuple):
    """A token that could be generated next, with its text, log-prob and bytes.

    The bytes are None if they are unknown. If the token is not a complete character, its text lists
    the bytes, such as "bytes:\\xe2\\x82", as in OpenAI's API.
    """

    text: str
    logprob: float
    content: bytes | None


class Token(NamedTuple):
    """A generated token.

    Attributes:
      text: Text that the token adds to the answer. If a character consists of several tokens, only
        the last token has text.
      logprob: Log-prob of the token.
      content: Bytes of the token, or None if they are unknown.
      offset: Offset of `text` in the answer.
      likeliest: The most likely tokens at this position.
    """

    text: str
    logprob: float
    content: bytes | None
    offset: int
    likeliest: Sequence[NamedToken]


class ChoiceText:
    """Accumulates the text of an answer from its tokens.

    Args:
      tokenizer: Tokenizer of the model.
      prompt_ids: Token ids of the prompt.
      stop: Strings that end the answer.
      eos_ids: Tokens that end the answer.
      has_logprobs: Whether log-probs were requested.

    Attributes:
      finish_reason: "stop" (end-of-text token or stop string) or "length"; None before the end.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: np.ndarray,
        stop: Sequence[str],
        eos_ids: Collection[int],
        has_logprobs: bool,
    ):
        self._tokenizer, self._eos_ids, self._has_logprobs = tokenizer, eos_ids, has_logprobs
        self._text = ContinuationText(tokenizer, prompt_ids, stop)
        self._tokens: list[Token] = []  # Tokens that `take` has not returned yet.
        self.finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        """The number of generated tokens, including the token that ended the answer."""
        return self._text.num_tokens

    def add(self, piece: Piece) -> None:
        """Adds tokens from the model, ignoring tokens after the end of the answer."""
        for number, token in enumerate(piece.ids):
            if self._text.is_stopped:
                break
            if self._has_logprobs and not self._text.omits(token):
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
        """Ends the answer and releases text that was held back."""
        if self.finish_reason is None:
            self._add_rest(self._text.end())
            self.finish_reason = STOP if self._text.is_stopped else reason

    def take(self) -> tuple[str, list[Token]]:
        """Returns text that became ready to send since the last call, together with its tokens."""
        text, end = self._text.take(), self._text.num_final
        if self._text.is_stopped:  # Remove the tokens in the stop string.
            self._tokens = [
                token._replace(text=token.text[: end - token.offset])
                for token in self._tokens
                if token.offset < end
            ]
        num_taken = len(self._tokens)
        if self.finish_reason is None:  # Hold back incomplete characters.
            num_taken = max(
                (
                    count
                    for count, token in enumerate(self._tokens, 1)
                    if token.text and token.offset + len(token.text) <= end
                ),
                default=0,
            )
        taken, self._tokens = self._tokens[:num_taken], self._tokens[num_taken:]
        return text, taken

    def _add_rest(self, text: str) -> None:
        """Adds text that was held back (an incomplete character) to the last token."""
        if text and self._tokens:
            last = self._tokens[-1]
            self._tokens[-1] = last._replace(text=last.text + text)

    def _push(self, token: int, logprob: float, likeliest: Likeliest) -> None:
        named = self._named_token(token, logprob)
        alternatives = [(other, self._named_token(other, x)) for other, x in likeliest]
        offset = len(self._text.text)
        text = self._text.push(token)
        # Give the generated token the same text among the alternatives as in the answer.
        others = [x._replace(text=text) if other == token else x for other, x in alternatives]
        self._tokens.append(Token(text, logprob, named.content, offset, others))

    def _named_token(self, token: int, logprob: float) -> NamedToken:
        """Returns the text and bytes of a token at the next position in the answer."""
        text = self._text.text_of(token)
        if UNKNOWN not in text:
            return NamedToken(text, logprob, text.encode())
        content = bytes_of_token(self._tokenizer, token)
        if content is not None:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
        return NamedToken(text, logprob, content)
