"""Texts that end a continuation: as token sequences on the devices, and cut off on the host."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from praxis_lite.decode.decoder import Decoder, TokenizerIds
from praxis_lite.decode.sampling import Greedy
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.streaming import StreamingDecoder


def for_tokenizer(decoder: Decoder, tokenizer: Tokenizer) -> Decoder:
    """Returns the decoder with its end of text and stop strings as this tokenizer's tokens.

    Args:
      tokenizer: its `eos_ids` are what an eos_id of None stands for.
    """
    if decoder.eos_id is None and tokenizer.eos_ids:
        decoder = dataclasses.replace(decoder, eos_id=TokenizerIds(tokenizer.eos_ids))
    if isinstance(decoder, Greedy) and decoder.stop_strings:
        encoded = tuple(
            TokenizerIds(map(int, tokenizer.encode(text, False))) for text in decoder.stop_strings
        )
        sequences = tuple(dict.fromkeys((*decoder.stop_sequences, *encoded)))
        decoder = dataclasses.replace(decoder, stop_sequences=sequences)
    return decoder


def cut_at_stop(text: str, stop_strings: Sequence[str]) -> tuple[str, bool]:
    """Returns the text before the first stop string, and True if there was any."""
    places = [place for stop in stop_strings if (place := text.find(stop)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


def stops_in_text(
    tokenizer: Tokenizer, stop_strings: Sequence[str]
) -> Callable[[int, np.ndarray], bool]:
    """Returns `should_stop` of `ContinuousBatching.stream`: True once a text has a stop string."""
    return lambda index, ids: cut_at_stop(tokenizer.decode(ids), stop_strings)[1]


class TextUntilStop:
    """The text of tokens as they come, up to the first stop string.

    Attributes:
      is_stopped: True once there was a stop string; tokens behind it change nothing.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str]):
        self._decoder = StreamingDecoder(tokenizer, skip_special_tokens=True)
        self._stop_strings = stop_strings
        self._text, self._num_taken, self._num_final = "", 0, 0
        self._longest = max(map(len, stop_strings), default=0)
        self.is_stopped = False

    @property
    def length(self) -> int:
        """The characters so far; those of a character that is incomplete do not count."""
        return len(self._text)

    @property
    def num_final(self) -> int:
        """The characters that no later token can take back."""
        return self._num_final

    @property
    def waiting(self) -> str:
        """The text that is final, and not taken."""
        return self._text[self._num_taken : self._num_final]

    def push(self, token: int) -> None:
        """Adds the text of a token."""
        if not self.is_stopped:
            self._add(self._decoder.push(token))

    def end(self) -> None:
        """Adds what was held back: no token follows."""
        if not self.is_stopped:
            self._add(self._decoder.flush())
            self._num_final = len(self._text)

    def replace(self, text: str) -> None:
        """Takes a whole text in place of tokens."""
        self._text = ""
        self._add(text)
        self._num_final = len(self._text)

    def take(self) -> str:
        """Returns the text that has become final since the last time."""
        taken, self._num_taken = self.waiting, self._num_final
        return taken

    def _add(self, new: str) -> None:
        start = max(0, len(self._text) - self._longest + 1)
        self._text += new
        tail, self.is_stopped = cut_at_stop(self._text[start:], self._stop_strings)
        self._text = self._text[:start] + tail
        # What may be the beginning of a stop string waits for what follows.
        held = 0 if self.is_stopped else max(
            (n for stop in self._stop_strings for n in range(len(stop)) if tail.endswith(stop[:n])),
            default=0,
        )
        self._num_final = max(self._num_taken, len(self._text) - held)
