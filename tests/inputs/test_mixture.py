"""Mixtures: rows against the sources' own, any batch at once, weights that change."""

import hashlib

import numpy as np
import pytest

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs import InMemory, Mixture, SyntheticLm, WithWorkers
from praxis_lite.inputs.processes.stream_digest import stream_digest


def numbered(tens, length, *, batch_size=4, shuffle=False, **leaves):
    """A source whose row k has the number tens + k."""
    x = np.arange(tens, tens + length, dtype=np.int32)
    return InMemory({"x": x, **leaves}, batch_size, shuffle=shuffle)


def xs(mixture, num_batches, start=0):
    batches = mixture.batches(start)
    return np.concatenate([next(batches)["x"] for _ in range(num_batches)]).tolist()


def test_rows_come_in_their_sources_order_whatever_the_sources_batches_are():
    mixture = Mixture(
        {"a": numbered(0, 7, batch_size=3), "b": numbered(100, 5, batch_size=8)},
        {"a": 0.75, "b": 0.25},
        4,
    )
    actual = xs(mixture, 6)
    assert [x for x in actual if x < 100] == [k % 7 for k in range(18)]
    assert [x for x in actual if x >= 100] == [100 + k % 5 for k in range(6)]
    # From any batch on, and any rows of it.
    assert xs(mixture, 3, start=3) == actual[12:]
    part = next(mixture.batches(2, rows=slice(1, 3)))["x"].tolist()
    assert part == actual[9:11]
    assert mixture.sources_of(0, 24).tolist() == [int(x >= 100) for x in actual]


def test_an_endless_source_goes_on_from_epoch_to_epoch():
    source = numbered(0, 6, shuffle=True)
    mixture = Mixture({"a": source, "b": numbered(100, 5)}, {"a": 1, "b": 1}, 4)
    local = source.batches()
    expected = np.concatenate([next(local)["x"] for _ in range(4)]).tolist()
    assert [x for x in xs(mixture, 8) if x < 100] == expected


def test_weights_change_at_a_batch():
    mixture = Mixture(
        {"a": numbered(0, 50), "b": numbered(100, 50)},
        [(0, {"a": 1, "b": 0}), (2, {"a": 1, "b": 3}), (4, {"a": 0, "b": 1})],
        4,
    )
    actual = xs(mixture, 6)
    assert actual[:8] == list(range(8))
    assert sum(x < 100 for x in actual[8:16]) == 2
    assert actual[16:] == list(range(106, 114))
    assert xs(mixture, 2, start=3) == actual[12:20]
    whole = mixture.rows(1, slice(0, 4)), mixture.rows(2, slice(0, 4))
    assert np.concatenate([item["x"] for item in whole]).tolist() == actual[4:12]


def test_shares_of_a_row_are_carried_over_changes_of_weights():
    sources = {"a": numbered(0, 50), "b": numbered(100, 50), "c": numbered(200, 50)}
    thirds = dict.fromkeys("abc", 1)
    # Changes to the same weights change nothing, though a batch has 4/3 rows of each source.
    same = Mixture(sources, [(index, thirds) for index in range(12)], 4)
    assert xs(same, 12) == xs(Mixture(sources, thirds, 4), 12)
    changes = [(index, thirds | {"b": 1 + index % 2}) for index in range(12)]
    mixture = Mixture(sources, changes, 4)
    given = xs(mixture, 12)
    # Six batches of 4/3 rows of "a", and six of 1.
    assert [x for x in given if x < 100] == list(range(14))
    assert xs(mixture, 3, start=7) == given[28:40]


def test_a_source_may_give_a_row_that_it_is_owed_when_its_weight_is_0():
    def made(length, **settings):
        sources = {name: numbered(100, 9, shuffle=True) for name in "bcd"}
        sources = {"a": numbered(0, length)} | sources
        weights = [(0, dict.fromkeys("abcd", 1)), (3, {"a": 0, "b": 0, "c": 1, "d": 1})]
        return Mixture(sources, weights, 2, **settings)

    # At place 6 all are owed half a row; "c" and "d" come before the change, as both are due at 7.
    assert made(2).sources_of(4, 6).tolist() == [2, 3, 0, 2, 3, 2]
    assert made(1, stop="first").num_batches == 3
    assert made(2, stop="first").num_batches is None


def test_it_stops_with_the_first_source_that_ends():
    sources = {"a": numbered(0, 7, batch_size=3), "b": numbered(100, 40)}
    mixture = Mixture(sources, {"a": 1, "b": 1}, 4, stop="first")
    order = mixture.sources_of(0, 40).tolist()
    end = [n for n, source in enumerate(order) if source == 0][7]
    assert mixture.num_batches == -(-end // 4)
    batches = list(mixture.batches())
    assert len(batches) == mixture.num_batches
    weights = np.concatenate([batch["weights"] for batch in batches])
    assert weights.tolist() == [1.0] * end + [0.0] * (len(weights) - end)
    x = np.concatenate([item["x"] for item in batches])[:end]
    assert sorted(x[x < 100].tolist()) == list(range(7))
    # It ends in the second stretch.
    later = Mixture(sources, [(0, {"a": 0, "b": 1}), (3, {"a": 1, "b": 0})], 4, stop="first")
    assert later.num_batches == 5 and xs(later, 5)[12:19] == list(range(7))


def test_tokens_are_shared_where_rows_differ_in_length():
    long = {"weights": np.ones((40, 30), np.float32)}
    short = {"weights": np.pad(np.ones((40, 10), np.float32), ((0, 0), (0, 20)))}
    mixture = Mixture(
        {"long": numbered(0, 40, **long), "short": numbered(100, 40, **short)},
        {"long": 0.5, "short": 0.5},
        16,
        unit="tokens",
    )
    batches = mixture.batches()
    tokens = {"long": 0.0, "short": 0.0}
    for _ in range(50):
        batch = next(batches)
        counted = batch["weights"].sum(axis=1)
        tokens["long"] += counted[batch["x"] < 100].sum()
        tokens["short"] += counted[batch["x"] >= 100].sum()
    assert tokens["long"] == pytest.approx(tokens["short"], rel=0.01)


class Measured(InMemory):
    def tokens_per_row(self):
        return self.mean


def test_a_source_may_say_how_many_tokens_its_rows_have():
    # The first rows, which would be counted, are shorter than the others.
    weights = np.pad(np.ones((3000, 2), np.float32), ((0, 0), (0, 6)))
    weights[1500:] = 1
    long = Measured({"x": np.arange(3000, dtype=np.int32), "weights": weights}, 4, shuffle=False)
    other = numbered(0, 3000, weights=weights)
    long.mean = 5.0
    mixture = Mixture({"long": long, "other": other}, {"long": 1, "other": 1}, 7, unit="tokens")
    rows = [int((mixture.sources_of(0, 10_000) == source).sum()) for source in (0, 1)]
    assert rows == pytest.approx([10_000 * 2 / 7, 10_000 * 5 / 7], abs=2)
    for wrong in (0, -1.0, float("nan"), float("inf")):
        long.mean = wrong
        mixture = Mixture({"long": long, "other": other}, {"long": 1, "other": 1}, 7, unit="tokens")
        with pytest.raises(ConfigError, match="tokens_per_row.*0"):
            mixture.check()


def test_a_batch_far_on_is_found_at_once():
    sources = {name: SyntheticLm(17, 8, 5, seed) for seed, name in enumerate("abcd")}
    weights = {"a": 0.4321, "b": 0.2679, "c": 0.1, "d": 0.2}
    mixture = Mixture(sources, weights, 8)
    # To count up to this batch would take a thousand years.
    batch = next(mixture.batches(10**18 // 8))
    assert batch["ids"].shape == (8, 5)


def test_workers_and_parts_of_rows_make_the_same_stream():
    mixture = Mixture(
        {"a": SyntheticLm(17, 4, 5, 1), "b": SyntheticLm(17, 6, 5, 2)}, {"a": 0.6, "b": 0.4}, 10
    )
    ahead = WithWorkers(mixture, num_workers=3, kind="threads").batches(5)
    for index in range(5, 9):
        whole = mixture.rows(index, slice(0, 10))
        for num_processes in (1, 2, 3, 5, 8):
            each = -(-10 // num_processes)
            parts = [
                mixture.rows(index, slice(first, min(first + each, 10)))
                for first in range(0, 10, each)
            ]
            joined = {name: np.concatenate([part[name] for part in parts]) for name in whole}
            np.testing.assert_equal(joined, whole)
        np.testing.assert_equal(next(ahead), whole)


def test_the_fingerprint_has_shares_and_sources():
    def made(**settings):
        sources = {"a": numbered(0, 7), "b": numbered(100, 5)}
        return Mixture(sources, settings.pop("weights", {"a": 1, "b": 1}), 4, **settings)

    first = made().fingerprint()
    assert first == made(weights={"a": 0.5, "b": 0.5}).fingerprint()
    assert first != made(weights={"a": 2, "b": 1}).fingerprint()
    assert first != made(stop="first").fingerprint()
    assert first["sources"]["a"] == numbered(0, 7).fingerprint()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"weights": {"a": 1, "c": 1}}, r"weights.*'c'.* a, b\."),
        ({"weights": {"a": 1}}, r"weights.*\['b'\]"),
        ({"weights": {"a": 1, "b": -1}}, "weights.*'b': -1}"),
        ({"weights": {"a": 0.1234567, "b": 1}}, "weights.*0.1234567"),
        ({"weights": [(1, {"a": 1, "b": 1})]}, r"weights.*\[\(1, "),
        ({"weights": [(0, {"a": 1, "b": 1}), (1.5, {"a": 1, "b": 1})]}, r"\(1\.5, "),
        ({"stop": "last"}, "stop.*'last'.*never, first"),
        ({"sources": {"a": numbered(0, 3), "b": [1, 2]}}, "'b'.*list.*IndexedPipeline"),
        (
            {"sources": {"a": numbered(0, 3), "b": SyntheticLm(5, 4, 3)}},
            "'b'.*labels.*'a'.*'x'",
        ),
        ({"sources": {"a": numbered(0, 3), "b": SyntheticLm(5, 4, 3, num_batches=0)}}, "num_batch"),
        (
            {
                "sources": {"a": numbered(0, 3, shuffle=True), "b": numbered(0, 3, shuffle=True)},
                "stop": "first",
            },
            r"stop.*'first'.*\['a', 'b'\]",
        ),
        (
            {"sources": {"a": numbered(0, 3), "b": numbered(0, 3, weights=np.zeros(3))}},
            "'b' is empty",
        ),
    ],
)
def test_what_is_wrong_is_said(settings, words):
    given = {
        "sources": {"a": numbered(0, 3), "b": numbered(9, 3)},
        "weights": {"a": 1, "b": 1},
        "batch_size": 2,
    } | settings
    with pytest.raises(ConfigError, match=words):
        Mixture(**given).check()


@pytest.mark.slow
def test_the_digest_is_of_the_stream_and_not_of_who_makes_it():
    def made(**sources):
        given = {"a": SyntheticLm(17, 4, 5, 1), "b": SyntheticLm(17, 6, 5, 2)} | sources
        return Mixture(given, {"a": 0.6, "b": 0.4}, 10)

    whole = hashlib.sha256()
    for index in range(3, 5):
        for name, leaf in sorted(made().rows(index, slice(0, 10)).items()):
            whole.update(f"{name} {leaf.dtype} {leaf.shape} ".encode() + leaf.tobytes())
    actual = {stream_digest(made(), 2, start=3, num_processes=count) for count in (1, 3)}
    assert actual == {whole.hexdigest()}
    ahead = WithWorkers(made(), kind="threads")
    assert stream_digest(ahead, 2, start=3) == whole.hexdigest()
    assert stream_digest(made(a=SyntheticLm(17, 4, 5, 7)), 2, start=3) not in actual
