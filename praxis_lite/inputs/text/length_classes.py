"""Pads rows to a few bucket lengths, to limit the number of compiled shapes."""

import sys
from collections.abc import Iterator, Sequence

__all__ = ("all_length_classes", "batches_by_length", "length_class")

SHORTEST = 32


def length_class(length: int, longest: int) -> int:
    """Returns the padded length of a row: a power of two between `SHORTEST` and `longest`."""
    return min(max(SHORTEST, 1 << (length - 1).bit_length()), longest)


def all_length_classes(longest: int) -> tuple[int, ...]:
    """Returns all values that `length_class` returns for rows up to `longest`."""
    lengths, length = [], SHORTEST
    while length < longest:
        lengths.append(length)
        length *= 2
    return (*lengths, longest)


def length_of_prompts(longest: int, num_new: int, num_positions: int | None) -> int:
    """Returns the padded length of a batch of prompts, which leaves room for new tokens.

    Args:
      longest: Length of the longest prompt.
      num_new: Number of new tokens.
      num_positions: Number of positions that the model supports; None if unlimited.
    """
    room = sys.maxsize if num_positions is None else num_positions - num_new
    return length_class(longest, max(longest, room))


def batches_by_length(
    lengths: Sequence[int], num_rows: int, longest: int
) -> Iterator[tuple[list[int], int]]:
    """Groups rows of similar lengths into batches, longest first.

    The first batch therefore needs the most memory; if there is not enough memory, the job fails
    immediately.

    Args:
      lengths: Length of each row.
      num_rows: Number of rows per batch; the last batch may have fewer.
      longest: Maximum length of a row.

    Yields:
      (indices of the batch's rows, padded length).
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    for first in range(0, len(order), num_rows):
        indices = order[first : first + num_rows]
        yield indices, length_class(lengths[indices[0]], longest)
