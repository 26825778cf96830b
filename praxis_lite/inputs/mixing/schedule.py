"""Schedules the source of each row of a mixture, within one row of the exact shares at any place.

The target of a source at a place is the sum of its shares at all earlier places. Row j of the
source may be drawn once the target exceeds j, and has its deadline at the first place where the
target is at least j + 1: it must be drawn before. Of the rows that may be drawn, the one with the
earliest deadline is drawn. This keeps every source within one row of its target at every place: the
P-fair schedule of Baruah, Cohen, Plaxton and Varvel (1996), here with shares that may change.

A row that may be drawn before a change can have its deadline after it. So the last rows before a
change depend on the shares after it. No order without this look-ahead stays within one row: after
two of four equal sources have given a row each, the other two may get all of the share.

Between changes the order repeats after as many rows as the shares' common denominator, except for
some rows next to the changes. It is stored in pieces, so that counts at any place are looked up.
"""

import bisect
import dataclasses
import functools
import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

import numpy as np

# The longest period of the order: a second and 2 MB. The weights of 1,000 sources with three
# decimals need no more.
MOST_PARTS = 1_000_000
_BLOCK = 4096  # Rows between two stored counts.


def parts_of(weights: Sequence[float]) -> tuple[int, ...] | None:
    """Returns integers with the ratios of the weights, or None if their sum exceeds MOST_PARTS.

    0.7 and 0.3 become 7 and 3: the decimal representation counts, not the binary float.

    Args:
      weights: from 0 on, and at least one above.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    denominator = math.lcm(*(fraction.denominator for fraction in exact))
    counts = [int(fraction * denominator) for fraction in exact]
    divisor = math.gcd(*counts)
    parts = tuple(count // divisor for count in counts)
    return parts if sum(parts) <= MOST_PARTS else None


def rounded_parts(weights: Sequence[float], total: int = 10_000) -> tuple[int, ...]:
    """Returns integers that add up to `total`, nearest to the ratios of weights, from 1 on.

    For measured weights, such as rows per token, which have no small denominator.
    """
    shares = np.array(weights, float) / sum(weights) * total
    parts = np.floor(shares).astype(int)
    left = total - parts.sum()
    parts[np.argsort(parts - shares, kind="stable")[:left]] += 1
    parts[(np.array(weights) > 0) & (parts == 0)] = 1
    return tuple(int(part) for part in parts // np.gcd.reduce(parts))


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """A periodic order of sources from place `start` to place `stop`."""

    start: int
    stop: int | float  # Infinity in the last piece.
    order: np.ndarray  # int16.
    before: np.ndarray  # int64[sources]: rows of each source before the start.

    def counts_before(self, place: int) -> np.ndarray:
        """Returns int64[sources]: rows of each source before a place from start to stop."""
        turns, rest = divmod(place - self.start, len(self.order))
        block = rest // _BLOCK
        in_rest = np.bincount(self.order[block * _BLOCK : rest], minlength=len(self.before))
        return self.before + turns * self._counts[-1] + self._counts[block] + in_rest

    @functools.cached_property
    def _counts(self) -> np.ndarray:
        """int64[blocks + 1, sources]: rows of each source before each block, and in a period."""
        blocks = [
            np.bincount(self.order[start : start + _BLOCK], minlength=len(self.before))
            for start in range(0, len(self.order), _BLOCK)
        ]
        return np.cumsum([np.zeros_like(self.before), *blocks], axis=0)


class Schedule:
    """The source of each row of an endless stream whose shares may change.

    Args:
      phases: pairs (place, parts) in order, the first place 0. From the place on, the share of a
        source is its part of the sum of the parts.
    """

    def __init__(self, phases: Sequence[tuple[int, Sequence[int]]]) -> None:
        targets = [_Target(phases, source) for source in range(len(phases[0][1]))]
        self.pieces: list[Piece] = []
        given = np.zeros(len(targets), np.int64)
        for number in range(len(phases)):
            phase = _Phase(phases, number, targets)
            for start, stop, period in phase.pieces():
                piece = Piece(start, stop, phase.order(start, period, given), given)
                self.pieces.append(piece)
                if stop < math.inf:
                    given = piece.counts_before(stop)

    def counts_before(self, place: int) -> np.ndarray:
        """Returns int64[sources]: rows of each source before a place."""
        return self.pieces[self._piece_at(place)].counts_before(place)

    def sources_at(self, first: int, count: int) -> np.ndarray:
        """Returns int16[count]: the source at places first, first + 1, ..."""
        sources, place, stop = [np.empty(0, np.int16)], first, first + count
        while place < stop:
            piece = self.pieces[self._piece_at(place)]
            until = int(min(stop, piece.stop))
            sources.append(piece.order[(np.arange(place, until) - piece.start) % len(piece.order)])
            place = until
        return np.concatenate(sources)

    def place_of(self, source: int, row: int) -> int | None:
        """Returns the place of a source's row (counted from 0), or None if it is never drawn."""
        number = bisect.bisect_right(self.pieces, row, key=lambda piece: piece.before[source]) - 1
        piece = self.pieces[number]
        in_period = np.flatnonzero(piece.order == source)
        if len(in_period) == 0:
            return None
        turns, rest = divmod(row - int(piece.before[source]), len(in_period))
        return piece.start + turns * len(piece.order) + int(in_period[rest])

    def _piece_at(self, place: int) -> int:
        return bisect.bisect_right(self.pieces, place, key=lambda piece: piece.start) - 1


class _Target:
    """The exact number of rows of a source before each place: linear in each phase."""

    def __init__(self, phases: Sequence[tuple[int, Sequence[int]]], source: int) -> None:
        self._phases, self._source = phases, source
        rises = (
            Fraction(parts[source] * (end - start), sum(parts))
            for (start, parts), (end, _) in pairwise(phases)
        )
        self.at_starts = list(accumulate(rises, initial=Fraction(0)))

    def place_reaching(self, goal: int) -> int | float:
        """Returns the first place where the target is at least `goal`, or infinity."""
        number = max(0, bisect.bisect_left(self.at_starts, goal) - 1)
        start, parts = self._phases[number]
        if parts[self._source] == 0:
            return math.inf
        rise = goal - self.at_starts[number]
        return start + math.ceil(rise * sum(parts) / parts[self._source])


class _Phase:
    """The places between two changes of shares."""

    def __init__(
        self, phases: Sequence[tuple[int, Sequence[int]]], number: int, targets: Sequence[_Target]
    ) -> None:
        is_last = number + 1 == len(phases)
        self._start, self._parts = phases[number]
        self._end = math.inf if is_last else phases[number + 1][0]
        self._turn = sum(self._parts)
        self._at_start = [target.at_starts[number] for target in targets]
        self._at_end = (
            self._at_start if is_last else [target.at_starts[number + 1] for target in targets]
        )
        # The deadlines of rows that are partly owed at the end.
        self._late_deadlines = [
            target.place_reaching(math.ceil(at_end))
            for target, at_end in zip(targets, self._at_end, strict=True)
        ]

    def pieces(self) -> list[tuple[int, int | float, int]]:
        """Returns (start, stop, period) of up to three pieces with a periodic order.

        The order of one period repeats, except at both ends of the phase. At the start it differs
        until the deadlines of rows that were partly owed there. If the source of such a row has no
        share now, the row is drawn where no other may be: in the first period or never. At the end
        it differs once rows may be drawn that will be partly owed, because their deadlines are
        after the end.
        """
        start, end, turn = self._start, self._end, self._turn
        owed = zip(self._at_start, self._parts, strict=True)
        is_paused = any(target.denominator > 1 and part == 0 for target, part in owed)
        first = start + (turn if is_paused else self._longest_owed(self._at_start))
        last = end if end == math.inf else end - self._longest_owed(self._at_end)
        if last - first <= turn:
            return [(start, end, end - start)]
        three = [(start, first, first - start), (first, last, turn), (last, end, end - last)]
        return [piece for piece in three if piece[0] < piece[1]]

    def _longest_owed(self, targets: Sequence[Fraction]) -> int:
        """Returns an upper bound of the places until rows that are partly owed are drawn."""
        owed = zip(targets, self._parts, strict=True)
        return max(
            (-(-self._turn // part) for target, part in owed if target.denominator > 1 and part),
            default=0,
        )

    def order(self, first: int, count: int, given: np.ndarray) -> np.ndarray:
        """Returns int16[count]: the sources at places first, first + 1, ...

        Args:
          given: the rows of each source before place `first`.
        """
        turn, parts, rows = self._turn, self._parts, given.tolist()
        # The target at place n is (offset + part * n) / turn.
        offsets = [
            target * turn - part * self._start
            for target, part in zip(self._at_start, parts, strict=True)
        ]
        lower, upper = list(map(math.floor, offsets)), list(map(math.ceil, offsets))
        waiting, ready = [], []
        for source, part in enumerate(parts):
            if part:
                waiting.append(((rows[source] * turn - upper[source]) // part, source))
            elif rows[source] < self._at_start[source]:
                ready.append((self._late_deadlines[source], source))
        heapq.heapify(waiting)
        heapq.heapify(ready)
        order = np.empty(count, np.int16)
        for index in range(count):
            while waiting and waiting[0][0] <= first + index:
                _, source = heapq.heappop(waiting)
                deadline = -((lower[source] - (rows[source] + 1) * turn) // parts[source])
                if deadline > self._end:
                    deadline = self._late_deadlines[source]
                heapq.heappush(ready, (deadline, source))
            _, source = heapq.heappop(ready)
            order[index] = source
            rows[source] += 1
            if part := parts[source]:
                heapq.heappush(waiting, ((rows[source] * turn - upper[source]) // part, source))
        return order
