"""Which source each row of a mixture is from, so that every beginning of it is as was asked for.

Row j of a source with share w may be drawn at places floor((j - 1) / w) to ceil(j / w) - 1 of the
mixture. The earliest of those whose time has come goes first, which keeps every source within one
row of its share at every place: the P-fair schedule of Baruah, Cohen, Plaxton and Varvel (1996).
The order repeats itself after as many rows as the shares' common denominator, so that counts at any
place are looked up and not added up.
"""

import functools
import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

MOST_PARTS = 20_000  # Rows after which the order repeats itself, at most; it is made in 0.1 s.


def parts_of(weights: Sequence[float]) -> tuple[int, ...] | None:
    """Returns weights as whole numbers with the same ratios, or None if they add up to too much.

    0.7 and 0.3 are 7 and 3: a number is what it is written as, and not the float next to it.

    Args:
      weights: none below 0, one above.
    """
    exact = [Fraction(repr(one)) for one in weights]
    whole = math.lcm(*(one.denominator for one in exact))
    counts = [int(one * whole) for one in exact]
    divisor = math.gcd(*counts)
    parts = tuple(one // divisor for one in counts)
    return parts if sum(parts) <= MOST_PARTS else None


@functools.lru_cache(maxsize=16)
def order_of(parts: tuple[int, ...]) -> np.ndarray:
    """Returns int16[sum(parts)]: the source at each place, until the order repeats itself."""
    total = sum(parts)
    waiting = [(0, source) for source, part in enumerate(parts) if part]
    ready: list[tuple[int, int]] = []
    drawn, order = [0] * len(parts), np.empty(total, np.int16)
    for place in range(total):
        while waiting and waiting[0][0] <= place:
            _, source = heapq.heappop(waiting)
            deadline = -(-(drawn[source] + 1) * total // parts[source])
            heapq.heappush(ready, (deadline, source))
        _, source = heapq.heappop(ready)
        order[place] = source
        drawn[source] += 1
        if drawn[source] < parts[source]:
            heapq.heappush(waiting, (drawn[source] * total // parts[source], source))
    order.setflags(write=False)  # It is shared by every caller.
    return order


@functools.lru_cache(maxsize=16)
def counts_of(parts: tuple[int, ...]) -> np.ndarray:
    """Returns int64[sum(parts) + 1, sources]: the rows of each source before a place."""
    is_source = order_of(parts)[:, None] == np.arange(len(parts))
    counts = np.zeros((len(is_source) + 1, len(parts)), np.int64)
    np.cumsum(is_source, axis=0, out=counts[1:])
    counts.setflags(write=False)
    return counts


def counts_before(parts: tuple[int, ...], place: int) -> np.ndarray:
    """Returns int64[sources]: how many rows of each source stand before a place, however far."""
    turns, rest = divmod(place, sum(parts))
    return turns * np.array(parts, np.int64) + counts_of(parts)[rest]


def sources_at(parts: tuple[int, ...], first: int, count: int) -> np.ndarray:
    """Returns int16[count]: the source at places first, first + 1, ..."""
    return order_of(parts)[(first + np.arange(count)) % sum(parts)]


def place_of(parts: tuple[int, ...], source: int, row: int) -> int:
    """Returns the place at which a source's row (counted from 0) is drawn."""
    turns, rest = divmod(row, parts[source])
    return turns * sum(parts) + int(np.flatnonzero(order_of(parts) == source)[rest])


def rounded_parts(weights: Sequence[float], total: int = 10_000) -> tuple[int, ...]:
    """Returns whole numbers that add up to `total`, nearest to the ratios of weights, none of 0.

    For weights that are measured, such as rows per token, and have no small denominator.
    """
    shares = np.array(weights, float) / sum(weights) * total
    parts = np.floor(shares).astype(int)
    left = total - parts.sum()
    parts[np.argsort(parts - shares, kind="stable")[:left]] += 1
    parts[(np.array(weights) > 0) & (parts == 0)] = 1
    return tuple(int(one) for one in parts // np.gcd.reduce(parts))
