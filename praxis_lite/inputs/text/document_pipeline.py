"""Base class of pipelines over tokenized documents, whose rows may be grouped by length."""

import abc
import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from praxis_lite.core.errors import require
from praxis_lite.inputs.base import ExamplePipeline
from praxis_lite.inputs.text.buckets import Buckets
from praxis_lite.inputs.text.documents import Documents

if TYPE_CHECKING:
    import jax


class DocumentPipeline(ExamplePipeline):
    """Base class of pipelines over tokenized documents, with one example per row.

    Attributes:
      documents: The tokenized documents.
      split: Split of the documents, 'train' or 'heldout'.
      seq_len: Number of labels per row, T, or the maximum with `bucket_lengths`.
      bucket_lengths: Lengths below seq_len, in increasing order, such as (128, 256). If not empty,
        each row is padded to the smallest sufficient length among these and seq_len, and a batch
        contains rows of one length. A batch of rows of length T has `batch_size * (seq_len // T)`
        rows. Each length is a shape for which the steps are compiled.
    """

    documents: Documents
    split: str
    seq_len: int
    bucket_lengths: Sequence[int]

    @abc.abstractmethod
    def row_lengths(self) -> np.ndarray:
        """Returns the number of labels in each row."""

    @abc.abstractmethod
    def spec_of_shape(self, num_rows: int, length: int) -> "dict[str, jax.ShapeDtypeStruct]":
        """Returns the spec of a batch of rows that are padded to a length."""

    def check(self) -> None:
        super().check()
        self.require_at_least(1, "seq_len")
        lengths = self.bucket_lengths
        is_list = isinstance(lengths, Sequence) and all(isinstance(x, int) for x in lengths)
        require(
            is_list and sorted({0, *lengths, self.seq_len}) == [0, *lengths, self.seq_len],
            f"{type(self).__name__}.bucket_lengths",
            lengths,
            f"a list of increasing lengths above 0 and below seq_len={self.seq_len}",
        )

    @functools.cached_property
    def buckets(self) -> Buckets | None:
        """The assignment of rows to batches by length; None without `bucket_lengths`."""
        if not self.bucket_lengths:
            return None
        lengths = (*self.bucket_lengths, self.seq_len)
        batch_sizes = tuple(map(self._num_rows_of_length, lengths))
        row_lengths = self.row_lengths()
        buckets = Buckets(lengths, batch_sizes, row_lengths)
        shapes = ", ".join(
            f"{number:,} of {batch_size:,} x {length:,}"
            for number, batch_size, length in zip(
                buckets.batches_per_bucket, batch_sizes, lengths, strict=True
            )
        )
        _log.info(
            "%s, %s: %s batches in each epoch (%s), %.1f%% full",
            self.documents.source.location,
            self.split,
            f"{buckets.num_batches:,}",
            shapes,
            100 * int(row_lengths.sum(dtype=np.int64)) / buckets.num_positions,
        )
        return buckets

    def _num_rows_of_length(self, length: int) -> int:
        return self.batch_size * (self.seq_len // length)

    def _bucket_and_rows(self, index: int) -> tuple[int, np.ndarray]:
        assert self.buckets is not None, "bucket_lengths is not empty."
        return self.buckets.batch(index, self.seed if self.shuffle else None)

    def length_of_batch(self, index: int) -> int:
        """Returns the length to which the rows of the global batch `index` are padded."""
        if self.buckets is None:
            return self.seq_len
        return self.buckets.lengths[self._bucket_and_rows(index)[0]]

    @property
    def num_batches(self) -> int | None:
        if self.shuffle or self.buckets is None:
            return super().num_batches
        return self.buckets.num_batches

    def num_rows(self, index: int) -> int:
        if self.buckets is None:
            return self.batch_size
        return self.buckets.batch_sizes[self._bucket_and_rows(index)[0]]

    def example_indices(self, index: int, rows: slice) -> np.ndarray:
        if self.buckets is None:
            return super().example_indices(index, rows)
        return self._bucket_and_rows(index)[1][rows]

    def element_spec(self) -> "dict[str, jax.ShapeDtypeStruct]":
        return self.spec_of_shape(self.batch_size, self.seq_len)

    def element_specs(self) -> "tuple[dict[str, jax.ShapeDtypeStruct], ...]":
        lengths = (self.seq_len, *reversed(self.bucket_lengths))
        return tuple(self.spec_of_shape(self._num_rows_of_length(x), x) for x in lengths)

    def largest_id(self) -> int:
        return self.documents.largest_id()[0]

    def place_of_largest_id(self) -> str:
        return self.documents.largest_id()[1]


_log = logging.getLogger(__name__)
