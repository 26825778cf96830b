"""Digests of a batch's rows, which add up to that of a run whichever processes fed them."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_lite.inputs.base import InputPipeline

_BYTES_AT_ONCE = 2**20  # Of rows that are copied beside each other; it fits into a cache.


def row_digests(batch: Any, index: int, first_row: int = 0) -> np.ndarray:
    """Returns uint64: a digest of each row, XXH3-64.

    It is of the batch's index, the row's number in the global batch, and the row's bytes of every
    leaf in the order of their paths; names, dtypes and shapes of rows, and leaves without rows,
    go into its seed.

    Args:
      batch: arrays on the host, these rows of the global batch `index`.
      first_row: the number in the global batch of the first of them.
    """
    leaves = [(path, np.asarray(leaf)) for path, leaf in sorted(leaves_with_path(batch))]
    seed, rows = xxhash.xxh3_64(), []
    for path, leaf in leaves:
        seed.update(f"{path} {leaf.dtype.name} {list(leaf.shape[1:])}\n".encode())
        if leaf.ndim:
            flat = np.ascontiguousarray(leaf).reshape(len(leaf), math.prod(leaf.shape[1:]))
            rows.append(flat.view(np.uint8))
        else:
            seed.update(leaf.tobytes())
    count = len(rows[0]) if rows else 0
    places = np.arange(first_row, first_row + count, dtype=np.uint64)
    places = np.stack([np.full_like(places, index), places], axis=1)
    rows.insert(0, places.astype("<u8").view(np.uint8).reshape(count, 16))
    at_once = max(1, _BYTES_AT_ONCE // sum(part.shape[1] for part in rows))
    digests = []
    for start in range(0, count, at_once):
        digests += _digests([part[start : start + at_once] for part in rows], seed.intdigest())
    return np.array(digests, np.uint64)


def _digests(parts: Sequence[np.ndarray], seed: int) -> list[int]:
    beside = np.concatenate(parts, axis=1)
    width, view = beside.shape[1], memoryview(beside.reshape(-1))
    return [
        xxhash.xxh3_64_intdigest(view[start : start + width], seed)
        for start in range(0, len(view), width)
    ]


def total(digests: np.ndarray) -> int:
    """Returns the sum of digests modulo 2^64."""
    return int(np.sum(digests, dtype=np.uint64))


def fingerprint_digest(pipeline: InputPipeline) -> str:
    """Returns XXH3-128, in hex, of all that determines a pipeline's batches."""
    text = json.dumps(pipeline.fingerprint(), sort_keys=True, default=str)
    return xxhash.xxh3_128_hexdigest(text.encode())
