"""Streams with a state resume exactly, and errors name what cannot."""

import functools
import itertools
import json

import datasets
import grain
import numpy as np
import pytest

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs import FromGrainIter, FromIterableDataset, WithWorkers
from praxis_lite.inputs.position import DataPosition

NUM_SHARDS, ROWS = 3, 11  # Rows in each shard.


def shard_rows(shards):
    for shard in shards:
        for row in range(ROWS):
            yield {"x": [shard, row], "labels": shard * ROWS + row}


def hugging_face(num_shards=NUM_SHARDS, buffer_size=0, repeat=True):
    shards = {"shards": list(range(num_shards))}
    dataset = datasets.IterableDataset.from_generator(shard_rows, gen_kwargs=shards)
    if buffer_size:
        dataset = dataset.shuffle(seed=0, buffer_size=buffer_size)
    return dataset.repeat(None) if repeat else dataset


class Counter:
    """Counts up from 0; the state is the next number."""

    num_read = 0

    def __init__(self, state="an integer", labels="labels"):
        self.kind, self.labels, self.next = state, labels, 0

    def __iter__(self):
        while True:
            self.next += 1
            Counter.num_read += 1
            yield {self.labels: self.next - 1}

    def state_dict(self):
        return {"an integer": self.next, "bytes": b"1", "wrong": 0}[self.kind]

    def load_state_dict(self, state):
        self.next = state


def grain_dataset():
    dataset = grain.MapDataset.range(37).map(lambda n: {"labels": n}).seed(0).shuffle().repeat()
    return dataset.to_iter_dataset()


def pipelines():
    return {
        "hugging face": FromIterableDataset(hugging_face, 5),
        "windows": FromIterableDataset(hugging_face, 5, shuffle_window=13, seed=3),
        "small windows": FromIterableDataset(hugging_face, 5, shuffle_window=2),
        "any iterable": FromIterableDataset(Counter, 5, shuffle_window=7),
        "grain": FromGrainIter(grain_dataset, 5),
    }


def labels_of(batches):
    return np.concatenate([batch["labels"] for batch in batches]).tolist()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name == "grain" else [])
        for name in pipelines()
    ],
)
def test_a_stream_resumes_at_any_batch_with_any_number_of_hosts(name):
    pipeline = pipelines()[name]
    expected = list(itertools.islice(pipeline.batches(), 31))
    for step in (0, 1, 13, 29):
        # The data of a checkpoint of a job that has started at another step.
        saving = pipelines()[name]
        position = DataPosition.of_step(step)
        list(itertools.islice(saving.batches(), step))
        data = json.loads(json.dumps(position.as_json(saving)))
        assert ("state" in data) == (step > 0)
        resumed = pipelines()[name]
        resumed.restore(data.get("state"))
        parts = [slice(0, 2), slice(2, 5)]
        hosts = [position.batches(resumed, rows) for rows in parts]
        for index in range(step, 31):
            batches = [next(host) for host in hosts]
            assert [number for number, _ in batches] == [index, index]
            for leaf, value in expected[index].items():
                actual = np.concatenate([batch[leaf] for _, batch in batches])
                np.testing.assert_array_equal(actual, value)


def test_windows_are_shuffled_as_documented():
    labels = labels_of(itertools.islice(pipelines()["windows"].batches(), 20))
    expected, total = [], NUM_SHARDS * ROWS
    for window in range(8):
        bits = np.random.Philox(key=[3, window], counter=[0, 0, 0, 3]).random_raw(13)
        rows = np.arange(window * 13, (window + 1) * 13) % total
        expected += rows[np.argsort(bits, kind="stable")].tolist()
    assert labels == expected[:100]


def test_a_resume_reads_only_the_current_window_again(caplog):
    first = pipelines()["any iterable"]
    batches = first.batches()
    list(itertools.islice(batches, 300))
    resumed = pipelines()["any iterable"]
    resumed.restore(first.state(300))
    resumed.check()
    Counter.num_read = 0
    with caplog.at_level("INFO"):
        assert next(resumed.batches(300))["labels"].min() >= 1500 - 13
    assert Counter.num_read <= 14
    assert "recomputing 1 batches before batch 300" in caplog.text


def test_a_state_is_used_only_for_batches_after_it():
    pipeline = pipelines()["any iterable"]
    expected = list(itertools.islice(pipeline.batches(), 20))
    assert pipeline.state(3) is None
    pipeline.restore(pipeline.state(20))
    np.testing.assert_array_equal(next(pipeline.batches(3))["labels"], expected[3]["labels"])


def test_a_pass_ends_in_padding():
    pipeline = FromIterableDataset(
        functools.partial(hugging_face, repeat=False), 5, 7, shuffle_window=10
    )
    batches = list(pipeline.batches())
    weights = np.concatenate([batch["weights"] for batch in batches])
    assert weights.tolist() == [1.0] * 33 + [0.0] * 2
    assert sorted(labels_of(batches)[:33]) == list(range(33))


def test_a_new_shard_changes_the_fingerprint():
    three, four = (
        FromIterableDataset(functools.partial(hugging_face, num), 5).fingerprint() for num in (3, 4)
    )
    assert (three["num_shards"], four["num_shards"]) == (3, 4)
    assert three["first_batches_sha256"] == four["first_batches_sha256"]


def nested(dataset, **settings):
    return FromIterableDataset(functools.partial(dataset, **settings), 5)


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (nested(hugging_face, buffer_size=9), r"hugging_face .*shuffle_window=N"),
        (nested(Counter, state="wrong"), "Counter .*second batch"),
        (nested(Counter, state="bytes"), r"Counter returns b'1'.*JSON"),
        (nested(list), "list returns a list; .*state_dict"),
        (nested(grain_dataset), "FromGrainIter"),
        (nested(hugging_face, num_shards=0), "0 elements"),
        (FromIterableDataset(hugging_face, 5, shuffle_window=0), "shuffle_window is 0"),
        (FromIterableDataset(hugging_face, 5, num_batches=0), "num_batches is 0"),
        (FromIterableDataset(hugging_face, 5, seed=-1), "seed is -1"),
        (nested(hugging_face, repeat=False), r"ended in batch 6; .*\.repeat\(\)"),
        (WithWorkers(FromIterableDataset(hugging_face, 5)), "no random access"),
    ],
)
def test_errors_say_what_to_change(pipeline, message):
    if message == "0 elements":
        # Older versions repeat a stream without examples forever.
        pytest.importorskip("datasets", minversion="5.1")
    with pytest.raises(ConfigError, match=message):
        list(itertools.islice(pipeline.batches(), 10))
