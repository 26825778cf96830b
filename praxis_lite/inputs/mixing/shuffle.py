"""Computes the order of examples in an endless shuffled stream from a seed and a position.

The order is derived from Philox's raw bits, which are the same in every version of NumPy. The
results of `Generator.permutation` may change between versions, and upgrading NumPy in the middle of
a run must not change the order.
"""

import functools

import numpy as np

# Values of `purpose` in `random_bits`.
_ORDER_OF_FILES, _ORDER_IN_WINDOW = 2, 3


def random_bits(seed: int, stream: int, count: int, *, purpose: int = 0) -> np.ndarray:
    """Returns random bits as uint64[count], independent for each (seed, stream, purpose)."""
    key = np.array([seed, stream], np.uint64)
    # `purpose` is the counter's top word, so two purposes overlap only after 2**192 draws.
    counter = np.array([0, 0, 0, purpose], np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


@functools.lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, size: int) -> np.ndarray:
    """Returns a random permutation of range(size) for one epoch."""
    order = np.argsort(random_bits(seed, epoch, size), kind="stable")
    order.setflags(write=False)  # The cache returns the same array to all callers.
    return order


def shuffled(seed: int, size: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the epoch and example index at positions first, ..., first + count - 1 of a stream.

    Each epoch contains all `size` examples once, in a different order.

    Returns:
      (epochs, examples), both int64[count].
    """
    positions = np.arange(first, first + count, dtype=np.int64)
    epochs = positions // size
    examples = np.empty_like(positions)
    for epoch in np.unique(epochs):
        is_in_epoch = epochs == epoch
        order = epoch_order(seed, int(epoch), size)
        examples[is_in_epoch] = order[positions[is_in_epoch] % size]
    return epochs, examples


def window_order(seed: int, window: int, size: int) -> np.ndarray:
    """Returns a random permutation of range(size) for window number `window`."""
    return np.argsort(random_bits(seed, window, size, purpose=_ORDER_IN_WINDOW), kind="stable")


class WindowedOrder:
    """The order of an endless stream that is shuffled within windows of consecutive examples.

    In each epoch, the files are in a new order. Their examples, in this order, are split into
    windows, and each window is shuffled. Windows are numbered across epochs.

    Args:
      seed: Seed of the order.
      first_of_files: int64[files + 1], the index of each file's first example, then the number of
        examples. There must be at least one example.
      window: Number of examples in a window; the last window of an epoch may have fewer.
    """

    def __init__(self, seed: int, first_of_files: np.ndarray, window: int):
        self._seed, self._first_of_files, self._window = seed, first_of_files, window
        self._size = int(first_of_files[-1])
        self._windows_per_epoch = -(-self._size // window)
        # A batch usually uses one or two windows, and `FromSource` also prefetches the next one.
        self.examples_of_window = functools.lru_cache(maxsize=3)(self._examples_of_window)

    def window_of(self, position: int) -> int:
        """Returns the number of the window that contains a position of the stream."""
        epoch, offset = divmod(position, self._size)
        return epoch * self._windows_per_epoch + offset // self._window

    def _examples_of_window(self, number: int) -> np.ndarray:
        """Returns the shuffled example indices in window number `number`."""
        epoch, window = divmod(number, self._windows_per_epoch)
        file_bits = random_bits(
            self._seed, epoch, len(self._first_of_files) - 1, purpose=_ORDER_OF_FILES
        )
        files = np.argsort(file_bits, kind="stable")
        # The position in the epoch at which each file ends, in the order of `files`.
        ends = np.cumsum(np.diff(self._first_of_files)[files])
        start = window * self._window
        positions = np.arange(start, min(start + self._window, self._size), dtype=np.int64)
        ordinals = np.searchsorted(ends, positions, side="right")
        # The distance to the end of the file is the same in the epoch and in the source.
        examples = self._first_of_files[files[ordinals] + 1] - (ends[ordinals] - positions)
        return examples[window_order(self._seed, number, len(examples))]

    def examples(self, first: int, count: int) -> np.ndarray:
        """Returns the example indices at positions first, ..., first + count - 1, as int64."""
        parts, position = [np.empty(0, np.int64)], first
        while position < first + count:
            start = position % self._size % self._window
            window = self.examples_of_window(self.window_of(position))
            part = window[start : start + first + count - position]
            parts.append(part)
            position += len(part)
        return np.concatenate(parts)


def examples_at(size: int, first: int, count: int, *, seed: int, shuffle: bool) -> np.ndarray:
    """Returns the example indices at positions first, ..., first + count - 1 of a stream.

    Args:
      size: Number of examples in the dataset.
      first: First position in the stream.
      count: Number of positions.
      seed: Seed of the shuffled order.
      shuffle: True for an endless stream that is reshuffled every epoch; False for one pass in
        order.

    Returns:
      int64 array of at most `count` indices; shorter where a pass in order ends.
    """
    if shuffle:
        return shuffled(seed, size, first, count)[1]
    return np.arange(first, max(first, min(first + count, size)))
