"""Pipelines that need NumPy alone: windows of text, arrays in memory, a synthetic language."""

import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from praxis_lite.errors import ConfigError
from praxis_lite.inputs.base import IndexedPipeline, lm_spec, spec_of
from praxis_lite.inputs.leaves import narrow, with_weights
from praxis_lite.inputs.shuffle import random_bits, shuffled
from praxis_lite.inputs.text import TextCorpus
from praxis_lite.inputs.windows import EvaluationWindows, TrainingWindows

if TYPE_CHECKING:
    import jax


class TextWindows(IndexedPipeline):
    """Windows of a corpus for a language model: `ids`, `labels` (the next tokens), `weights`.

    Args:
        split: 'train' or 'heldout' of the corpus.
        shuffle: True for endless training batches, whose grid of windows and order are redrawn
            every epoch; False for one pass in order, in which every label counts exactly once.
        stride: for one pass: how far a window moves on. Below seq_len (the default) windows
            overlap, and all but the last `stride` labels are context with weight 0.
    """

    def __init__(
        self,
        corpus: TextCorpus,
        split: str,
        batch_size: int,
        seq_len: int,
        seed: int = 0,
        *,
        shuffle: bool,
        stride: int | None = None,
    ):
        self.corpus = corpus
        self.split = split
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.seed = seed
        self.shuffle = shuffle
        self.stride = stride

    def check(self) -> None:
        super().check()
        self.require_at_least(1, "seq_len")
        self.require_at_least(0, "seed")
        if self.stride is not None:
            self.require_at_least(1, "stride")
            if self.shuffle or self.stride > self.seq_len:
                raise ConfigError(
                    f"TextWindows: stride is {self.stride} with seq_len {self.seq_len} and shuffle "
                    f"{self.shuffle}; a stride is for shuffle=False and at most seq_len, or some "
                    f"labels would be left out. Lower it, or set it to None."
                )
        num_labels = len(self.corpus.tokens(self.split)) - 1
        if self.shuffle and self.seq_len > num_labels:
            raise ConfigError(
                f"TextWindows: seq_len is {self.seq_len}, but the {self.split!r} split has only "
                f"{num_labels} tokens to predict. Lower seq_len or give more text."
            )

    @functools.cached_property
    def index(self) -> TrainingWindows | EvaluationWindows:
        """Where in the stream each window lies."""
        num_labels = len(self.corpus.tokens(self.split)) - 1
        if self.shuffle:
            return TrainingWindows(num_labels, self.seq_len, self.seed)
        return EvaluationWindows(num_labels, self.seq_len, self.stride or self.seq_len)

    @functools.cached_property
    def stream(self) -> np.ndarray:
        """The split's tokens and, at `filler_position`, a zero."""
        return np.append(self.corpus.tokens(self.split), np.int32(0))

    @property
    def num_batches(self) -> int | None:
        if isinstance(self.index, TrainingWindows):
            return None
        return -(-self.index.num_windows // self.batch_size)

    def element_spec(self) -> "dict[str, jax.ShapeDtypeStruct]":
        return lm_spec(self.batch_size, self.seq_len)

    def baselines(self) -> dict[str, float]:
        return {"gzip_bits_per_byte": self.corpus.gzip_bits_per_byte(self.split)}

    def window_rows(self, index: int, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """Returns the positions in `stream` and the weights of rows of batch `index`."""
        return self.index.windows(index * self.batch_size + rows.start, rows.stop - rows.start)

    def rows(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        positions, weights = self.window_rows(index, rows)
        tokens = self.stream[positions]
        return {"ids": tokens[:, :-1], "labels": tokens[:, 1:], "weights": weights}

    def fingerprint(self) -> dict[str, Any]:
        # One for both homes of the class: their batches are the same bits.
        return {
            "pipeline": self.class_name(),
            "corpus": self.corpus.fingerprint(),
            "split": self.split,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "stride": self.stride,
        }


class InMemory(IndexedPipeline):
    """Rows of arrays that share their first dimension.

    Without a `weights` array one of ones is added, of the shape of `labels` where there is one
    (a weight per label), else one per row. 64-bit numbers become 32-bit, as JAX would make them.

    Args:
        arrays: the leaves by name, or a callable that returns them, called when first needed.
        shuffle: True for endless batches in an order redrawn every epoch; False for one pass.
    """

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray] | Callable[[], Mapping[str, np.ndarray]],
        batch_size: int,
        seed: int = 0,
        *,
        shuffle: bool,
    ):
        self.arrays = arrays
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle

    def check(self) -> None:
        super().check()
        self.require_at_least(0, "seed")
        _ = self.leaves

    @functools.cached_property
    def leaves(self) -> dict[str, np.ndarray]:
        """The arrays with their weights. Raises ConfigError where the leaves disagree."""
        given = self.arrays() if callable(self.arrays) else self.arrays
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"InMemory: the arrays are a {type(given).__name__}; wanted is a dict of arrays by "
                "name, such as {'ids': ..., 'labels': ...}."
            )
        leaves = {}
        for name, leaf in given.items():
            if not isinstance(name, str):
                raise ConfigError(f"InMemory: the array {name!r} has no name; wanted is a str.")
            try:
                leaves[name] = narrow("InMemory", name, np.asarray(leaf))
            except ValueError as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(f"InMemory: the array {name!r} is none: {error}") from None
        num_rows = {len(leaf) if leaf.ndim else None for leaf in leaves.values()}
        if len(num_rows) != 1 or num_rows & {None, 0}:
            shapes = ", ".join(f"{name} {leaf.shape}" for name, leaf in leaves.items())
            raise ConfigError(
                f"InMemory: the arrays are {shapes or 'none at all'}; all must have the same "
                f"first dimension, 1 or more: the number of examples. Change the arrays."
            )
        return with_weights(leaves)

    @property
    def num_examples(self) -> int:
        return len(self.leaves["weights"])

    @property
    def num_batches(self) -> int | None:
        return None if self.shuffle else -(-self.num_examples // self.batch_size)

    def element_spec(self) -> "dict[str, jax.ShapeDtypeStruct]":
        return spec_of(**{
            name: ((self.batch_size, *leaf.shape[1:]), leaf.dtype)
            for name, leaf in self.leaves.items()
        })

    def rows(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        first, count = index * self.batch_size + rows.start, rows.stop - rows.start
        if self.shuffle:
            _, examples = shuffled(self.seed, self.num_examples, first, count)
            return {name: leaf[examples] for name, leaf in self.leaves.items()}
        batch = {}
        for name, leaf in self.leaves.items():
            there = leaf[first : first + count]
            batch[name] = np.zeros((count, *leaf.shape[1:]), leaf.dtype)
            batch[name][: len(there)] = there
        return batch

    def fingerprint(self) -> dict[str, Any]:
        return {
            "pipeline": self.class_name(),
            "sha256": self._sha256,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    @functools.cached_property
    def _sha256(self) -> str:
        digest = hashlib.sha256()
        for name, leaf in sorted(self.leaves.items()):
            digest.update(f"{name} {leaf.dtype} {leaf.shape} ".encode())
            digest.update(np.ascontiguousarray(leaf).tobytes())
        return digest.hexdigest()


class SyntheticLm(IndexedPipeline):
    """A made-up language without a file: runs that count upwards, modulo the vocabulary.

    After each token comes its successor with probability 7/8, and a token drawn anew with 1/8. A
    model that has learnt it has a loss of about 0.38 + ln(vocab_size) / 8, chance ln(vocab_size).

    Args:
        num_batches: None for endless training batches; a number for one pass of that many.
    """

    def __init__(
        self,
        vocab_size: int,
        batch_size: int,
        seq_len: int,
        seed: int = 0,
        num_batches: int | None = None,
    ):
        self.vocab_size = vocab_size
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.seed = seed
        self._num_batches = num_batches

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
        # Each row has random bits of its own: a host draws only what it needs.
        bits = np.empty((count, length), np.uint64)
        for row in range(count):
            bits[row] = random_bits(self.seed, first + rows.start + row, length)
        times = np.arange(length)
        is_new = (bits & np.uint64(7) == 0) | (times == 0)
        run_start = np.maximum.accumulate(np.where(is_new, times, 0), axis=1)
        drawn = (bits >> np.uint64(3)) % np.uint64(self.vocab_size)
        token_at_start = np.take_along_axis(drawn, run_start, axis=1).astype(np.int64)
        tokens = ((token_at_start + times - run_start) % self.vocab_size).astype(np.int32)
        weights = np.ones((count, self.seq_len), np.float32)
        return {"ids": tokens[:, :-1], "labels": tokens[:, 1:], "weights": weights}

    def fingerprint(self) -> dict[str, Any]:
        return {
            "pipeline": self.class_name(),
            "vocab_size": self.vocab_size,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "num_batches": self.num_batches,
        }
