"""Sequences of any length as rows of one length."""

import bisect
from collections.abc import Sequence


def packed(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Returns which sequences share a row: the longest first, each where it fits best.

    Best-fit decreasing (Johnson et al. 1974): at most 11/9 of the fewest rows, and six more.

    Args:
      lengths: each at most row_length.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (what is free, row), sorted.
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect.bisect_left(room, (lengths[index], -1))
        if place < len(room):
            free, row = room.pop(place)
            rows[row].append(index)
        else:
            free, row = row_length, len(rows)
            rows.append([index])
        bisect.insort(room, (free - lengths[index], row))
    return rows
