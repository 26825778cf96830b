"""Ends continuations at stop strings, matched as tokens on devices and as text on the host."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from praxis_lite.core.errors import ConfigError
from praxis_lite.decode.decoder import Decoder, TokenizerIds
from praxis_lite.decode.sampling import Greedy
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.streaming import StreamingDecoder

__all__ = ("ContinuationText", "continuation_text", "for_tokenizer")

# A stop string is tokenized after each of these prefixes, because tokens depend on the context.
_TEXTS_BEFORE = ("", "a", ".", "\n")


def for_tokenizer(decoder: Decoder, tokenizer: Tokenizer) -> Decoder:
    """Returns a decoder with a tokenizer's EOS ids and its encodings of the stop strings.

    Args:
      decoder: The decoder. If its `eos_id` is None, the tokenizer's `eos_ids` are used. If, in
        addition, the chat template ends a turn with text that is not a single token, this text is
        added to the stop strings.
      tokenizer: Tokenizer that encodes the stop strings.

    Raises:
      ConfigError: The tokenizer cannot encode a stop string, so no continuation can contain it.
    """
    if decoder.eos_id is None:
        if isinstance(decoder, Greedy) and tokenizer.turn_end and not tokenizer.turn_end_ids:
            stop_strings = dict.fromkeys((*decoder.stop_strings, tokenizer.turn_end))
            decoder = dataclasses.replace(decoder, stop_strings=tuple(stop_strings))
        if tokenizer.eos_ids:
            decoder = dataclasses.replace(decoder, eos_id=TokenizerIds(tokenizer.eos_ids))
    if isinstance(decoder, Greedy) and decoder.stop_strings:
        encoded = [ids for text in decoder.stop_strings for ids in _spellings(tokenizer, text)]
        sequences = tuple(dict.fromkeys((*decoder.stop_sequences, *encoded)))
        decoder = dataclasses.replace(decoder, stop_sequences=sequences)
    return decoder


def _spellings(tokenizer: Tokenizer, text: str) -> list[TokenizerIds]:
    """Returns the id sequences that encode a string at the start of a text or within a text.

    Some tokenizers, such as Llama's, prepend a space to a text, so "\\n" at the start of a text is
    encoded with an additional token. Others have tokens for a word together with the space before
    it.
    """
    found: dict[TokenizerIds, None] = {}
    tokenizer.encode(text, False)  # Raises an error if the text cannot occur in a continuation.
    for before, spaced in itertools.product(_TEXTS_BEFORE, (text, f" {text}")):
        try:
            ids = tokenizer.encode(before + spaced, False).tolist()
            first = tokenizer.encode(before, False).tolist()
        except ConfigError:  # A CharacterTokenizer may lack the added characters.
            continue
        ids, is_split = TokenizerIds(ids[len(first) :]), ids[: len(first)] == first
        # Skip encodings in which a token spans `before` and `text` or characters are lost.
        if ids and is_split and _without_spaces(tokenizer.decode(ids)) == _without_spaces(text):
            found[ids] = None
    return [  # Omit sequences that end with a shorter sequence, which matches first.
        ids
        for ids in found
        if not any(ids != other and ids[-len(other) :] == other for other in found)
    ]


class ContinuationText:
    """Decodes the tokens in a continuation incrementally, up to the first stop string.

    `text` does not include special tokens and the tokens that end a turn, but stop strings may
    match them.

    Args:
      tokenizer: Tokenizer that decodes the tokens.
      prompt_ids: Ids of the prompt.
      stop_strings: Strings that end the continuation.

    Attributes:
      text: The text so far, without an incomplete last character.
      num_final: Number of characters in `text` that later tokens cannot change.
      num_tokens: Number of tokens so far, including those of a stop string.
      is_stopped: Whether a stop string has occurred. Later tokens are ignored.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Iterable[int] = (),
        stop_strings: Sequence[str] = (),
    ):
        self._tokenizer = tokenizer
        self._omitted = tokenizer.special_ids.union(tokenizer.turn_end_ids)
        self._decoder = StreamingDecoder(tokenizer, True, prompt_ids)
        self._stop_strings = tuple(
            dict.fromkeys(
                stop for text in stop_strings for stop in (text, *_with_spaces(tokenizer, text))
            )
        )
        self._longest = max(map(len, self._stop_strings), default=0)
        self.text, self.num_final, self.is_stopped = "", 0, False
        self.num_tokens = self._num_taken = 0
        # The text including special tokens, and the (start, stop) range of each special token.
        self._compared, self._special = "", list[tuple[int, int]]()

    def push(self, token: int) -> str:
        """Adds a token and returns the text that it completes, which may include a stop string."""
        if self.is_stopped:
            return ""
        self.num_tokens += 1
        if not self.omits(token):
            return self._add(self._decoder.push(token))
        new = self._add(self._decoder.flush())
        # The text of a special token may contain a stop string, but is not part of the
        # continuation.
        if not self.is_stopped and (special := self._tokenizer.decode([token])):
            start = len(self._compared)
            self._special.append((start, start + len(special)))
            self._compare(special)
        return new

    def end(self) -> str:
        """Ends the continuation and returns the text for an incomplete last character, if any."""
        new = "" if self.is_stopped else self._add(self._decoder.flush())
        self.num_final = len(self.text)
        return new

    def replace(self, text: str) -> None:
        """Replaces the decoded text with `text` and marks `text` as final."""
        self.text, self.num_final = text, len(text)

    @property
    def waiting(self) -> str:
        """The final text that `take` has not returned yet."""
        return self.text[self._num_taken : self.num_final]

    def take(self) -> str:
        """Returns the text that became final since the last call."""
        taken, self._num_taken = self.waiting, self.num_final
        return taken

    def omits(self, token: int) -> bool:
        """Returns whether `text` does not include a token, because it is special or ends a turn."""
        return token in self._omitted

    def text_of(self, token: int) -> str:
        """Returns the text that `token` would add next; for an omitted token, the token's name."""
        is_omitted = self.omits(token)
        return self._tokenizer.decode([token]) if is_omitted else self._decoder.text_of(token)

    def _add(self, new: str) -> str:
        self.text += new
        self._compare(new)
        return new

    def _compare(self, new: str) -> None:
        """Searches new text for stop strings, and the end of the text for partial stop strings."""
        if not new:
            return
        # The first position of a stop string that may end in the new text.
        first = max(0, len(self._compared) - self._longest + 1)
        self._compared += new
        starts = [(self._compared.find(stop, first), len(stop)) for stop in self._stop_strings]
        # The stop string that ends first decides, as if the text arrived one character at a time.
        # Of several with this end, the longest is removed.
        ends = [(start + length, start) for start, length in starts if start >= 0]
        self.is_stopped = bool(ends)
        if self.is_stopped:
            self.text = self.text[: self._num_in_text(min(ends)[1])]
            self.num_final = len(self.text)
        else:
            # Text that may be the beginning of a stop string is not final yet.
            num_pending = max(
                (
                    n
                    for stop in self._stop_strings
                    for n in range(len(stop))
                    if self._compared.endswith(stop[:n])
                ),
                default=0,
            )
            num_final = self._num_in_text(len(self._compared) - num_pending)
            self.num_final = max(self.num_final, num_final)

    def _num_in_text(self, end: int) -> int:
        """Returns the number of characters before index `end` that are not in special tokens."""
        return end - sum(min(stop, end) - start for start, stop in self._special if start < end)


def continuation_text(
    tokenizer: Tokenizer,
    prompt_ids: Iterable[int],
    ids: Iterable[int],
    stop_strings: Sequence[str] = (),
) -> ContinuationText:
    """Decodes a complete continuation of a prompt, up to the first stop string."""
    result = ContinuationText(tokenizer, prompt_ids, stop_strings)
    for token in ids:
        result.push(int(token))
    result.end()
    return result


def _with_spaces(tokenizer: Tokenizer, text: str) -> Iterator[str]:
    """Yields the decoded form of a stop string if encoding and decoding the string adds spaces."""
    decoded = tokenizer.decode(tokenizer.encode(text, False))
    if len(decoded) > len(text) and _without_spaces(decoded) == _without_spaces(text):
        yield decoded


def _without_spaces(text: str) -> str:
    return text.replace(" ", "")
