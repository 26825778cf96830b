"""The text of a continuation, and the stop strings that end it: on the devices and on the host."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from praxis_lite.decode.decoder import Decoder, TokenizerIds
from praxis_lite.decode.sampling import Greedy
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.streaming import StreamingDecoder

__all__ = ("ContinuationText", "continuation_text", "for_tokenizer")

# After these texts a stop string is tokenized as within a text.
_TEXTS_BEFORE = ("", "a", ".", "\n")


def for_tokenizer(decoder: Decoder, tokenizer: Tokenizer) -> Decoder:
    """Returns the decoder with its end of text and stop strings as this tokenizer's tokens.

    Args:
      tokenizer: Its `eos_ids` replace an eos_id of None.
    """
    if decoder.eos_id is None and tokenizer.eos_ids:
        decoder = dataclasses.replace(decoder, eos_id=TokenizerIds(tokenizer.eos_ids))
    if isinstance(decoder, Greedy) and decoder.stop_strings:
        encoded = [ids for text in decoder.stop_strings for ids in _spellings(tokenizer, text)]
        sequences = tuple(dict.fromkeys((*decoder.stop_sequences, *encoded)))
        decoder = dataclasses.replace(decoder, stop_sequences=sequences)
    return decoder


def _spellings(tokenizer: Tokenizer, text: str) -> list[TokenizerIds]:
    """Returns ids that end in a text, at the beginning of a text and within one.

    Tokenizers such as Llama's put a space before a text, so that "\\n" alone has one more token;
    others have a token for a word with the space before it.
    """
    found: dict[TokenizerIds, None] = {}
    for before, spaced in itertools.product(_TEXTS_BEFORE, (text, f" {text}")):
        ids = tokenizer.encode(before + spaced, False).tolist()
        first = tokenizer.encode(before, False).tolist()
        ids, is_split = TokenizerIds(ids[len(first) :]), ids[: len(first)] == first
        # Not if a token belongs to both texts, or the text has characters without a token.
        if ids and is_split and _without_spaces(tokenizer.decode(ids)) == _without_spaces(text):
            found[ids] = None
    return [  # A spelling that ends in another one is found by that.
        ids for ids in found
        if not any(ids != other and ids[-len(other) :] == other for other in found)
    ]


class ContinuationText:
    """The text of a continuation while its tokens come, up to the first stop string.

    Special tokens are not part of the text, but stop strings are compared with them included.

    Args:
      tokenizer: Decodes the tokens.
      prompt_ids: The ids that are continued.
      stop_strings: Texts that end the continuation.

    Attributes:
      text: The text so far, without a character that is incomplete.
      num_final: The number of its characters that no later token can take back.
      is_stopped: True once there was a stop string; tokens after it change nothing.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Iterable[int] = (),
        stop_strings: Sequence[str] = (),
    ):
        self._tokenizer = tokenizer
        self._decoder = StreamingDecoder(tokenizer, True, prompt_ids)
        self._stop_strings = tuple(dict.fromkeys(
            stop for text in stop_strings for stop in (text, *_with_spaces(tokenizer, text))
        ))
        self._longest = max(map(len, self._stop_strings), default=0)
        self.text, self.num_final, self.is_stopped = "", 0, False
        self._num_taken = 0
        # The text with special tokens, and their places in it.
        self._compared, self._special = "", list[tuple[int, int]]()

    def push(self, token: int) -> str:
        """Adds a token; returns the text that it completes, also where a stop string cuts it."""
        if self.is_stopped:
            return ""
        if token not in self._tokenizer.special_ids:
            return self._add(self._decoder.push(token))
        new = self._add(self._decoder.flush() + self._decoder.push(token))
        if not self.is_stopped and (special := self._tokenizer.decode([token])):
            start = len(self._compared)
            self._special.append((start, start + len(special)))
            self._compare(special)
        return new

    def end(self) -> str:
        """Adds the text that was held back, because no token follows; returns it."""
        new = "" if self.is_stopped else self._add(self._decoder.flush())
        self.num_final = len(self.text)
        return new

    def replace(self, text: str) -> None:
        """Sets the complete text, which replaces that of the tokens."""
        self.text, self.num_final = text, len(text)

    @property
    def waiting(self) -> str:
        """The final text that was not taken yet."""
        return self.text[self._num_taken : self.num_final]

    def take(self) -> str:
        """Returns the text that has become final since the last call."""
        taken, self._num_taken = self.waiting, self.num_final
        return taken

    def text_of(self, token: int) -> str:
        """Returns the text that a token would add next; the name of a special token."""
        is_special = token in self._tokenizer.special_ids
        return self._tokenizer.decode([token]) if is_special else self._decoder.text_of(token)

    def _add(self, new: str) -> str:
        self.text += new
        self._compare(new)
        return new

    def _compare(self, new: str) -> None:
        """Looks for stop strings that end in the newest text, and for the beginning of one."""
        if not new:
            return
        first = max(0, len(self._compared) - self._longest + 1)
        self._compared += new
        places = [self._compared.find(stop, first) for stop in self._stop_strings]
        places = [place for place in places if place >= 0]
        self.is_stopped = bool(places)
        if self.is_stopped:
            self.text = self.text[: self._num_in_text(min(places))]
            self.num_final = len(self.text)
        else:
            # Text that may begin a stop string waits for the next tokens.
            num_held = max((
                n for stop in self._stop_strings for n in range(len(stop))
                if self._compared.endswith(stop[:n])
            ), default=0)
            num_final = self._num_in_text(len(self._compared) - num_held)
            self.num_final = max(self.num_final, num_final)

    def _num_in_text(self, place: int) -> int:
        """Returns the number of characters before a place that are not special tokens."""
        return place - sum(
            min(stop, place) - start for start, stop in self._special if start < place
        )


def continuation_text(
    tokenizer: Tokenizer, prompt_ids: Iterable[int], ids: Iterable[int],
    stop_strings: Sequence[str] = (),
) -> ContinuationText:
    """Returns the text of complete ids, which continue a prompt, up to the first stop string."""
    result = ContinuationText(tokenizer, prompt_ids, stop_strings)
    for token in ids:
        result.push(int(token))
    result.end()
    return result


def _with_spaces(tokenizer: Tokenizer, text: str) -> Iterator[str]:
    """Yields a stop string with the spaces that its tokens have, such as after a special token."""
    decoded = tokenizer.decode(tokenizer.encode(text, False))
    if len(decoded) > len(text) and _without_spaces(decoded) == _without_spaces(text):
        yield decoded


def _without_spaces(text: str) -> str:
    return text.replace(" ", "")
