"""Batches of a user's tf.data.Dataset: InputPipeline's contract, and what is not deterministic."""

import functools
import itertools
import json
import logging
import os
import random
import re

import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.inputs import FromDataset, TextCorpus
from praxis_lite.inputs.tensorflow_import import tensorflow
from tests.support.marks import needs_tensorflow

pytestmark = needs_tensorflow


def squares(num_examples=37, shuffle=0, repeat=False, parallel=False, draws=False, ordered=None):
    """Examples x = (i, i*i, noise), labels i, in the ways that options say."""
    tf = tensorflow("this test")
    dataset = tf.data.Dataset.range(num_examples)
    if shuffle:
        dataset = dataset.shuffle(shuffle)
    if repeat:
        dataset = dataset.repeat()

    def example(i):
        noise = tf.random.uniform(()) if draws else 0.0
        x = tf.stack([tf.cast(i, tf.float32), tf.cast(i * i, tf.float32), noise])
        return {"x": x, "labels": i}

    calls = {"num_parallel_calls": 4, "deterministic": ordered} if parallel else {}
    return dataset.map(example, **calls)


def endless(seed=3, batch_size=5, **options):
    result = functools.partial(squares, shuffle=13, repeat=True, parallel=True, **options)
    return FromDataset(result, batch_size, seed)


def one_pass(batch_size=5, **options):
    return FromDataset(functools.partial(squares, **options), batch_size)


def global_batches(short=False):
    tf = tensorflow("this test")
    dataset = squares(17).batch(7 if short else 5)
    return dataset.map(lambda batch: {**batch, "weights": tf.ones_like(batch["x"])})


def taken(batches, count=11):
    return list(itertools.islice(batches, count))


def assert_same(got, wanted):
    assert len(got) == len(wanted) > 0
    for batch, expected in zip(got, wanted, strict=True):
        assert batch.keys() == expected.keys()
        for name in batch:
            np.testing.assert_array_equal(batch[name], expected[name])


@pytest.mark.slow
@pytest.mark.parametrize("make", [endless, one_pass])
def test_it_continues_and_splits_by_rows_as_every_pipeline(make):
    whole = taken(make().batches())
    assert_same(taken(make().batches()), whole)
    # Resuming is skipping; it goes through two epochs of 37 examples here.
    assert_same(taken(make().batches(3), 11 - 3), whole[3:])
    parts = [taken(make().batches(rows=slice(*pair))) for pair in ((0, 1), (1, 5), (5, 5))]
    joined = [
        {name: np.concatenate([part[name] for part in hosts]) for name in hosts[0]}
        for hosts in zip(*parts, strict=True)
    ]
    assert_same(joined, whole)
    spec = make().element_spec()
    for batch in whole:
        assert {n: (x.shape, x.dtype) for n, x in batch.items()} == {
            n: (x.shape, x.dtype) for n, x in spec.items()
        }


def test_a_pass_has_every_example_once_and_ends_in_rows_without_weight():
    pipeline = one_pass()
    assert pipeline.num_batches == 8
    batches = list(pipeline.batches())
    labels, weights, x = (
        np.concatenate([b[name] for b in batches]) for name in ("labels", "weights", "x")
    )
    np.testing.assert_array_equal(labels, [*range(37), 0, 0, 0])
    np.testing.assert_array_equal(weights, [1] * 37 + [0] * 3)
    np.testing.assert_array_equal(x[:37, 1], np.arange(37.0) ** 2)
    assert (labels.dtype, weights.dtype) == (np.int32, np.float32)
    assert endless().num_batches is None


def test_whole_batches_are_filled_too():
    pipeline = FromDataset(global_batches, 5, is_batched=True)
    assert pipeline.num_batches == 4
    last = list(pipeline.batches())[-1]
    np.testing.assert_array_equal(last["labels"], [15, 16, 0, 0, 0])
    np.testing.assert_array_equal(last["weights"], [[1] * 3] * 2 + [[0] * 3] * 3)


def test_the_seed_is_that_of_every_shuffle_and_epochs_differ():
    labels = [
        np.concatenate([b["labels"] for b in taken(endless(seed).batches(), 37)]) for seed in (3, 4)
    ]
    epochs = labels[0].reshape(5, 37)
    np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(37), (5, 1)))
    assert len(set(map(tuple, epochs.tolist()))) == 5
    assert not np.array_equal(*labels)


def rolling(num_examples=7):
    tf = tensorflow("this test")

    def draw(i):
        return np.float32(random.random())  # Python's own, without a seed.

    return tf.data.Dataset.range(num_examples).map(
        lambda i: {"x": tf.ensure_shape(tf.numpy_function(draw, [i], tf.float32), ())}
    )


def unordered():
    dataset = squares()
    options = tensorflow("this test").data.Options()
    options.deterministic = False
    return dataset.with_options(options)


@pytest.mark.parametrize(
    ("make_dataset", "words"),
    [
        (functools.partial(squares, parallel=True, ordered=False), "Map.* has deterministic=False"),
        (functools.partial(squares, parallel=True, draws=True), "RandomUniform runs in a function"),
        (unordered, "options have deterministic=False"),
        (rolling, "two computations of the first batch differ in 'x'"),
    ],
)
def test_what_is_not_deterministic_is_said_and_does_not_stop_a_resume(make_dataset, words):
    pipelines = [FromDataset(make_dataset, 5) for _ in range(2)]
    for pipeline in pipelines:
        assert re.search(words, pipeline.nondeterminism())
    assert pipelines[0].fingerprint() == pipelines[1].fingerprint()


@pytest.mark.parametrize(
    "options", [{}, {"draws": True}, {"shuffle": 7}, {"parallel": True, "ordered": True}]
)
def test_what_is_deterministic_is_not_accused(options):
    assert one_pass(**options).nondeterminism() is None


def windows_of(corpus, num_examples=37):
    return squares(num_examples)


def test_the_fingerprint_follows_settings_arguments_and_data():
    fingerprint = endless().fingerprint()
    assert json.loads(json.dumps(fingerprint)) == fingerprint == endless().fingerprint()
    assert fingerprint["make_dataset"] == {
        "function": f"{__name__}.squares",
        "shuffle": 13,
        "repeat": True,
        "parallel": True,
    }
    changed = [
        endless(4),
        endless(batch_size=7),
        endless(draws=False),
        one_pass(),
        one_pass(num_examples=38),
        one_pass(num_examples=41),
    ]
    assert len({json.dumps(one.fingerprint()) for one in changed} | {json.dumps(fingerprint)}) == 7
    # What has a fingerprint of its own gives that.
    corpus = TextCorpus(heldout_percent=20)
    described = FromDataset(functools.partial(windows_of, corpus), 5).fingerprint()["make_dataset"]
    assert described == {"function": f"{__name__}.windows_of", "0": corpus.fingerprint()}


def test_a_resume_logs_that_it_reads_again(caplog):
    with caplog.at_level(logging.INFO, "praxis_lite.inputs.base"):
        next(one_pass().batches(2))
        next(one_pass().batches())
    # TensorFlow's AutoGraph logs warnings on Python 3.13.
    ours = [x.getMessage() for x in caplog.records if x.name.startswith("praxis_lite")]
    assert ours == ["recomputing 2 batches before batch 2: FromDataset has no random access"]


def wrong(kind):
    tf = tensorflow("this test")
    dataset = tf.data.Dataset.range(7)
    return {
        "no dataset": lambda: [1, 2],
        "no dict": lambda: dataset,
        "filtered": lambda: squares().filter(lambda item: item["labels"] < 0),
        "empty": lambda: squares(0),
        "ragged": lambda: squares().batch(5).map(lambda element: {"x": element["labels"]}),
        "text": lambda: dataset.map(lambda i: {"x": tf.strings.as_string(i)}),
    }[kind]()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no dataset", r"test_from_dataset\.wrong.*list.*tf\.data\.Dataset"),
        ("no dict", r"TensorSpec.*tf\.int64"),
        ("filtered", r"test_from_dataset\.wrong.* 0 "),
        ("empty", r"test_from_dataset\.wrong.* 0 "),
        ("ragged", r"'x'.*\(None,\)"),
        ("text", "'x'.*object"),
    ],
)
def test_what_cannot_be_batched_is_refused_before_the_first_batch(kind, words):
    pipeline = FromDataset(functools.partial(wrong, kind), 5)
    for refused in pipeline.check, pipeline.batches:
        with pytest.raises(ConfigError, match=words):
            refused()


def from_tf_records(path, num_records=23):
    """As its users write it: tf.data cannot tell how many records are in a file."""
    tf = tensorflow("this test")
    if not os.path.exists(path):
        with tf.io.TFRecordWriter(str(path)) as writer:
            for i in range(num_records):
                writer.write(tf.io.serialize_tensor(tf.constant(float(i))).numpy())

    def parsed(record):
        value = tf.io.parse_tensor(record, tf.float32)
        return {"x": tf.ensure_shape(value, ())}

    return tf.data.TFRecordDataset(str(path)).map(parsed)


def test_a_file_of_records_is_counted_and_num_batches_takes_as_many(tmp_path):
    make = functools.partial(from_tf_records, tmp_path / "records")
    pipeline = FromDataset(make, 5)
    pipeline.check()
    batches = list(pipeline.batches())
    assert pipeline.num_batches == len(batches) == 5  # 23 records, five a batch.
    assert sum(batch["weights"].sum() for batch in batches) == 23
    assert pipeline.fingerprint()["num_elements"] == 23
    taken_three = FromDataset(make, 5, num_batches=3)
    taken_three.check()
    assert taken_three.num_batches == 3 and "num_elements" not in taken_three.fingerprint()
    assert_same(list(taken_three.batches()), batches[:3])
    assert_same(list(taken_three.batches(2)), batches[2:3])
    with pytest.raises(ConfigError, match="5.*num_batches.*7"):
        list(FromDataset(make, 5, num_batches=7).batches())
    with pytest.raises(ConfigError, match="8.*num_batches.*11"):
        FromDataset(squares, 5, num_batches=11).check()
    with pytest.raises(ConfigError, match="num_batches.*0"):
        FromDataset(make, 5, num_batches=0).check()


def test_bad_settings_and_batches_too_large_are_refused():
    with pytest.raises(ConfigError, match="batch_size.*0"):
        FromDataset(squares, 0).check()
    with pytest.raises(ConfigError, match="'x'.*7.*batch_size.*5"):
        next(FromDataset(functools.partial(global_batches, True), 5, is_batched=True).batches())
