"""Texts that end a continuation: as token sequences on the devices, and cut off on the host."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from praxis_lite.decode.decoder import Decoder
from praxis_lite.decode.sampling import Greedy
from praxis_lite.inputs.tokenizers.base import Tokenizer


def for_tokenizer(decoder: Decoder, tokenizer: Tokenizer) -> Decoder:
    """Returns the decoder with its end of text and stop strings as this tokenizer's tokens.

    Args:
      tokenizer: its `eos_ids` are what an eos_id of None stands for.
    """
    if decoder.eos_id is None and tokenizer.eos_ids:
        first, *others = tokenizer.eos_ids
        decoder = dataclasses.replace(decoder, eos_id=(first, *others) if others else first)
    if isinstance(decoder, Greedy) and decoder.stop_strings:
        encoded = tuple(
            tuple(map(int, tokenizer.encode(text, False))) for text in decoder.stop_strings
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
