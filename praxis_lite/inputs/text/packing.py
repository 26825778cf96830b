"""Assigns documents to rows: index arithmetic, without text.

A document of n ids has n - 1 labels, in one row or, as pieces, in several.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

TooLong = Literal["split", "refuse", "drop", "cut"]
WINDOW = 64  # Open rows.


class Packing(NamedTuple):
    """The pieces of documents, row after row.

    Attributes:
      starts: int64[rows + 1]: the number of the first piece of each row.
      documents: int64[pieces]: the document of each piece.
      firsts, counts: int32[pieces]: the first label in the document, and the number of labels.
    """

    starts: np.ndarray
    documents: np.ndarray
    firsts: np.ndarray
    counts: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.starts) - 1


def unpacked(counts: Sequence[int], row_length: int) -> Packing:
    """Returns a row for each document, or for each of its pieces of at most row_length labels."""
    documents, firsts, sizes = _pieces(np.asarray(counts, np.int64), row_length)
    return Packing(np.arange(len(documents) + 1), documents, firsts, sizes)


def first_fit(counts: Sequence[int], row_length: int, window: int) -> Packing:
    """Packs documents in their order, each into the first open row with room.

    First fit with a bounded number of open rows (Johnson 1974; Csirik and Johnson 2001): if
    `window` rows are open and none has room, the oldest is closed. A document longer than a row is
    split into pieces of a row each, and a rest.

    Args:
      counts: labels of each document.
    """
    documents, firsts, sizes = _pieces(np.asarray(counts, np.int64), row_length)
    row_of = np.empty(len(sizes), np.int64)
    rows: list[int] = []  # Open rows, oldest first,
    room: list[int] = []  # and the free labels of each.
    num_rows = 0
    for number, size in enumerate(sizes.tolist()):
        k = next((k for k, free in enumerate(room) if free >= size), None)
        if k is None:
            if len(rows) == window:
                del rows[0], room[0]
            k = len(rows)
            rows.append(num_rows)
            room.append(row_length)
            num_rows += 1
        row_of[number] = rows[k]
        room[k] -= size
        if not room[k]:
            del rows[k], room[k]
    order = np.argsort(row_of, kind="stable")
    starts = np.searchsorted(row_of[order], np.arange(num_rows + 1))
    return Packing(starts, documents[order], firsts[order], sizes[order])


def without_gaps(counts: Sequence[int], row_length: int) -> Packing:
    """Packs documents in sequence, split where a row ends; only the last row has room left.

    The first label of a row is still predicted from the token before it, which is a label of the
    row before.
    """
    ends = np.cumsum(np.asarray(counts, np.int64))
    total = int(ends[-1]) if len(ends) else 0
    row_ends = np.arange(row_length, total + row_length, row_length).clip(max=total)
    # A piece begins where a document or a row begins.
    stops = np.union1d(ends, row_ends)
    begins = np.concatenate([[0], stops[:-1]]).astype(np.int64)
    documents = np.searchsorted(ends, begins, side="right")
    firsts = begins - np.concatenate([[0], ends])[documents]
    starts = np.searchsorted(begins, np.arange(len(row_ends) + 1) * row_length)
    return Packing(starts, documents, firsts.astype(np.int32), (stops - begins).astype(np.int32))


def _pieces(counts: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the document, the first label and the count of pieces of at most row_length."""
    num_pieces = -(-counts // row_length)
    documents = np.repeat(np.arange(len(counts)), num_pieces)
    before = np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    firsts = (np.arange(len(documents)) - before) * row_length
    sizes = np.minimum(counts[documents] - firsts, row_length)
    return documents, firsts.astype(np.int32), sizes.astype(np.int32)
