"""Compares PackedText with packing in Grain and tf.data on the same documents.

    python benchmarks/packed_text.py [--documents N] [--batch_size B]

Each pipeline creates batches of B rows with 2,048 byte tokens from JSON documents, which are
shuffled and packed first-fit. tf.data does not support packing, so its rows contain concatenated
documents. PackedText and Grain read an ArrayRecord file, and tf.data reads JSON lines. The
pipelines take turns in a single process. The script prints the median times, their ratios to
Grain's time, and their fractions of a step of 50 ms.
"""

import argparse
import functools
import itertools
import json
import logging
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from praxis_lite.inputs import ArrayRecords, Documents, PackedText
from praxis_lite.inputs.tensorflow_import import tensorflow

TOKENS, TURNS, BATCHES, EOS = 2048, 5, 100, 256


def ids_of(record: bytes) -> np.ndarray:
    """Returns the bytes of a document as ids, with end-of-text tokens on both sides."""
    text = json.loads(record)["text"].encode()
    return np.concatenate([[EOS], np.frombuffer(text, np.uint8), [EOS]]).astype(np.int32)


def leaves(record: bytes) -> dict[str, np.ndarray]:
    """Returns the leaves of a document, truncated to the length of a row."""
    ids = ids_of(record)[: TOKENS + 1]
    return {"ids": ids[:-1], "labels": ids[1:], "weights": np.ones(len(ids) - 1, np.float32)}


def of_grain(path: str, size: int) -> Iterator[Any]:
    """Returns batches packed by Grain's first-fit packing."""
    source = grain.sources.ArrayRecordDataSource(path)
    dataset = grain.MapDataset.source(source).seed(0).map(leaves).shuffle().repeat()
    lengths = dict.fromkeys(("ids", "labels", "weights"), TOKENS)
    options = grain.ReadOptions(num_threads=0)  # Read in the main thread, as PackedText does.
    packed = grain.experimental.FirstFitPackIterDataset(
        dataset.to_iter_dataset(options), length_struct=lengths, num_packing_bins=64
    )
    return iter(packed.batch(size))


def of_tf(path: str, size: int) -> Iterator[Any]:
    """Returns batches of tf.data, in which documents are concatenated without gaps."""
    tf = tensorflow("this benchmark")

    def tokens(line: Any) -> Any:
        ids = tf.numpy_function(ids_of, [line], tf.int32)
        return tf.data.Dataset.from_tensor_slices(tf.ensure_shape(ids, (None,)))

    dataset = tf.data.TextLineDataset(path).shuffle(1000, seed=0).repeat().flat_map(tokens)
    rows = dataset.batch(TOKENS + 1, drop_remainder=True).map(
        lambda x: {"ids": x[:-1], "labels": x[1:], "weights": tf.ones(TOKENS)}
    )
    return rows.batch(size).prefetch(1).as_numpy_iterator()


def write(folder: Path, count: int) -> tuple[str, str]:
    """Writes excerpts of the standard library as ArrayRecord and JSON lines; returns both paths."""
    text = "".join(
        path.read_text("utf-8", errors="replace")
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    )
    rng, records = np.random.default_rng(0), []
    for _ in range(count):
        start, length = int(rng.integers(len(text))), int(rng.lognormal(6.5, 1.0))
        records.append(json.dumps({"text": text[start : start + length]}).encode())
    paths = folder / "documents.array_record", folder / "documents.jsonl"
    writer = ArrayRecordWriter(str(paths[0]), "group_size:1")  # As recommended by Grain.
    for record in records:
        writer.write(record)
    writer.close()
    paths[1].write_bytes(b"".join(item + b"\n" for item in records))
    return str(paths[0]), str(paths[1])


def main() -> None:
    """Prints the results of each pipeline."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--batch_size", type=int, default=8)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    size = options.batch_size
    with tempfile.TemporaryDirectory() as folder:
        records, lines = write(Path(folder), options.documents)
        source = ArrayRecords(records, decode=json.loads)
        ours = {}
        for cache_tokens in (True, False):
            began = time.perf_counter()
            ours[cache_tokens] = PackedText(
                Documents(source, cache_tokens=cache_tokens), "train", size, TOKENS, shuffle=True
            )
            ours[cache_tokens].check()
            print(f"ready in {time.perf_counter() - began:.1f} s (cache_tokens={cache_tokens})")
        ways: dict[str, Callable[[], Iterator[Any]]] = {
            "Grain alone": functools.partial(of_grain, records, size),
            "PackedText, cached tokens": ours[True].batches,
            "PackedText, on the fly": ours[False].batches,
            "tf.data, without gaps": functools.partial(of_tf, lines, size),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(TURNS):
            for name, make in ways.items():
                batches = make()
                next(batches)
                start = time.perf_counter()
                for _ in itertools.islice(batches, BATCHES):
                    pass
                seconds[name].append((time.perf_counter() - start) / BATCHES)
    medians = {name: statistics.median(second) for name, second in seconds.items()}
    plain = medians["Grain alone"]
    print(f"{size} rows of {TOKENS:<26}{'ms':>8}{'Mtokens/s':>11}{'of Grain':>10}{'of 50 ms':>10}")
    for name, item in medians.items():
        rate = size * TOKENS / item / 1e6
        print(f"{name:<38}{item * 1e3:>8.2f}{rate:>11.1f}{item / plain:>10.2f}{item / 0.05:>10.1%}")


if __name__ == "__main__":
    main()
