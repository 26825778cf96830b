"""Buckets of row lengths, so that few batch shapes are compiled."""

import sys
from collections.abc import Iterator, Sequence

__all__ = ("all_length_classes", "batches_by_length", "length_class")

SHORTEST = 32


def length_class(length: int, longest: int) -> int:
    """Returns the length to pad a row to: a power of two, between `SHORTEST` and `longest`."""
    return min(max(SHORTEST, 1 << (length - 1).bit_length()), longest)


def all_length_classes(longest: int) -> tuple[int, ...]:
    """Returns all values of `length_class` up to `longest`."""
    lengths, length = [], SHORTEST
    while length < longest:
        lengths.append(length)
        length *= 2
    return (*lengths, longest)


def length_of_prompts(longest: int, num_new: int, num_positions: int | None) -> int:
    """Returns the length to pad a batch of prompts to: a `length_class` with room for new tokens.

    Args:
      longest: the length of the longest prompt.
      num_new: the number of new tokens.
      num_positions: of the model; None: unlimited.
    """
    room = sys.maxsize if num_positions is None else num_positions - num_new
    return length_class(longest, max(longest, room))


def batches_by_length(
    lengths: Sequence[int], num_rows: int, longest: int
) -> Iterator[tuple[list[int], int]]:
    """Yields the indices of the rows of each batch, longest rows first, and their padded length.

    So the first batch needs the most memory, and rows of a batch have similar lengths.

    Args:
      lengths: of all rows.
      num_rows: per batch, except the last.
      longest: the maximal length of a row.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    for first in range(0, len(order), num_rows):
        indices = order[first : first + num_rows]
        yield indices, length_class(lengths[indices[0]], longest)
