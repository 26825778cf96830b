"""Assigns a source to each row in a mixture, with row counts within one of the exact shares.

This is the P-fair scheduler of Baruah, Cohen, Plaxton and Varvel (1996), extended to shares that
change. Skip the extension on a first read: it is all in `_Phase`.

A position is the index of a row in the mixture. The target of a source at a position is the sum of
its shares at all earlier positions, which is usually a fraction. Row j of a source is released once
the target exceeds j. Its deadline is the first position at which the target reaches j + 1; the row
must be scheduled before this position. The scheduler picks the released row with the earliest
deadline. The invariant is that the number of rows scheduled from each source differs from the
source's target by less than one.

A row that is released before the shares change can have its deadline after the change. The order
just before a change therefore depends on the shares after the change. A schedule without this
look-ahead cannot satisfy the invariant: after two of four equal sources have contributed one row
each, the shares may change so that only the other two sources remain, and both of their rows are
then late.

Between two changes, the order is periodic except near the changes; the period is the common
denominator of the shares. The schedule is stored as periodic segments, in which the source of any
row and the number of rows before it can be looked up.
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

# The longest supported period. Computing the order for this period takes 1 s and 2 MB. The period
# is long enough for 1,000 sources whose weights have three decimals each.
MAX_PERIOD = 1_000_000
# Approximate sum of rounded parts, before division by their greatest common divisor.
_ROUNDED_SUM = 10_000
_BLOCK = 4096  # Number of rows between two stored counts.


def exact_parts(weights: Sequence[float]) -> tuple[int, ...] | None:
    """Returns the smallest integers that are proportional to the weights.

    The decimal representation of a weight is exact: 0.7 and 0.3 become 7 and 3.

    Args:
      weights: Non-negative numbers that are not all 0.

    Returns:
      One integer for each weight, or None if the sum of the integers would exceed MAX_PERIOD.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    denominator = math.lcm(*(fraction.denominator for fraction in exact))
    counts = [int(fraction * denominator) for fraction in exact]
    divisor = math.gcd(*counts)
    parts = tuple(count // divisor for count in counts)
    return parts if sum(parts) <= MAX_PERIOD else None


def rounded_parts(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns integers that are approximately proportional to the weights.

    Use this for measured weights, such as rows per token, which have no small common denominator.

    Args:
      weights: Non-negative numbers that are not all 0.

    Returns:
      One integer for each weight. It is at least 1 if the weight is above 0.
    """
    shares = np.array(weights, float) / sum(weights) * _ROUNDED_SUM
    parts = np.floor(shares).astype(int)
    num_missing = _ROUNDED_SUM - parts.sum()
    # Round up the parts with the largest remainders.
    parts[np.argsort(parts - shares, kind="stable")[:num_missing]] += 1
    parts[(np.array(weights) > 0) & (parts == 0)] = 1
    return tuple(int(part) for part in parts // np.gcd.reduce(parts))


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """A periodic part of the schedule.

    Attributes:
      start: First position.
      stop: First position after the segment; infinity for the last segment.
      order: int16[period], the sources at positions start, start + 1, ..., which then repeat.
      counts_at_start: int64[sources], the number of rows from each source before `start`.
    """

    start: int
    stop: int | float
    order: np.ndarray
    counts_at_start: np.ndarray

    def counts_before(self, position: int) -> np.ndarray:
        """Returns the number of rows from each source before a position in the segment."""
        num_periods, rest = divmod(position - self.start, len(self.order))
        block = rest // _BLOCK
        in_block = np.bincount(
            self.order[block * _BLOCK : rest], minlength=len(self.counts_at_start)
        )
        in_periods = num_periods * self._block_counts[-1]
        return self.counts_at_start + in_periods + self._block_counts[block] + in_block

    @functools.cached_property
    def _block_counts(self) -> np.ndarray:
        """int64[blocks + 1, sources]: rows from each source in a period before each block.

        The last entry contains the counts for the entire period.
        """
        blocks = [
            np.bincount(self.order[start : start + _BLOCK], minlength=len(self.counts_at_start))
            for start in range(0, len(self.order), _BLOCK)
        ]
        return np.cumsum([np.zeros_like(self.counts_at_start), *blocks], axis=0)


class Schedule:
    """Assigns a source to each row of an endless stream.

    Args:
      phases: Pairs (position, parts) with increasing positions, starting at 0. From that position
        on, a source's share is its part divided by the sum of all parts.
    """

    def __init__(self, phases: Sequence[tuple[int, Sequence[int]]]) -> None:
        targets = [_Target(phases, source) for source in range(len(phases[0][1]))]
        self.segments: list[Segment] = []
        # The number of rows of each source before the segment.
        counts = np.zeros(len(targets), np.int64)
        for number in range(len(phases)):
            phase = _Phase(phases, number, targets)
            for start, stop, period in phase.segments():
                segment = Segment(start, stop, phase.order(start, period, counts), counts)
                self.segments.append(segment)
                if stop < math.inf:
                    counts = segment.counts_before(int(stop))

    def counts_before(self, position: int) -> np.ndarray:
        """Returns the number of rows from each source before a position, as int64[sources]."""
        return self.segments[self._segment_at(position)].counts_before(position)

    def sources_at(self, first: int, count: int) -> np.ndarray:
        """Returns the sources at positions first, ..., first + count - 1, as int16[count]."""
        sources, position, stop = [np.empty(0, np.int16)], first, first + count
        while position < stop:
            segment = self.segments[self._segment_at(position)]
            segment_stop = int(min(stop, segment.stop))
            offsets = np.arange(position, segment_stop) - segment.start
            sources.append(segment.order[offsets % len(segment.order)])
            position = segment_stop
        return np.concatenate(sources)

    def position_of(self, source: int, row: int) -> int | None:
        """Returns the position of row `row` of a source, or None if the row is never scheduled."""
        # The last segment before which the source has had at most `row` rows.
        number = (
            bisect.bisect_right(
                self.segments, row, key=lambda segment: segment.counts_at_start[source]
            )
            - 1
        )
        segment = self.segments[number]
        in_period = np.flatnonzero(segment.order == source)
        if len(in_period) == 0:
            return None
        num_periods, rest = divmod(row - int(segment.counts_at_start[source]), len(in_period))
        return segment.start + num_periods * len(segment.order) + int(in_period[rest])

    def _segment_at(self, position: int) -> int:
        return bisect.bisect_right(self.segments, position, key=lambda segment: segment.start) - 1


class _Target:
    """The target of one source, a piecewise linear function of the position."""

    def __init__(self, phases: Sequence[tuple[int, Sequence[int]]], source: int) -> None:
        self._phases, self._source = phases, source
        # The target at the start of each phase is the sum of its rises in all phases before.
        rises = (
            Fraction(parts[source] * (end - start), sum(parts))
            for (start, parts), (end, _) in pairwise(phases)
        )
        self.at_starts = list(accumulate(rises, initial=Fraction(0)))

    def first_position_at(self, goal: int) -> int | float:
        """Returns the first position at which the target is at least `goal`, or infinity."""
        # The phase in which the target reaches `goal`.
        number = max(0, bisect.bisect_left(self.at_starts, goal) - 1)
        start, parts = self._phases[number]
        if parts[self._source] == 0:
            return math.inf
        # In this phase, the target rises by a constant amount per position.
        rise = goal - self.at_starts[number]
        return start + math.ceil(rise * sum(parts) / parts[self._source])


class _Phase:
    """The schedule between two changes to the shares."""

    def __init__(
        self, phases: Sequence[tuple[int, Sequence[int]]], number: int, targets: Sequence[_Target]
    ) -> None:
        is_last = number + 1 == len(phases)
        self._start, self._parts = phases[number]
        self._end: int | float = math.inf if is_last else phases[number + 1][0]
        self._period = sum(self._parts)
        self._at_start = [target.at_starts[number] for target in targets]
        self._at_end = (
            self._at_start if is_last else [target.at_starts[number + 1] for target in targets]
        )
        # For each source, the deadline of the row that is released in this phase but due later.
        self._deadlines_after_end = [
            target.first_position_at(math.ceil(at_end))
            for target, at_end in zip(targets, self._at_end, strict=True)
        ]

    def segments(self) -> list[tuple[int, int | float, int]]:
        """Returns (start, stop, period) of up to three periodic segments.

        The order repeats every period except near both ends of the phase:

        * At the start, the order differs until the deadlines of rows that were released in the
          previous phase and are still unscheduled. If the source of such a row has no share in this
          phase, the row fills a position at which no other row is released, within the first period
          or never.
        * At the end, the order differs starting at the release of the first row whose deadline is
          after the end.
        """
        start, end, period = self._start, self._end, self._period
        segments: list[tuple[int, int | float, int]]
        pairs = zip(self._at_start, self._parts, strict=True)
        has_paused_row = any(target.denominator > 1 and part == 0 for target, part in pairs)
        first = start + (period if has_paused_row else self._max_delay(self._at_start))
        last = end if end == math.inf else end - self._max_delay(self._at_end)
        if last - first <= period:
            return [(start, end, int(end - start))]
        segments = [(start, first, first - start), (first, last, period)]
        if last < end:
            segments.append((int(last), end, int(end - last)))
        return [segment for segment in segments if segment[0] < segment[1]]

    def _max_delay(self, targets: Sequence[Fraction]) -> int:
        """Returns the longest delay from release to deadline, for rows with fractional targets."""
        pairs = zip(targets, self._parts, strict=True)
        return max(
            (-(-self._period // part) for target, part in pairs if target.denominator > 1 and part),
            default=0,
        )

    def order(self, first: int, count: int, counts: np.ndarray) -> np.ndarray:
        """Returns the sources at positions first, ..., first + count - 1, as int16[count].

        Args:
          first: First position.
          count: Number of positions.
          counts: Number of rows from each source before position `first`.
        """
        period, parts, rows = self._period, self._parts, counts.tolist()
        # The target at position n is (offset + part * n) / period.
        offsets = [
            target * period - part * self._start
            for target, part in zip(self._at_start, parts, strict=True)
        ]
        lower, upper = list(map(math.floor, offsets)), list(map(math.ceil, offsets))
        # Heaps of (release position, source) and (deadline, source). The next row of each source is
        # in at most one of them; later rows are in neither.
        unreleased, released = [], []
        for source, part in enumerate(parts):
            if part:
                unreleased.append(((rows[source] * period - upper[source]) // part, source))
            # The source has no share in this phase, but is still owed a row.
            elif rows[source] < self._at_start[source]:
                released.append((self._deadlines_after_end[source], source))
        heapq.heapify(unreleased)
        heapq.heapify(released)
        order = np.empty(count, np.int16)
        for index in range(count):
            while unreleased and unreleased[0][0] <= first + index:
                _, source = heapq.heappop(unreleased)
                deadline = -((lower[source] - (rows[source] + 1) * period) // parts[source])
                # The row is due in a later phase, whose shares determine its deadline.
                if deadline > self._end:
                    deadline = self._deadlines_after_end[source]
                heapq.heappush(released, (deadline, source))
            _, source = heapq.heappop(released)
            order[index] = source
            rows[source] += 1
            if part := parts[source]:
                release = (rows[source] * period - upper[source]) // part
                heapq.heappush(unreleased, (release, source))
        return order
