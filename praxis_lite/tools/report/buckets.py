"""Fewer numbers that look the same: the mean, the lowest and the highest of neighbours."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Lines in groups of neighbours, few at the start of a run, where curves are steep.

    Attributes:
      starts: the first line of each bucket, of shape (number of buckets,).
      num_lines: of all buckets.
    """

    starts: np.ndarray
    num_lines: int

    @property
    def ends(self) -> np.ndarray:
        """The last line of each bucket."""
        return np.append(self.starts, self.num_lines)[1:] - 1

    @property
    def are_lines(self) -> bool:
        """True if each bucket has a single line."""
        return len(self.starts) == self.num_lines

    def means(self, values: np.ndarray) -> np.ndarray:
        """Returns the mean of each bucket's finite values, NaN if it has none."""
        is_finite = np.isfinite(values)
        counts = np.add.reduceat(is_finite, self.starts, dtype=float)
        with np.errstate(over="ignore"):  # A sum beyond all floats is infinite.
            sums = np.add.reduceat(np.where(is_finite, values, 0.0), self.starts)
        return np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)

    def lowest(self, values: np.ndarray) -> np.ndarray:
        """Returns the lowest value of each bucket, -inf too; NaN if all are NaN."""
        return np.fmin.reduceat(values, self.starts)

    def highest(self, values: np.ndarray) -> np.ndarray:
        """Returns the highest value of each bucket, inf too; NaN if all are NaN."""
        return np.fmax.reduceat(values, self.starts)


def buckets_of(num_lines: int, most: int) -> Buckets:
    """Returns at most so many buckets: three quarters of equal size, the others towards the start.

    Where there are no more lines than that, each is a bucket.
    """
    if num_lines <= most:
        return Buckets(np.arange(num_lines), num_lines)
    at_start = most // 4
    equal = np.linspace(0, num_lines, most - at_start, endpoint=False)
    growing = np.geomspace(1, num_lines, at_start, endpoint=False)
    return Buckets(np.unique(np.concatenate([equal, growing]).astype(np.int64)), num_lines)


def with_extremes(values: np.ndarray, most: int) -> np.ndarray:
    """Returns the indices, in order, of at most so many values: lowest and highest of neighbours.

    The last value is always among them.
    """
    if len(values) <= most:
        return np.arange(len(values))
    bounds = np.linspace(0, len(values), (most - 1) // 2 + 1).astype(np.int64)
    kept = {len(values) - 1}
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        part = values[start:end]
        if not np.isnan(part).all():
            kept |= {start + int(np.nanargmin(part)), start + int(np.nanargmax(part))}
    return np.array(sorted(kept))
