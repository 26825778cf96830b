"""The schedule of a mixture: the source of each row against exact fractions."""

import hashlib
from fractions import Fraction

import numpy as np
import pytest

from praxis_lite.inputs.mixing.schedule import Schedule, exact_parts, rounded_parts


@pytest.mark.parametrize("seed", range(12))
def test_every_beginning_is_within_one_row_of_its_shares(seed):
    rng = np.random.default_rng(seed)
    most = int(rng.choice([3, 20, 300]))
    parts = tuple(map(int, rng.integers(0, most, rng.integers(1, 9)))) + (1,)
    schedule = Schedule([(0, parts)])
    assert_within_one_row(schedule, [(0, parts)], 0, sum(parts))
    assert schedule.counts_before(sum(parts)).tolist() == list(parts)


@pytest.mark.parametrize("num_sources", [200, pytest.param(997, marks=pytest.mark.slow)])
def test_many_sources_with_weights_of_three_decimals_are_exact(num_sources):
    weights = np.random.default_rng(num_sources).integers(1, 1000, num_sources) / 1000
    parts = exact_parts(weights.tolist())
    thousandths = [round(1000 * weight) for weight in weights]
    exact = [Fraction(number, sum(thousandths)) for number in thousandths]
    assert [Fraction(part, sum(parts)) for part in parts] == exact
    schedule, turn = Schedule([(0, parts)]), sum(parts)
    order = schedule.sources_at(0, turn)
    for place in (0, 1, 4095, 4096, 4097, turn // 2, turn - 1, turn, turn + 4101, 7 * turn - 1):
        given = schedule.counts_before(place)
        by_hand = place // turn * np.array(parts) + np.bincount(
            order[: place % turn], minlength=num_sources
        )
        assert given.tolist() == by_hand.tolist()
        assert max(abs(a - b * place) for a, b in zip(given.tolist(), exact, strict=True)) < 1


def target(phases, source, place):
    """The rows that a source should have given before a place, exactly."""
    ends = [*(start for start, _ in phases[1:]), place]
    return sum(
        Fraction(max(0, min(end, place) - start) * parts[source], sum(parts))
        for (start, parts), end in zip(phases, ends, strict=True)
    )


def assert_within_one_row(schedule, phases, first, count):
    """Counts rows one by one from a place on, against the targets."""
    given = schedule.counts_before(first).tolist()
    for place, source in enumerate(schedule.sources_at(first, count).tolist(), start=first):
        given[source] += 1
        targets = [target(phases, item, place + 1) for item in range(len(given))]
        assert all(abs(a - b) < 1 for a, b in zip(given, targets, strict=True)), place
    assert schedule.counts_before(first + count).tolist() == given


def random_phases(rng, num_phases, most_turns):
    """Shares of two to seven sources, some 0, and lengths from one place to many turns."""
    phases, place, num_sources = [], 0, int(rng.integers(2, 8))
    for _ in range(num_phases):
        most = int(rng.choice([2, 5, 30]))
        parts = rng.integers(0, most, num_sources) * rng.integers(0, 2, num_sources)
        parts[rng.integers(num_sources)] += 1
        phases.append((place, tuple(map(int, parts // np.gcd.reduce(parts)))))
        place += int(rng.choice([rng.integers(1, 9), rng.integers(1, most_turns * sum(parts) + 2)]))
    return phases


@pytest.mark.parametrize("seed", range(25))
def test_every_beginning_is_within_one_row_however_often_shares_change(seed):
    rng = np.random.default_rng(seed)
    phases = random_phases(rng, num_phases=int(rng.integers(2, 7)), most_turns=6)
    schedule = Schedule(phases)
    count = phases[-1][0] + 3 * sum(phases[-1][1]) + 5
    assert_within_one_row(schedule, phases, 0, count)
    sources, first = schedule.sources_at(0, count), int(rng.integers(count))
    assert schedule.sources_at(first, count - first).tolist() == sources[first:].tolist()
    for source, part in enumerate(phases[-1][1]):
        places = np.flatnonzero(sources == source).tolist()
        assert [schedule.position_of(source, row) for row in range(len(places))] == places
        if part == 0:
            assert schedule.position_of(source, len(places)) is None


def test_the_order_before_a_change_fits_the_shares_after_it():
    # The last two sources come before the change, as both are due one place after it.
    schedule = Schedule([(0, (1, 1, 1, 1)), (2, (0, 0, 1, 1))])
    assert schedule.sources_at(0, 3).tolist() == [2, 3, 0]
    # With equal shares after it, too, the order is as if there were no change.
    same = Schedule([(0, (1, 1, 1, 1)), (2, (2, 2, 2, 2)), (7, (1, 1, 1, 1))])
    assert same.sources_at(0, 12).tolist() == [0, 1, 2, 3] * 3


@pytest.mark.parametrize("seed", range(10))
def test_phases_of_many_turns_are_counted_and_not_walked(seed):
    rng = np.random.default_rng(seed)
    phases, far = random_phases(rng, num_phases=4, most_turns=6), 10**10 + 7
    phases = [(place + far * number, parts) for number, (place, parts) in enumerate(phases)]
    schedule = Schedule(phases)
    for start, parts in phases[1:]:
        for first in (start - far // 2, start - sum(parts), start, start + far // 2):
            assert_within_one_row(schedule, phases, first, 2 * sum(parts))
    result = sum(len(segment.order) for segment in schedule.segments)
    assert result <= 3 * sum(sum(parts) for _, parts in phases)


def test_the_order_of_shares_that_never_change_stays_what_it_was():
    digest = hashlib.sha256()
    for part in range(1, 30):
        schedule = Schedule([(0, (part, 7 * part % 13, 0, 31 - part, 5))])
        digest.update(schedule.sources_at(1000, 100).astype("<i2").tobytes())
    assert digest.hexdigest() == "78241b5f480cc4ac084b6a2fcacfdcd74e72483228d6960d33ff24546ae6a19b"


def test_weights_are_what_they_are_written_as():
    assert exact_parts([0.7, 0.3]) == (7, 3)
    assert exact_parts([2, 0, 4]) == (1, 0, 2)
    assert exact_parts([0.12345678, 0.3]) is None
    assert rounded_parts([1, 2, 0]) == (3333, 6667, 0)
    assert rounded_parts([1e-9, 1]) == (1, 10_000)
