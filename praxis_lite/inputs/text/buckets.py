"""Groups rows of similar lengths into batches of a few shapes, as an alternative to packing."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from praxis_lite.inputs.mixing.shuffle import epoch_order


class EpochBatches(NamedTuple):
    """The rows of each batch in an epoch.

    Attributes:
      buckets: int64[batches], the bucket of each batch.
      starts: int64[batches + 1], the index in `rows` of each batch's first row, followed by the
        number of rows.
      rows: int64[rows], the rows in the order in which they are used.
    """

    buckets: np.ndarray
    starts: np.ndarray
    rows: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Buckets:
    """Assigns rows to batches in which all rows are padded to the same length.

    Each epoch contains every row once, and has the same number of batches. A row belongs to the
    shortest bucket that is long enough, and the rows of a bucket form batches in the epoch's order.
    Rows that do not fill a batch move to the next longer bucket, so at most one batch per epoch is
    incomplete; it is in the longest bucket. Batches are ordered by their last row: a batch is
    emitted once all of its rows have been read, as in tf.data's `bucket_by_sequence_length`.

    Args:
      lengths: Length of each bucket, in increasing order.
      batch_sizes: Number of rows in a batch of each bucket.
      row_lengths: Length of each row, at most lengths[-1].
    """

    lengths: Sequence[int]
    batch_sizes: Sequence[int]
    row_lengths: np.ndarray

    @functools.cached_property
    def bucket_of_row(self) -> np.ndarray:
        """The bucket of each row, int64[rows]."""
        return np.searchsorted(self.lengths, self.row_lengths)

    @functools.cached_property
    def batches_per_bucket(self) -> tuple[int, ...]:
        """The number of batches of each bucket in an epoch."""
        row_counts = np.bincount(self.bucket_of_row, minlength=len(self.lengths)).tolist()
        batch_counts, num_left = [], 0
        for num_rows, batch_size in zip(row_counts, self.batch_sizes, strict=True):
            num_batches, num_left = divmod(num_rows + num_left, batch_size)
            batch_counts.append(num_batches)
        batch_counts[-1] += num_left > 0
        return tuple(batch_counts)

    @property
    def num_batches(self) -> int:
        """The number of batches in an epoch."""
        return sum(self.batches_per_bucket)

    @property
    def num_positions(self) -> int:
        """The number of tokens in the batches of an epoch, including padding."""
        shapes = zip(self.batches_per_bucket, self.batch_sizes, self.lengths, strict=True)
        return sum(num_batches * batch_size * length for num_batches, batch_size, length in shapes)

    def batch(self, index: int, seed: int | None) -> tuple[int, np.ndarray]:
        """Returns the bucket of a batch, and the indices of its rows.

        Args:
          index: Index of the batch, counted over all epochs.
          seed: Seed of the shuffled order of rows, which differs between epochs; None for the given
            order.
        """
        epoch, position = divmod(index, self.num_batches)
        batches = _epoch_batches(self, seed, epoch if seed is not None else 0)
        start, stop = batches.starts[position : position + 2]
        return int(batches.buckets[position]), batches.rows[start:stop]

    def epoch_batches(self, order: np.ndarray) -> EpochBatches:
        """Returns the batches of an epoch in which the rows are read in the given order."""
        buckets, batches, left = self.bucket_of_row[order], [], np.empty(0, np.int64)
        for bucket, (num_batches, batch_size) in enumerate(
            zip(self.batches_per_bucket, self.batch_sizes, strict=True)
        ):
            # Positions in `order`: the rows of this bucket, then rows left from shorter buckets.
            positions = np.concatenate([np.flatnonzero(buckets == bucket), left])
            edges = [batch_size * (k + 1) for k in range(num_batches)]
            *full, left = np.split(positions, edges)
            batches += [(positions.max(), bucket, positions) for positions in full]
        batches.sort(key=lambda batch: batch[0])
        sizes = [len(positions) for _, _, positions in batches]
        return EpochBatches(
            np.array([bucket for _, bucket, _ in batches]),
            np.cumsum([0, *sizes]),
            order[np.concatenate([positions for _, _, positions in batches])],
        )


@functools.lru_cache(maxsize=4)
def _epoch_batches(buckets: Buckets, seed: int | None, epoch: int) -> EpochBatches:
    num_rows = len(buckets.row_lengths)
    order = np.arange(num_rows) if seed is None else epoch_order(seed, epoch, num_rows)
    return buckets.epoch_batches(order)
