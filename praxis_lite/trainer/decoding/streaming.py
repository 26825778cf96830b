"""Prints continuations to the terminal while they are being decoded."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from praxis_lite.decode.continuous_batching import NewTokens
from praxis_lite.decode.decoder import Decoder
from praxis_lite.decode.stop_strings import ContinuationText
from praxis_lite.inputs.tokenizers.base import Tokenizer


class ContinuationPrinter:
    """Prints continuations as they are decoded, in the order of their prompts.

    Args:
      titles: Title of each prompt, printed before the prompt's continuation if there are several
        prompts.
      prompts: Token ids of each prompt.
      tokenizer: The task's tokenizer.
      decoder: The task's decoder.
      write: Function that prints a piece of text.
    """

    def __init__(
        self,
        titles: Sequence[str],
        prompts: Sequence[np.ndarray],
        tokenizer: Tokenizer,
        decoder: Decoder,
        write: Callable[[str], None],
    ):
        self._titles, self._num_hyps, self._write = titles, decoder.num_hyps, write
        self._texts = [
            ContinuationText(tokenizer, prompt, decoder.stop_strings)
            for prompt in prompts
            for _ in range(decoder.num_hyps)
        ]
        self._is_done = [False] * len(self._texts)
        self._next, self._has_heading = 0, False

    def add(self, new: NewTokens) -> None:
        """Adds new tokens; `new.index` counts the hypotheses for all prompts."""
        text = self._texts[new.index]
        for token in new.ids.tolist():
            text.push(token)
        if new.done:
            text.end()
            self._is_done[new.index] = True
        self._print()

    def add_rest(self, records: Sequence[dict[str, Any]]) -> None:
        """Prints the remaining text of unfinished continuations, taken from their records."""
        for index, (text, record) in enumerate(zip(self._texts, records, strict=True)):
            if not self._is_done[index]:
                text.replace(record["continuation"])
                self._is_done[index] = True
        self._print()

    def _print(self) -> None:
        # Continuations are printed in order, so one that is not done blocks all later ones.
        while self._next < len(self._texts):
            text, is_done = self._texts[self._next], self._is_done[self._next]
            if not self._has_heading and (text.waiting or is_done):
                self._write(self._heading(self._next))
                self._has_heading = True
            self._write(text.take())
            if not is_done:
                return
            self._write("\n")
            self._next, self._has_heading = self._next + 1, False

    def _heading(self, index: int) -> str:
        if len(self._texts) == 1:
            return ""
        row, hyp = divmod(index, self._num_hyps)
        sample = f", sample {hyp}" if self._num_hyps > 1 else ""
        return f"\nprompt {row + 1} of {len(self._titles)}{sample}: {self._titles[row]}\n"
