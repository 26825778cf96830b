"""Which documents share a row: against a plain restatement, and by what always holds."""

import numpy as np
import pytest

from praxis_lite.inputs.text.packing import first_fit, unpacked, without_gaps

T = 50


def counts_of(seed, longest=130, size=300):
    return np.random.default_rng(seed).integers(1, longest, size)


def rows_of(packing):
    """Returns, for each row, its pieces as (document, first label, labels)."""
    pieces = list(zip(*(x.tolist() for x in packing[1:]), strict=True))
    starts = packing.starts.tolist()
    return [pieces[a:b] for a, b in zip(starts, starts[1:], strict=False)]


def require_all_labels_once(rows, counts):
    actual = sorted((d, k) for row in rows for d, first, n in row for k in range(first, first + n))
    assert actual == [(d, k) for d, count in enumerate(counts) for k in range(count)]
    assert max(sum(n for _, _, n in row) for row in rows) <= T


@pytest.mark.parametrize("window", [1, 3, 64])
@pytest.mark.parametrize("seed", range(3))
def test_first_fit_puts_each_piece_into_the_first_open_row_with_room(window, seed):
    counts = counts_of(seed)
    rows = rows_of(first_fit(counts, T, window))
    require_all_labels_once(rows, counts)
    expected, open_rows = [], []
    for document, count in enumerate(counts.tolist()):
        for first in range(0, count, T):
            n = min(T, count - first)
            fits = [row for row in open_rows if sum(p[2] for p in row) + n <= T]
            if not fits:
                open_rows = open_rows[-(window - 1) :] if window > 1 else []
                open_rows.append([])
                expected.append(open_rows[-1])
                fits = open_rows[-1:]
            fits[0].append((document, first, n))
            open_rows = [row for row in open_rows if sum(p[2] for p in row) < T]
    assert rows == expected


def test_more_rows_that_wait_fill_rows_better():
    counts = counts_of(7, longest=T, size=2000)
    fill = [counts.sum() / T / first_fit(counts, T, window).num_rows for window in (1, 4, 64)]
    assert fill[0] < fill[1] < fill[2] and fill[2] > 0.95


@pytest.mark.parametrize("seed", range(3))
def test_without_gaps_only_the_last_row_has_room(seed):
    counts = counts_of(seed)
    rows = rows_of(without_gaps(counts, T))
    require_all_labels_once(rows, counts)
    stream = [(d, k) for d, count in enumerate(counts) for k in range(count)]
    laid = [[(d, k) for d, first, n in row for k in range(first, first + n)] for row in rows]
    assert laid == [stream[k : k + T] for k in range(0, len(stream), T)]


def test_unpacked_has_a_row_for_each_piece():
    counts = [1, 50, 51, 120]
    assert rows_of(unpacked(counts, T)) == [
        [(0, 0, 1)],
        [(1, 0, 50)],
        [(2, 0, 50)],
        [(2, 50, 1)],
        [(3, 0, 50)],
        [(3, 50, 50)],
        [(3, 100, 20)],
    ]


@pytest.mark.parametrize(
    "pack", [lambda c: first_fit(c, T, 4), lambda c: without_gaps(c, T), lambda c: unpacked(c, T)]
)
def test_no_documents_make_no_rows(pack):
    assert pack([]).num_rows == 0
