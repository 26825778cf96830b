"""Pipelines that need only NumPy: windows of text, arrays in memory, a synthetic language."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.inputs.base import (
    ExamplePipeline,
    IndexedPipeline,
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
    """Windows of a text corpus: `ids`, `labels` (the next tokens) and `weights`, each [B, T].

    Args:
        corpus: Tokenized text.
        split: Split of the corpus, 'train' or 'heldout'.
        batch_size: Number of rows in the global batch.
        seq_len: Number of tokens per row.
        seed: Seed of the shuffled order.
        shuffle: True for endless training batches; every epoch shifts the windows and shuffles
            them. False for one pass in order, in which every label has weight 1 exactly once.
        stride: Distance between the starts of consecutive windows when shuffle is False; defaults
            to seq_len. With a smaller stride, windows overlap, and in each window all but the last
            `stride` labels serve as context with weight 0.
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
            if self.shuffle:
                raise ConfigError(
                    f"TextWindows.stride={self.stride} cannot be combined with shuffle=True. Set "
                    "shuffle=False, or remove stride."
                )
            require(
                self.stride <= self.seq_len,
                "TextWindows.stride",
                self.stride,
                f"at most seq_len={self.seq_len}, because a larger stride would skip labels",
            )
        num_labels = len(self.corpus.tokens(self.split)) - 1
        require(
            not self.shuffle or self.seq_len <= num_labels,
            "TextWindows.seq_len",
            self.seq_len,
            f"at most {num_labels}, the number of labels in the {self.split!r} split",
            "Lower seq_len or add text.",
        )

    @functools.cached_property
    def index(self) -> TrainingWindows | EvaluationWindows:
        """The mapping from each window to the positions in `stream` that it contains."""
        num_labels = len(self.corpus.tokens(self.split)) - 1
        if self.shuffle:
            return TrainingWindows(num_labels, self.seq_len, self.seed)
        return EvaluationWindows(num_labels, self.seq_len, self.stride or self.seq_len)

    @functools.cached_property
    def stream(self) -> np.ndarray:
        """The split's tokens, followed by a zero for padding positions."""
        return np.append(self.corpus.tokens(self.split), np.int32(0))

    @property
    def num_batches(self) -> int | None:
        if isinstance(self.index, TrainingWindows):
            return None
        return -(-self.index.num_windows // self.batch_size)

    def element_spec(self) -> "dict[str, jax.ShapeDtypeStruct]":
        return lm_spec(self.batch_size, self.seq_len)

    @property
    def tokenizer(self) -> Tokenizer:  # type: ignore[override]  # Read-only property.
        return self.corpus.tokenizer

    def largest_id(self) -> int:
        return int(self.stream.max())

    def baselines(self) -> dict[str, float]:
        """Returns gzip's bits per byte, and the tokens per byte unless the tokens are bytes."""
        gzip = {"gzip_bits_per_byte": self.corpus.gzip_bits_per_byte(self.split)}
        if self.tokenizer.token_unit == "byte":
            return gzip
        return {"tokens_per_byte": self.corpus.tokens_per_byte(self.split), **gzip}

    def window_rows(self, index: int, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """Returns positions in `stream`, [rows, T + 1], and label weights, [rows, T]."""
        return self.index.windows(index * self.batch_size + rows.start, rows.stop - rows.start)

    def rows(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        positions, weights = self.window_rows(index, rows)
        tokens = self.stream[positions]
        return {"ids": tokens[:, :-1], "labels": tokens[:, 1:], "weights": weights}

    def fingerprint(self) -> dict[str, Any]:
        # tf_data.TextWindows inherits this: its batches are equal.
        return self.settings_fingerprint(
            "corpus", "split", "batch_size", "seq_len", "seed", "shuffle", "stride"
        )


@dataclasses.dataclass(eq=False)
class InMemory(ExamplePipeline):
    """Batches of arrays in memory; row i of each array belongs to example i.

    If there is no `weights` array, weights of 1 are added, with the shape of `labels`, or one per
    row if there are no `labels`. 64-bit numbers are converted to 32 bits, as JAX does by default.

    Args:
        arrays: Arrays with the same first dimension, keyed by name, or a callable that returns such
            arrays. The callable is called on first use.
        batch_size: Number of rows in the global batch.
        seed: Seed of the shuffled order.
        shuffle: True for endless batches, reshuffled every epoch; False for one pass in order.
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
        """The arrays and their weights. Raises ConfigError if their first dimensions differ."""
        arrays = self.arrays() if callable(self.arrays) else self.arrays
        require(
            isinstance(arrays, Mapping) and all(isinstance(name, str) for name in arrays),
            "InMemory.arrays",
            list(arrays) if isinstance(arrays, Mapping) else type(arrays),
            "a dict of arrays keyed by name, such as {'ids': ..., 'labels': ...}",
        )
        leaves = {}
        for name, leaf in arrays.items():
            try:
                array = np.asarray(leaf)
            except ValueError as error:
                raise ConfigError(f"InMemory: {name!r} is not an array: {error}") from None
            leaves[name] = narrow("InMemory", name, array)
        num_rows = {len(leaf) if leaf.ndim else 0 for leaf in leaves.values()}
        require(
            len(num_rows) == 1 and 0 not in num_rows,
            "InMemory.arrays",
            {name: leaf.shape for name, leaf in leaves.items()},
            "arrays with the same nonzero first dimension, the number of examples",
        )
        return with_weights(leaves)

    @property
    def num_examples(self) -> int:
        return len(self.leaves["weights"])

    def element_spec(self) -> "dict[str, jax.ShapeDtypeStruct]":
        return spec_of_rows(self.leaves, self.batch_size)

    def rows(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        indices = self.example_indices(index, rows)
        batch = zero_rows(self.leaves, rows.stop - rows.start)
        for name, leaf in self.leaves.items():
            batch[name][: len(indices)] = leaf[indices]
        return batch

    def fingerprint(self) -> dict[str, Any]:
        return self.settings_fingerprint("sha256", "batch_size", "seed", "shuffle")

    @functools.cached_property
    def sha256(self) -> str:
        """A hash of the names, dtypes, shapes and bytes of all arrays."""
        digest = hashlib.sha256()
        for name, leaf in sorted(self.leaves.items()):
            digest.update(f"{name} {leaf.dtype} {leaf.shape} ".encode())
            digest.update(np.ascontiguousarray(leaf).tobytes())
        return digest.hexdigest()


class SyntheticLm(IndexedPipeline):
    """A synthetic language in which most tokens are the previous token plus 1.

    A token t is followed by t + 1 (modulo the vocabulary size) with probability 7/8, and by a
    random token with probability 1/8. The loss of a perfect model is about
    0.38 + ln(vocab_size) / 8, and the loss of uniform guesses is ln(vocab_size).

    Args:
        vocab_size: Number of distinct tokens.
        batch_size: Number of rows in the global batch.
        seq_len: Number of tokens per row.
        seed: Seed of the random tokens.
        num_batches: Number of batches in one pass; None for endless training batches.
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
        # Each row has its own random stream, so that a host draws only the rows it needs.
        streams = range(first + rows.start, first + rows.stop)
        bits = np.array([random_bits(self.seed, row, length) for row in streams], np.uint64)
        bits = bits.reshape(count, length)  # np.array([]) has the wrong rank if count is 0.
        # A run of consecutive tokens starts where the low bits are 0, with probability 1/8.
        times = np.arange(length)
        is_new = (bits & np.uint64(7) == 0) | (times == 0)
        # The time at which the run of each token starts.
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
