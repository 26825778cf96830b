"""Compares length buckets with a simple reference, tf.data, and rows padded to seq_len."""

import itertools
import json
import logging

import numpy as np
import pytest

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs import (
    Documents,
    JsonLines,
    Mixture,
    PackedText,
    PreferenceData,
    WithWorkers,
)
from praxis_lite.inputs.base import batches_sha256
from praxis_lite.inputs.mixing.shuffle import epoch_order
from praxis_lite.inputs.position import DataPosition
from praxis_lite.inputs.processes.stream_digest import stream_digest
from praxis_lite.inputs.text.buckets import Buckets
from tests.support.marks import needs_tensorflow

LENGTHS, BATCH_SIZES, NUM_ROWS = (5, 11, 23), (16, 8, 4), 257


def row_lengths(seed=0):
    return np.random.default_rng(seed).integers(1, 24, NUM_ROWS)


def batches_of(buckets, epoch, seed):
    first = epoch * buckets.num_batches
    indices = range(first, first + buckets.num_batches)
    pairs = [buckets.batch(index, seed) for index in indices]
    return [(bucket, rows.tolist()) for bucket, rows in pairs]


@pytest.mark.parametrize("seed", [None, 0, 3])
def test_a_batch_is_emitted_once_its_bucket_is_full_and_no_row_is_lost(seed):
    lengths = row_lengths()
    buckets = Buckets(LENGTHS, BATCH_SIZES, lengths)
    for epoch in range(3):
        order = np.arange(NUM_ROWS) if seed is None else epoch_order(seed, epoch, NUM_ROWS)
        order, expected, waiting = order.tolist(), [], [[] for _ in LENGTHS]
        for row in order:
            bucket = next(k for k, length in enumerate(LENGTHS) if lengths[row] <= length)
            waiting[bucket].append(row)
            if len(waiting[bucket]) == BATCH_SIZES[bucket]:
                expected.append((bucket, waiting[bucket]))
                waiting[bucket] = []
        # Rows that do not fill a batch move to the next longer bucket.
        rows = []
        for bucket, size in enumerate(BATCH_SIZES):
            rows = waiting[bucket] + rows
            while len(rows) >= (1 if size == BATCH_SIZES[-1] else size) and rows:
                expected.append((bucket, rows[:size]))
                rows = rows[size:]
        actual = batches_of(buckets, epoch, seed)
        assert actual == sorted(expected, key=lambda batch: max(map(order.index, batch[1])))
        assert sorted(itertools.chain(*(rows for _, rows in actual))) == list(range(NUM_ROWS))


@pytest.mark.slow
@needs_tensorflow
def test_full_batches_are_those_of_tf_data():
    import tensorflow as tf

    lengths, order = row_lengths(), epoch_order(7, 0, NUM_ROWS)
    dataset = tf.data.Dataset.from_tensor_slices(order).bucket_by_sequence_length(
        lambda row: tf.gather(tf.constant(lengths, tf.int32), row),
        [length + 1 for length in LENGTHS[:-1]],
        BATCH_SIZES,
        no_padding=True,
        drop_remainder=True,
    )
    expected = [rows.tolist() for rows in dataset.as_numpy_iterator()]
    actual = [rows for _, rows in batches_of(Buckets(LENGTHS, BATCH_SIZES, lengths), 0, 7)]
    assert [rows for rows in actual if rows in expected] == expected
    assert len(expected) >= len(actual) - 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with documents of 2 to 31 ids."""
    folder, rng = tmp_path_factory.mktemp("buckets"), np.random.default_rng(1)
    lines = [{"ids": rng.integers(0, 37, rng.integers(2, 32)).tolist()} for _ in range(101)]
    (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def pipeline(folder, **settings):
    settings = {"bucket_lengths": (5, 11), "packing": False, "shuffle": True} | settings
    documents = Documents(JsonLines(f"{folder}/*.jsonl"), "ids")
    return PackedText(documents, "train", **{"batch_size": 4, "seq_len": 23} | settings)


def rows_of(batches, length=23):
    """Returns the rows with labels, padded to `length`, as sorted bytes."""
    rows = []
    for batch in batches:
        for k in np.flatnonzero(batch["weights"].any(axis=1)):
            padding = (0, length - batch["ids"].shape[1])
            rows.append(b"".join(np.pad(batch[x][k], padding).tobytes() for x in sorted(batch)))
    return sorted(rows)


@pytest.mark.parametrize("too_long", ["split", "drop", "cut"])
def test_one_pass_has_the_same_rows_as_padding_to_seq_len(folder, too_long):
    ours = pipeline(folder, shuffle=False, too_long=too_long)
    batches = list(ours.batches())
    assert len(batches) == ours.num_batches
    shapes = [(23, 4), (11, 8), (5, 16)]
    assert {batch["ids"].shape[::-1] for batch in batches} == set(shapes)
    assert [spec["ids"].shape[::-1] for spec in ours.element_specs()] == shapes
    plain = pipeline(folder, shuffle=False, too_long=too_long, bucket_lengths=())
    assert rows_of(batches) == rows_of(plain.batches())
    # Only rows that moved to a longer bucket at the end would fit into a shorter one.
    short = [
        (batch["weights"].sum(axis=1) <= 5).sum() for batch in batches if batch["ids"].shape[1] > 5
    ]
    assert sum(short) < 16


def pairs(tmp_path, **settings):
    """Returns pairs whose longer side, chosen or rejected, has 3 to 29 labels."""
    rng = np.random.default_rng(2)
    lengths = rng.integers(2, rng.choice([5, 11, 29], (97, 1)), (97, 2))
    lines = [{"prompt": "?", "chosen": "y" * a, "rejected": "n" * b} for a, b in lengths.tolist()]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {"bucket_lengths": (7, 13), "shuffle": False} | settings
    return PreferenceData(f"{tmp_path}/p.jsonl", "train", 4, 31, heldout_percent=0, **settings)


def test_one_pass_of_pairs_has_the_same_pairs_as_padding_to_seq_len(tmp_path):
    def pairs_of(batches):
        leaves, found, num_short = ("ids", "labels", "answers"), [], 0
        for batch in batches:
            length = batch["ids"].shape[-1]
            is_short = length > 7 and ~batch["answers"][..., 7:].any(axis=(1, 2))
            num_short += np.sum(is_short & (batch["weights"] > 0))
            padding = ((0, 0), (0, 31 - length))
            found += [
                b"".join(np.pad(batch[name][k], padding).tobytes() for name in leaves)
                for k in np.flatnonzero(batch["weights"])
            ]
        return sorted(found), num_short

    ours, plain = pairs(tmp_path), pairs(tmp_path, bucket_lengths=())
    assert ours.fingerprint() != plain.fingerprint()
    batches, shapes = list(ours.batches()), [(4, 2, 31), (8, 2, 13), (16, 2, 7)]
    assert [spec["ids"].shape for spec in ours.element_specs()] == shapes
    assert {batch["labels"].shape for batch in batches} == set(shapes)
    actual, num_moved = pairs_of(batches)
    expected, num_short = pairs_of(plain.batches())
    assert actual == expected and len(actual) == 97
    # Some pairs move to a longer bucket at the end of the epoch, when theirs has no full batch.
    assert num_moved < 16 < num_short


@pytest.mark.parametrize("num_hosts", [1, 2, 3, 8])
def test_batches_do_not_depend_on_hosts_workers_or_where_they_start(folder, num_hosts):
    expected = list(itertools.islice(pipeline(folder, batch_size=8).batches(), 40))
    edges = [min(8, -(-8 // num_hosts) * k) for k in range(num_hosts + 1)]
    for start in (0, 17):
        ours = pipeline(folder, batch_size=8)
        if num_hosts == 3:
            ours = WithWorkers(ours, 2, kind="threads")
        parts = [
            itertools.islice(DataPosition.of_step(start).batches(ours, slice(a, b)), 23)
            for a, b in itertools.pairwise(edges)
        ]
        for k, batches in enumerate(zip(*parts, strict=True)):
            actual = {name: np.concatenate([x[name] for _, x in batches]) for name in expected[0]}
            assert batches_sha256([actual]) == batches_sha256([expected[start + k]])
            assert ours.num_rows(start + k) == len(actual["ids"])


@pytest.mark.slow
def test_the_digest_is_the_same_for_any_number_of_processes(folder):
    one, two, eight = (
        stream_digest(pipeline(folder), 40, start=3, num_processes=number) for number in (1, 2, 8)
    )
    assert one == two == eight


def test_the_log_reports_how_full_the_batches_are(folder, caplog):
    with caplog.at_level(logging.INFO):
        ours = pipeline(folder)
        ours.check()
    epoch = list(pipeline(folder, shuffle=False).batches())
    num_labels = sum(batch["weights"].sum() for batch in epoch)
    full = num_labels / sum(batch["ids"].size for batch in epoch)
    assert f"{len(epoch)} batches in each epoch" in caplog.text
    assert f"{100 * full:.1f}% full" in caplog.text.splitlines()[-1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"packing": True}, r"\(5, 11\).*packing=False"),
        ({"bucket_lengths": (11, 5)}, r"\(11, 5\).*23"),
        ({"bucket_lengths": (5, 23)}, r"\(5, 23\).*23"),
        ({"bucket_lengths": (0, 5)}, r"\(0, 5\).*above 0"),
        ({"bucket_lengths": (5.5,)}, r"5\.5"),
        ({"bucket_lengths": 5}, "5.*list"),
    ],
)
def test_incompatible_settings_are_rejected(folder, settings, message):
    with pytest.raises(ConfigError, match=f"bucket_lengths.*{message}"):
        pipeline(folder, **settings).check()


def test_a_mixture_of_buckets_is_rejected(folder):
    with pytest.raises(ConfigError, match="'some'.*bucket_lengths"):
        Mixture({"some": pipeline(folder)}, {"some": 1}, 4).check()
