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

    Each epoch contains every row once. A row belongs to the bucket with the smallest sufficient
    length, and a bucket's rows form batches in the order of the epoch. The rows that do not fill a
    batch move to the next longer bucket, so only one batch, of the longest bucket, may have fewer
    rows. Batches are sorted by their last row: a batch follows as soon as all of its rows have been
    read, as in tf.data's `bucket_by_sequence_length`.

    The number of batches is the same in every epoch.

    Args:
      lengths: Length of each bucket, in increasing order.
      batch_sizes: Number of rows in a batch of each bucket.
      row_lengths: Length of each row, at most the last of `lengths`.
    """

    lengths: Sequence[int]
    batch_sizes: Sequence[int]
    row_lengths: np.ndarray

    @functools.cached_property
    def bucket_of_row(self) -> np.ndarray:
        """int64[rows]: the bucket of each row."""
        return np.searchsorted(self.lengths, self.row_lengths)

    @functools.cached_property
    def batches_per_bucket(self) -> tuple[int, ...]:
        """The number of batches of each bucket in an epoch."""
        counts, left, numbers = np.bincount(self.bucket_of_row, minlength=len(self.lengths)), 0, []
        for count, batch_size in zip(counts.tolist(), self.batch_sizes, strict=True):
            number, left = divmod(count + left, batch_size)
            numbers.append(number)
        numbers[-1] += left > 0
        return tuple(numbers)

    @property
    def num_batches(self) -> int:
        """The number of batches in an epoch."""
        return sum(self.batches_per_bucket)

    @property
    def num_positions(self) -> int:
        """The number of tokens in the batches of an epoch, including padding."""
        shapes = zip(self.batches_per_bucket, self.batch_sizes, self.lengths, strict=True)
        return sum(number * batch_size * length for number, batch_size, length in shapes)

    def batch(self, index: int, seed: int | None) -> tuple[int, np.ndarray]:
        """Returns a batch's bucket and rows; one batch of each epoch may have fewer rows.

        Args:
          index: Index of the batch, across epochs.
          seed: Seed of the order of rows, which differs between epochs; None for their given order.
        """
        epoch, number = divmod(index, self.num_batches)
        batches = _epoch_batches(self, seed, epoch if seed is not None else 0)
        start, stop = batches.starts[number : number + 2]
        return int(batches.buckets[number]), batches.rows[start:stop]

    def epoch_batches(self, order: np.ndarray) -> EpochBatches:
        """Returns the batches of an epoch, given its order of rows."""
        buckets, batches, left = self.bucket_of_row[order], [], np.empty(0, np.int64)
        for bucket, (number, batch_size) in enumerate(
            zip(self.batches_per_bucket, self.batch_sizes, strict=True)
        ):
            # Positions in `order`: the rows of this bucket, then those left by shorter buckets.
            positions = np.concatenate([np.flatnonzero(buckets == bucket), left])
            edges = [batch_size * (k + 1) for k in range(number)]
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
