"""Computes the order of examples in an endless shuffled stream from a seed and a position.

The order is derived from Philox's raw bits, which are the same in every version of NumPy. The
results of `Generator.permutation` may change between versions, and upgrading NumPy in the middle of
a run must not change the order.
"""

import functools

import numpy as np


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
