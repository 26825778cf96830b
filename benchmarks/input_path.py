"""Compares the speed of input pipelines that use FromGrain, Grain alone, and tf.data.

    python benchmarks/input_path.py [--rows N] [--batch_size B]

Each pipeline reads the same rows of 1,025 tokens from a file, shuffles them, and creates batches of
ids, labels and weights. tf.data only shuffles within a buffer. The pipelines take turns in a single
process. The script prints the median times and their ratios to Grain's time.
"""

import argparse
import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from praxis_lite.inputs import FromDataset, FromGrain, WithWorkers
from praxis_lite.inputs.tensorflow_import import tensorflow

TOKENS, TURNS = 1024, 5


def decoded(record: bytes) -> dict[str, np.ndarray]:
    """Decodes a row and adds the same leaves as FromGrain."""
    ids = np.frombuffer(record, np.int32)
    return {"ids": ids[:-1], "labels": ids[1:], "weights": np.ones(TOKENS, np.float32)}


def examples(path: str) -> grain.MapDataset:
    """Returns an endless shuffled dataset of the rows in an ArrayRecord file."""
    source = grain.sources.ArrayRecordDataSource(path)
    return grain.MapDataset.source(source).seed(0).map(decoded).shuffle().repeat()


def of_tf(path: str) -> Any:
    """Returns an endless dataset of the rows in a TFRecord file, shuffled in a buffer."""
    tf = tensorflow("this benchmark")

    def parsed(record: Any) -> dict[str, Any]:
        ids = tf.ensure_shape(tf.io.decode_raw(record, tf.int32), (TOKENS + 1,))
        return {"ids": ids[:-1], "labels": ids[1:], "weights": tf.ones(TOKENS)}

    dataset = tf.data.TFRecordDataset(path).shuffle(1000, seed=0).map(parsed, num_parallel_calls=2)
    return dataset.repeat()


def write(folder: Path, num_rows: int) -> tuple[str, str]:
    """Writes random tokens as ArrayRecord and TFRecord, and returns both paths."""
    tf = tensorflow("this benchmark")
    records, tf_records = folder / "rows.array_record", folder / "rows.tfrecord"
    rows = np.random.default_rng(0).integers(0, 32_000, (num_rows, TOKENS + 1), np.int32)
    writer = ArrayRecordWriter(str(records), "group_size:1")
    with tf.io.TFRecordWriter(str(tf_records)) as tf_writer:
        for row in rows:
            writer.write(row.tobytes())
            tf_writer.write(row.tobytes())
    writer.close()
    return str(records), str(tf_records)


def main() -> None:
    """Prints the results of each pipeline."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--batch_size", type=int, default=32)
    options = parser.parse_args()
    size, count = options.batch_size, options.rows // options.batch_size
    with tempfile.TemporaryDirectory() as folder:
        records, tf_records = write(Path(folder), options.rows)
        ours = FromGrain(functools.partial(examples, records), size)
        theirs = examples(records).batch(size)
        ways: dict[str, Callable[[], Iterator[Any]]] = {
            "Grain alone, by index": lambda: (theirs[k] for k in itertools.count()),
            "FromGrain": ours.batches,
            "Grain alone, its 16 threads": lambda: iter(theirs.to_iter_dataset()),
            "FromGrain, WithWorkers of 2 threads": WithWorkers(ours, kind="threads").batches,
            "tf.data, by FromDataset": FromDataset(
                functools.partial(of_tf, tf_records), size, num_batches=count
            ).batches,
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(TURNS):
            for name, make in ways.items():
                batches = make()
                next(batches)
                start = time.perf_counter()
                for _ in itertools.islice(batches, count - 1):
                    pass
                seconds[name].append((time.perf_counter() - start) / (count - 1))
    medians = {name: statistics.median(second) for name, second in seconds.items()}
    plain = medians["Grain alone, by index"]
    print(f"{'a batch of ' + str(size) + ' rows':<38}{'ms':>8}{'Mtokens/s':>11}{'of Grain':>10}")
    for name, one in medians.items():
        print(f"{name:<38}{one * 1e3:>8.2f}{size * TOKENS / one / 1e6:>11.1f}{one / plain:>10.2f}")


if __name__ == "__main__":
    main()
