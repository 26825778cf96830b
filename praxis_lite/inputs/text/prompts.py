"""A pipeline of prompts of various lengths, taken from the documents in a corpus."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from praxis_lite.core.errors import ConfigError, require, shortened
from praxis_lite.inputs.base import IndexedPipeline, spec_of
from praxis_lite.inputs.mixing.shuffle import epoch_order, random_bits
from praxis_lite.inputs.text.corpus import TextCorpus
from praxis_lite.inputs.tokenizers.base import Tokenizer

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(eq=False)
class TextPrompts(IndexedPipeline):
    """One pass over prompts: `ids` [B, T], `prefix_lengths` [B] and `weights` [B].

    A prompt consists of the start token of documents (EOS for bytes), followed by the tokens for
    the first min_prompt_bytes to max_prompt_bytes bytes of a document. A prompt never contains the
    complete document. `ids` are padded on the right with zeros. In the last batch, rows without a
    prompt have prefix length 0 and weight 0.

    Args:
      corpus: Corpus of documents.
      split: Split of the corpus, 'train' or 'heldout'.
      batch_size: Number of rows in the global batch.
      num_prompts: Number of prompts, each from a different document.
      min_prompt_bytes: Minimum length of a prompt in bytes.
      max_prompt_bytes: Maximum length of a prompt in bytes.
      seed: Seed for the choice of documents and lengths.
    """

    corpus: TextCorpus
    split: str
    batch_size: int
    num_prompts: int
    min_prompt_bytes: int
    max_prompt_bytes: int
    seed: int = 0

    def check(self) -> None:
        super().check()
        self.require_at_least(1, "num_prompts", "min_prompt_bytes")
        self.require_at_least(0, "seed")
        self.require_at_least(self.min_prompt_bytes, "max_prompt_bytes")
        num_documents = len(self._long_documents)
        require(
            self.num_prompts <= num_documents,
            "TextPrompts.num_prompts",
            self.num_prompts,
            f"at most {num_documents}, the number of documents in the {self.split!r} split with "
            f"more than {self.min_prompt_bytes} bytes",
            "Lower num_prompts or min_prompt_bytes, or add text.",
        )

    @property
    def num_batches(self) -> int:
        return -(-self.num_prompts // self.batch_size)

    def element_spec(self) -> "dict[str, jax.ShapeDtypeStruct]":
        rows = (self.batch_size,)
        return spec_of(
            ids=((*rows, self._width), np.int32),
            prefix_lengths=(rows, np.int32),
            weights=(rows, np.float32),
        )

    def rows(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        count = rows.stop - rows.start
        ids = np.zeros((count, self._width), np.int32)
        lengths = np.zeros(count, np.int32)
        first = index * self.batch_size + rows.start
        prompts = self._prompts[first : first + count]
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
        return {"ids": ids, "prefix_lengths": lengths, "weights": (lengths > 0).astype(np.float32)}

    def fingerprint(self) -> dict[str, Any]:
        return self.settings_fingerprint(
            "corpus",
            "split",
            "batch_size",
            "num_prompts",
            "min_prompt_bytes",
            "max_prompt_bytes",
            "seed",
        )

    @property
    def tokenizer(self) -> Tokenizer:  # type: ignore[override]  # Read-only property.
        return self.corpus.tokenizer

    @property
    def _width(self) -> int:
        """The padded length of prompts: max_prompt_bytes + 1 for bytes, else the longest prompt."""
        if self.tokenizer.token_unit == "byte":
            return self.max_prompt_bytes + 1
        return max(map(len, self._prompts))

    @functools.cached_property
    def _long_documents(self) -> list[bytes]:
        documents = self.corpus.documents(self.split)
        return [text for _, text in documents if len(text) > self.min_prompt_bytes]

    @functools.cached_property
    def _prompts(self) -> list[np.ndarray]:
        chosen = epoch_order(self.seed, 0, len(self._long_documents))[: self.num_prompts]
        prompts = []
        for text, bits in zip(
            [self._long_documents[i] for i in chosen],
            random_bits(self.seed, 0, len(chosen), purpose=1).tolist(),
            strict=True,
        ):
            # Leave out at least one byte of the document.
            longest = min(self.max_prompt_bytes, len(text) - 1)
            length = self.min_prompt_bytes + bits % (longest - self.min_prompt_bytes + 1)
            (ids,) = self.tokenizer.encode_documents([self.tokenizer.cut(text, length)])
            prompts.append(self.tokenizer.with_start(ids))
            if not len(prompts[-1]):
                raise ConfigError(
                    f"TextPrompts: the prompt from the first {length} bytes of "
                    f"{shortened(text.decode(errors='replace'))!r} has no tokens, for example "
                    "because they are part of one character. Raise min_prompt_bytes, which is "
                    f"{self.min_prompt_bytes}."
                )
        return prompts
