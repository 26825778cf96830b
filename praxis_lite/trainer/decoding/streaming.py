"""Continuations on the terminal while they come."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from praxis_lite.decode.continuous_batching import NewTokens
from praxis_lite.decode.decoder import Decoder
from praxis_lite.decode.stop_strings import ContinuationText
from praxis_lite.inputs.tokenizers.base import Tokenizer

Write = Callable[[str], None]


def to_terminal(text: str) -> None:
    """Prints a text that may go on."""
    print(text, end="", flush=True)


class Continuations:
    """Prints continuations in the order of their prompts, each as far as it has come.

    Args:
      titles: of the prompts; each is printed before its continuation, if there are several.
      prompts: the ids of each prompt.
      tokenizer, decoder: of the task.
      write: takes pieces of text.
    """

    def __init__(
        self, titles: Sequence[str], prompts: Sequence[np.ndarray], tokenizer: Tokenizer,
        decoder: Decoder, write: Write = to_terminal,
    ):
        self._titles, self._num_hyps, self._write = titles, decoder.num_hyps, write
        self._texts = [
            _Text(tokenizer, prompt, decoder.stop_strings)
            for prompt in prompts for _ in range(decoder.num_hyps)
        ]
        self._next, self._is_begun = 0, False

    def add(self, new: NewTokens) -> None:
        """Takes tokens of a continuation; its index is of prompts x hypotheses."""
        self._texts[new.index].add(new.ids.tolist(), new.done)
        self._print()

    def add_rest(self, records: Sequence[dict[str, Any]]) -> None:
        """Takes the records of all continuations; those not printed yet are."""
        for text, record in zip(self._texts, records, strict=True):
            if not text.is_done:
                text.finish(record["continuation"])
        self._print()

    def _print(self) -> None:
        while self._next < len(self._texts):
            text = self._texts[self._next]
            if not self._is_begun and (text.waiting or text.is_done):
                self._write(self._heading(self._next))
                self._is_begun = True
            self._write(text.take())
            if not text.is_done:
                return
            self._write("\n")
            self._next, self._is_begun = self._next + 1, False

    def _heading(self, index: int) -> str:
        if len(self._texts) == 1:
            return ""
        row, hyp = divmod(index, self._num_hyps)
        sample = f", sample {hyp}" if self._num_hyps > 1 else ""
        return f"\nprompt {row + 1} of {len(self._titles)}{sample}: {self._titles[row]}\n"


class _Text(ContinuationText):
    """A continuation: its final text that is not printed yet."""

    is_done = False

    def add(self, ids: Sequence[int], is_done: bool) -> None:
        for token in ids:
            self.push(token)
        if is_done:
            self.end()
        self.is_done = is_done

    def finish(self, text: str) -> None:
        self.replace(text)
        self.is_done = True
