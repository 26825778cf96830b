"""Which documents share a row: index arithmetic, no text.

A document of n ids has n - 1 labels, which lie in one row, or in several as pieces.
"""

import logging
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

TooLong = Literal["split", "refuse", "drop", "cut"]
WINDOW = 64  # Rows that wait for a document that fits.
_SECONDS_BETWEEN_LINES = 5.0


class Packing(NamedTuple):
    """The pieces of documents, row after row.

    Attributes:
      starts: int64[rows + 1]: the number of the first piece of each row.
      documents: int64[pieces]: of which of the documents each piece is.
      firsts, counts: int32[pieces]: the first label in the document, and how many follow.
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
    """Returns documents in rows, in their order, each in the first open row that has room.

    First fit with a bounded number of open rows (Johnson 1974; Csirik and Johnson 2001): where
    `window` rows are open and none has room, the oldest is closed. A longer document than a row is
    cut into pieces of a row each, and a rest.

    Args:
      counts: labels of each document, in the order in which they are packed.
    """
    documents, firsts, sizes = _pieces(np.asarray(counts, np.int64), row_length)
    row_of = np.empty(len(sizes), np.int64)
    rows: list[int] = []  # Open rows, oldest first,
    room: list[int] = []  # and what is free in each.
    num_rows, said_at = 0, time.monotonic()
    for number, size in enumerate(sizes.tolist()):
        place = next((k for k, free in enumerate(room) if free >= size), None)
        if place is None:
            if len(rows) == window:
                del rows[0], room[0]
            place = len(rows)
            rows.append(num_rows)
            room.append(row_length)
            num_rows += 1
        row_of[number] = rows[place]
        room[place] -= size
        if not room[place]:
            del rows[place], room[place]
        if not number % 65536 and time.monotonic() - said_at > _SECONDS_BETWEEN_LINES:
            _log.info("packing: %s of %s documents", f"{number:,}", f"{len(sizes):,}")
            said_at = time.monotonic()
    order = np.argsort(row_of, kind="stable")
    starts = np.searchsorted(row_of[order], np.arange(num_rows + 1))
    return Packing(starts, documents[order], firsts[order], sizes[order])


def without_gaps(counts: Sequence[int], row_length: int) -> Packing:
    """Returns documents in sequence, split where a row ends: only the last row has room left.

    A label that begins a row is still predicted from the token before it, which the row before has
    as a label.
    """
    ends = np.cumsum(np.asarray(counts, np.int64))
    total = int(ends[-1]) if len(ends) else 0
    row_ends = np.arange(row_length, total + row_length, row_length).clip(max=total)
    # A piece begins where a document does, or a row.
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


_log = logging.getLogger(__name__)
