"""Computes which documents are packed into which rows, from their lengths alone.

A document with n ids has n - 1 labels, which are placed in a single row, or split into pieces that
are placed in several rows.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

TooLong = Literal["split", "refuse", "drop", "cut"]
WINDOW = 64  # Default of PackedText.window: the maximum number of incomplete rows.


class Packing(NamedTuple):
    """The pieces of documents in each row, sorted by row.

    Attributes:
      starts: int64[rows + 1], the index of each row's first piece, followed by the total number of
        pieces.
      documents: int64[pieces], the index of each piece's document.
      firsts: int32[pieces], the index of each piece's first label in its document.
      counts: int32[pieces], the number of labels in each piece.
    """

    starts: np.ndarray
    documents: np.ndarray
    firsts: np.ndarray
    counts: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.starts) - 1


def unpacked(counts: Sequence[int], row_length: int) -> Packing:
    """Places each document in a separate row, after splitting documents longer than row_length."""
    documents, firsts, sizes = _pieces(np.asarray(counts, np.int64), row_length)
    return Packing(np.arange(len(documents) + 1), documents, firsts, sizes)


def first_fit(counts: Sequence[int], row_length: int, window: int) -> Packing:
    """Packs documents in order, each into the first open row with enough room.

    This is first fit with a bounded number of open rows (Johnson 1974; Csirik and Johnson 2001): if
    `window` rows are open and none has room, the oldest row is closed. A document that is longer
    than a row is first split into pieces that each fill a row, and a remainder.

    Args:
      counts: Number of labels in each document.
      row_length: Number of labels in a row.
      window: Maximum number of open rows.
    """
    documents, firsts, sizes = _pieces(np.asarray(counts, np.int64), row_length)
    row_of = np.empty(len(sizes), np.int64)
    rows: list[int] = []  # Indices of the open rows, oldest first.
    room: list[int] = []  # Number of free labels in each open row.
    num_rows = 0
    # Place each piece, in order, into the oldest open row with enough room.
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
    # The pieces of a row need not be consecutive. Sort them by row.
    order = np.argsort(row_of, kind="stable")
    starts = np.searchsorted(row_of[order], np.arange(num_rows + 1))
    return Packing(starts, documents[order], firsts[order], sizes[order])


def without_gaps(counts: Sequence[int], row_length: int) -> Packing:
    """Concatenates documents and splits them at row boundaries, so only the last row may be short.

    When a document continues in the next row, that row's first label is still predicted from the
    token before it.
    """
    ends = np.cumsum(np.asarray(counts, np.int64))
    total = int(ends[-1]) if len(ends) else 0
    row_ends = np.arange(row_length, total + row_length, row_length).clip(max=total)
    # A piece ends where a document or a row ends.
    stops = np.union1d(ends, row_ends)
    begins = np.concatenate([[0], stops[:-1]]).astype(np.int64)
    documents = np.searchsorted(ends, begins, side="right")
    firsts = begins - np.concatenate([[0], ends])[documents]
    starts = np.searchsorted(begins, np.arange(len(row_ends) + 1) * row_length)
    return Packing(starts, documents, firsts.astype(np.int32), (stops - begins).astype(np.int32))


def _pieces(counts: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Splits documents, and returns the document, first label and size of each piece."""
    num_pieces = -(-counts // row_length)
    documents = np.repeat(np.arange(len(counts)), num_pieces)
    before = np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    firsts = (np.arange(len(documents)) - before) * row_length
    sizes = np.minimum(counts[documents] - firsts, row_length)
    return documents, firsts.astype(np.int32), sizes.astype(np.int32)
