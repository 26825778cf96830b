"""Order of examples in an endless shuffled stream: a pure function of seed and place.

It uses only Philox's raw bits, whose stability NumPy guarantees, unlike `Generator.permutation`:
the order must survive an upgrade in the middle of a run.
"""

import functools

import numpy as np


def random_bits(seed: int, stream: int, count: int, *, purpose: int = 0) -> np.ndarray:
    """Returns uint64[count]; another seed, stream or purpose gives independent bits."""
    key = np.array([seed, stream], np.uint64)
    # The top word of the counter: streams of two purposes overlap only after 2**192 draws.
    counter = np.array([0, 0, 0, purpose], np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


@functools.lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, size: int) -> np.ndarray:
    """Returns the permutation of range(size) for an epoch."""
    order = np.argsort(random_bits(seed, epoch, size), kind="stable")
    order.setflags(write=False)  # All callers share it.
    return order


def shuffled(seed: int, size: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (epochs, examples), int64[count], at places first, first + 1, ... of the stream.

    Each epoch has every one of `size` examples once, in a different order.
    """
    places = np.arange(first, first + count, dtype=np.int64)
    epochs = places // size
    examples = np.empty_like(places)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        examples[here] = epoch_order(seed, int(epoch), size)[places[here] % size]
    return epochs, examples


def examples_at(
    size: int, first: int, count: int, *, seed: int, shuffle: bool
) -> np.ndarray:
    """Returns int64: the numbers of the examples at places first, first + 1, ... of a stream.

    Args:
      size: number of examples.
      shuffle: True: endless, each epoch in another order. False: one pass in order, which may have
        fewer than `count` left.
    """
    if shuffle:
        return shuffled(seed, size, first, count)[1]
    return np.arange(first, max(first, min(first + count, size)))
