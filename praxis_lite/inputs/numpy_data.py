"""Pipelines that only need NumPy: windows of text, arrays in memory, a synthetic language."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.inputs.base import (
    IndexedPipeline,
    NumberedPipeline,
    lm_spec,
    spec_of_rows,
    zero_rows,
)
from praxis_lite.inputs.batch_arrays import narrow, with_weights
from praxis_lite.inputs.mixing.shuffle import random_bits
from praxis_lite.inputs.text.corpus import TextCorpus
from praxis_lite.inputs.text.windows import EvaluationWindows, TrainingWindows
from praxis_lite.inputs.tokenizers.base import Tokenizer

if TYPE_CHECKING:
    import jax

__all__ = ["InMemory", "SyntheticLm", "TextCorpus", "TextWindows"]


@dataclasses.dataclass(eq=False)
class TextWindows(IndexedPipeline):
    """Windows of a corpus for a language model: `ids`, `labels` (the next tokens), `weights`.

    Args:
        split: 'train' or 'heldout' of the corpus.
        shuffle: True for endless training batches, whose grid of windows and order change every
            epoch; False for one pass in order, in which every label counts exactly once.
        stride: for one pass: the distance of windows. Below seq_len (the default) windows overlap,
            and all but the last `stride` labels are context with weight 0.
    """

    corpus: TextCorpus
    split: str
    batch_size: int
    seq_len: int
    seed: int = 0
    _: dataclasses.KW_ONLY
    shuffle: bool
    stride: int | None = None

    def check(self) -> None:
        super().check()
        self.require_at_least(1, "seq_len")
        self.require_at_least(0, "seed")
        if self.stride is not None:
            self.require_at_least(1, "stride")
            require(
                not self.shuffle and self.stride <= self.seq_len, "TextWindows.stride", self.stride,
                "None with shuffle=True, and otherwise at most seq_len, or labels would be left "
                f"out; seq_len is {self.seq_len}, shuffle {self.shuffle}",
            )
        num_labels = len(self.corpus.tokens(self.split)) - 1
        require(
            not self.shuffle or self.seq_len <= num_labels, "TextWindows.seq_len", self.seq_len,
            f"at most {num_labels}, the labels of the {self.split!r} split",
            "Lower seq_len or give more text.",
        )

    @functools.cached_property
    def index(self) -> TrainingWindows | EvaluationWindows:
        """The positions of windows in the stream."""
        num_labels = len(self.corpus.tokens(self.split)) - 1
        if self.shuffle:
            return TrainingWindows(num_labels, self.seq_len, self.seed)
        return EvaluationWindows(num_labels, self.seq_len, self.stride or self.seq_len)

    @functools.cached_property
    def stream(self) -> np.ndarray:
        """The split's tokens and, at `padding_position`, a zero."""
        return np.append(self.corpus.tokens(self.split), np.int32(0))

    @property
    def num_batches(self) -> int | None:
        if isinstance(self.index, TrainingWindows):
            return None
        return -(-self.index.num_windows // self.batch_size)

    def element_spec(self) -> "dict[str, jax.ShapeDtypeStruct]":
        return lm_spec(self.batch_size, self.seq_len)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the corpus."""
        return self.corpus.tokenizer

    def largest_id(self) -> int:
        """Returns the largest id of any batch."""
        return int(self.stream.max())

    def baselines(self) -> dict[str, float]:
        """Returns gzip's bits per byte, and the factor from bits per token to bits per byte."""
        gzip = {"gzip_bits_per_byte": self.corpus.gzip_bits_per_byte(self.split)}
        if self.tokenizer.token_unit == "byte":
            return gzip
        return {"tokens_per_byte": self.corpus.tokens_per_byte(self.split), **gzip}

    def window_rows(self, index: int, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """Returns the positions in `stream` and the weights of rows of batch `index`."""
        return self.index.windows(index * self.batch_size + rows.start, rows.stop - rows.start)

    def rows(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        positions, weights = self.window_rows(index, rows)
        tokens = self.stream[positions]
        return {"ids": tokens[:, :-1], "labels": tokens[:, 1:], "weights": weights}

    def fingerprint(self) -> dict[str, Any]:
        # The same for tf_data.TextWindows, whose batches are equal.
        return self.settings_fingerprint(
            "corpus", "split", "batch_size", "seq_len", "seed", "shuffle", "stride"
        )


@dataclasses.dataclass(eq=False)
class InMemory(NumberedPipeline):
    """Rows of arrays that share their first dimension.

    Without a `weights` array, ones are added: a weight per label, or per row without `labels`.
    64-bit numbers become 32-bit, as JAX would make them.

    Args:
        arrays: the leaves by name, or a callable that returns them, called when first needed.
        shuffle: True for endless batches in an order redrawn every epoch; False for one pass.
    """

    arrays: Mapping[str, np.ndarray] | Callable[[], Mapping[str, np.ndarray]]
    batch_size: int
    seed: int = 0
    _: dataclasses.KW_ONLY
    shuffle: bool

    def check(self) -> None:
        super().check()
        _ = self.leaves

    @functools.cached_property
    def leaves(self) -> dict[str, np.ndarray]:
        """The arrays with their weights. Raises ConfigError if their first dims differ."""
        given = self.arrays() if callable(self.arrays) else self.arrays
        require(
            isinstance(given, Mapping) and all(isinstance(name, str) for name in given),
            "InMemory.arrays", list(given) if isinstance(given, Mapping) else type(given),
            "a dict of arrays by name, such as {'ids': ..., 'labels': ...}",
        )
        leaves = {}
        for name, leaf in given.items():
            try:
                array = np.asarray(leaf)
            except ValueError as error:
                raise ConfigError(f"InMemory: {name!r} is not an array: {error}") from None
            leaves[name] = narrow("InMemory", name, array)
        num_rows = {len(leaf) if leaf.ndim else 0 for leaf in leaves.values()}
        require(
            len(num_rows) == 1 and 0 not in num_rows, "InMemory.arrays",
            {name: leaf.shape for name, leaf in leaves.items()},
            "arrays with the same first dimension, 1 or more: the number of examples",
        )
        return with_weights(leaves)

    @property
    def num_examples(self) -> int:
        return len(self.leaves["weights"])

    def element_spec(self) -> "dict[str, jax.ShapeDtypeStruct]":
        return spec_of_rows(self.leaves, self.batch_size)

    def rows(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        chosen = self.numbers(index, rows)
        batch = zero_rows(self.leaves, rows.stop - rows.start)
        for name, leaf in self.leaves.items():
            batch[name][: len(chosen)] = leaf[chosen]
        return batch

    def fingerprint(self) -> dict[str, Any]:
        return self.settings_fingerprint("sha256", "batch_size", "seed", "shuffle")

    @functools.cached_property
    def sha256(self) -> str:
        """The hash of all names and arrays."""
        digest = hashlib.sha256()
        for name, leaf in sorted(self.leaves.items()):
            digest.update(f"{name} {leaf.dtype} {leaf.shape} ".encode())
            digest.update(np.ascontiguousarray(leaf).tobytes())
        return digest.hexdigest()


class SyntheticLm(IndexedPipeline):
    """A synthetic language: runs that count upwards, modulo the vocabulary.

    A token is followed by its successor with probability 7/8, and by a random token with 1/8. The
    loss of a perfect model is about 0.38 + ln(vocab_size) / 8; chance is ln(vocab_size).

    Args:
        num_batches: None for endless training batches; a number for one pass.
    """

    def __init__(
        self,
        vocab_size: int,
        batch_size: int,
        seq_len: int,
        seed: int = 0,
        num_batches: int | None = None,
    ):
        self.vocab_size, self.batch_size, self.seq_len = vocab_size, batch_size, seq_len
        self.seed, self._num_batches = seed, num_batches

    @property
    def num_batches(self) -> int | None:
        return self._num_batches

    def check(self) -> None:
        super().check()
        self.require_at_least(1, "vocab_size", "seq_len")
        self.require_at_least(0, "seed")
        if self.num_batches is not None:
            self.require_at_least(1, "num_batches")

    def element_spec(self) -> "dict[str, jax.ShapeDtypeStruct]":
        return lm_spec(self.batch_size, self.seq_len)

    def rows(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        first, count = index * self.batch_size, rows.stop - rows.start
        length = self.seq_len + 1
        # Each row has separate random bits, so that a host only draws its own rows.
        numbers = range(first + rows.start, first + rows.stop)
        bits = np.array([random_bits(self.seed, row, length) for row in numbers], np.uint64)
        bits = bits.reshape(count, length)  # Also without rows.
        times = np.arange(length)
        is_new = (bits & np.uint64(7) == 0) | (times == 0)
        run_start = np.maximum.accumulate(np.where(is_new, times, 0), axis=1)
        drawn = (bits >> np.uint64(3)) % np.uint64(self.vocab_size)
        token_at_start = np.take_along_axis(drawn, run_start, axis=1).astype(np.int64)
        tokens = ((token_at_start + times - run_start) % self.vocab_size).astype(np.int32)
        weights = np.ones((count, self.seq_len), np.float32)
        return {"ids": tokens[:, :-1], "labels": tokens[:, 1:], "weights": weights}

    def fingerprint(self) -> dict[str, Any]:
        return self.settings_fingerprint(
            "vocab_size", "batch_size", "seq_len", "seed", "num_batches"
        )
