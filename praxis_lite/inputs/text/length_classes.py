"""Rows of many lengths in batches of few shapes, so that few programs are compiled."""

import sys
from collections.abc import Iterator, Sequence

SHORTEST = 32


def length_class(length: int, longest: int) -> int:
    """Returns the length to pad a row to: a power of two from `SHORTEST` on, at most `longest`."""
    return min(max(SHORTEST, 1 << (length - 1).bit_length()), longest)


def all_length_classes(longest: int) -> tuple[int, ...]:
    """Returns each `length_class` of rows of at most `longest`."""
    lengths, length = [], SHORTEST
    while length < longest:
        lengths.append(length)
        length *= 2
    return (*lengths, longest)


def length_of_prompts(longest: int, num_new: int, num_positions: int | None) -> int:
    """Returns the length to pad a batch of prompts to: a `length_class` that leaves room.

    Args:
      longest: the length of the longest prompt.
      num_new: the tokens that may follow.
      num_positions: of the model; None: they have no end.
    """
    room = sys.maxsize if num_positions is None else num_positions - num_new
    return length_class(longest, max(longest, room))


def batches_by_length(
    lengths: Sequence[int], num_rows: int, longest: int
) -> Iterator[tuple[list[int], int]]:
    """Yields the places of the rows of each batch, the longest rows first, and their class.

    A lack of memory shows in the first batch, and a batch has rows of nearly the same length.

    Args:
      lengths: of all rows.
      num_rows: of a batch, of which only the last has fewer.
      longest: the most that a row may have.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    for first in range(0, len(order), num_rows):
        places = order[first : first + num_rows]
        yield places, length_class(lengths[places[0]], longest)
