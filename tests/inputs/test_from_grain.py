"""Batches of a user's Grain datasets, against Grain's own batches and elements."""

import functools
import itertools
import sys

import grain
import numpy as np
import pytest

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs import FromGrain, FromGrainIter, Mixture, WithWorkers
from praxis_lite.inputs.base import spec_of
from praxis_lite.inputs.processes.stream_digest import stream_digest


class Squares:
    """Examples x = (i, i * i), labels i; counts what is read."""

    def __init__(self, length):
        self.length, self.num_read = length, 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.num_read += 1
        return {"x": np.array([index, index**2], np.float64), "labels": np.int64(index)}


SOURCES = {}


def squares(length=23, seed=None, repeat=False, batch=0, only=None, iterate=False):
    dataset = grain.MapDataset.source(SOURCES.setdefault(length, Squares(length)))
    if seed is not None:
        dataset = dataset.seed(seed).shuffle()
    if repeat:
        dataset = dataset.repeat()
    if only is not None:
        dataset = dataset.filter(lambda example: example["labels"] % only == 0)
    if batch:
        dataset = dataset.batch(batch)
    return dataset.to_iter_dataset() if iterate else dataset


def made(batch_size=5, **settings):
    return FromGrain(functools.partial(squares, **settings), batch_size)


def in_order(batch_size=5, num_batches=None, **settings):
    return FromGrainIter(
        functools.partial(squares, iterate=True, **settings), batch_size, num_batches
    )


def taken(pipeline, count, start=0, rows=None):
    return list(itertools.islice(pipeline.batches(start, rows=rows), count))


def test_batches_are_grains_own():
    actual, theirs = taken(made(seed=3, repeat=True), 20), squares(seed=3, repeat=True, batch=5)
    for index, batch in enumerate(actual):
        np.testing.assert_array_equal(batch["x"], theirs[index]["x"])
        np.testing.assert_array_equal(batch["labels"], theirs[index]["labels"])
        assert batch["x"].dtype == np.float32 and batch["labels"].dtype == np.int32
        assert batch["weights"].tolist() == [1.0] * 5
    np.testing.assert_equal(taken(in_order(seed=3, repeat=True), 20), actual)
    assert made(seed=3, repeat=True).num_batches is None


def test_one_pass_ends_in_filler():
    batches = list(made().batches())
    assert len(batches) == made().num_batches == 5
    weights = np.concatenate([batch["weights"] for batch in batches])
    assert weights.tolist() == [1.0] * 23 + [0.0] * 2
    labels = np.concatenate([item["labels"] for item in batches])
    assert labels[:23].tolist() == list(range(23)) and not labels[23:].any()
    np.testing.assert_equal(list(in_order(num_batches=5).batches()), batches)
    np.testing.assert_equal(made().rows(4, slice(4, 5))["weights"], [0.0])
    spec = spec_of(x=((5, 2), np.float32), labels=((5,), np.int32), weights=((5,), np.float32))
    assert made().element_spec() == spec == in_order().element_spec()


def test_a_host_reads_its_own_rows_alone_and_any_batch_at_once():
    pipeline = made(seed=3, repeat=True)
    pipeline.check()
    source = SOURCES[23]
    before = source.num_read
    (part,) = taken(pipeline, 1, start=10**9, rows=slice(1, 3))
    assert source.num_read == before + 2
    np.testing.assert_equal(part["x"], pipeline.rows(10**9, slice(0, 5))["x"][1:3])


@pytest.mark.parametrize(
    "pipeline",
    [
        pytest.param(made(seed=1, repeat=True), marks=pytest.mark.slow),
        in_order(seed=1, repeat=True),
    ],
)
def test_a_resume_and_parts_of_rows_are_the_same_stream(pipeline):
    whole = taken(pipeline, 7)  # One epoch and a half.
    np.testing.assert_equal(taken(pipeline, 2, start=5), whole[5:])
    parts = [taken(pipeline, 7, rows=rows) for rows in (slice(0, 2), slice(2, 5))]
    joined = [
        {name: np.concatenate([item[name] for item in pair]) for name in pair[0]}
        for pair in zip(*parts, strict=True)
    ]
    np.testing.assert_equal(joined, whole)
    assert stream_digest(pipeline, 2, num_processes=3) == stream_digest(pipeline, 2)


@pytest.mark.slow
def test_workers_and_mixtures_take_it():
    pipeline = made(seed=1, repeat=True)
    ahead = WithWorkers(pipeline, num_workers=2)
    np.testing.assert_equal(taken(ahead, 5, start=2), taken(pipeline, 5, start=2))
    mixture = Mixture({"a": pipeline, "b": made(length=7)}, {"a": 2, "b": 1}, 6)
    labels = np.concatenate([item["labels"] for item in taken(mixture, 4)])
    local = np.concatenate([element["labels"] for element in taken(pipeline, 4)])
    from_b = mixture.sources_of(0, 24) == 1
    assert labels[~from_b].tolist() == local[:16].tolist()
    assert labels[from_b].tolist() == [*range(7), 0]


def test_the_fingerprint_has_the_function_its_arguments_and_the_data():
    first = made(seed=1).fingerprint()
    assert first == made(seed=1).fingerprint()
    assert first["make_dataset"]["seed"] == 1
    assert first["make_dataset"]["function"].endswith("test_from_grain.squares")
    hashes = {item.fingerprint()["first_batches_sha256"] for item in (made(seed=1), made(seed=2))}
    assert len(hashes) == 2
    assert made(seed=1).nondeterminism() is None


def uneven():
    return grain.MapDataset.source([{"x": np.zeros(2)}, {"x": np.zeros(3)}])


def other_names():
    return grain.MapDataset.source([{"x": 1}, {"y": 2}])


def numbers():
    return grain.MapDataset.range(9)


def texts():
    return grain.MapDataset.source([{"x": "word"}])


@pytest.mark.parametrize(
    ("pipeline", "words"),
    [
        (FromGrain(list, 2), "list; .*MapDataset"),
        (made(iterate=True), "FromGrainIter.*IterDataset"),
        (FromGrainIter(squares, 2), "FromGrain .*MapDataset"),
        (FromGrain(functools.partial(squares, 0), 2), "FromGrain.* 0 "),
        (FromGrain(numbers, 2), "numbers.*dict"),
        (FromGrain(other_names, 2), r"\['y'\]"),
        (FromGrain(uneven, 2), r"\(3,\) .*\(2,\)"),
        (FromGrain(texts, 1), "'x'.*U4"),
        (made(only=2), "FromGrainIter"),
        (made(batch_size=0), "batch_size"),
        (in_order(num_batches=0), "num_batches"),
        (in_order(), " 4;.*num_batches"),
        (in_order(num_batches=9), " 9 .*num_batches"),
    ],
)
def test_what_is_wrong_is_said(pipeline, words):
    with pytest.raises(ConfigError, match=words):
        taken(pipeline, 10)


def test_a_filter_reads_on_in_order():
    pipeline = in_order(only=4, num_batches=2, batch_size=4)
    labels = np.concatenate([batch["labels"] for batch in pipeline.batches()])
    assert labels.tolist() == [0, 4, 8, 12, 16, 20, 0, 0]


def test_a_missing_grain_says_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(ConfigError, match="pip install grain"):
        made().check()
