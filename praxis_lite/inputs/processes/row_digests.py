"""Digests of batch rows; their sum does not depend on the number of processes."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_lite.inputs.base import InputPipeline

_CHUNK_BYTES = 2**20  # Rows are hashed in chunks of this size, which fit into the CPU's cache.


def row_digests(batch: Any, index: int, first_row: int = 0) -> np.ndarray:
    """Returns the XXH3-64 digest of each row.

    A digest covers the batch's index, the row's index in the global batch, and the row's bytes in
    each leaf, in the order of the leaves' paths. The seed of the hash covers the names, dtypes and
    row shapes of all leaves, and the bytes of scalar leaves.

    Args:
      batch: Rows of the global batch `index`, as host arrays.
      index: Index of the batch.
      first_row: Index of the first of these rows in the global batch.

    Returns:
      uint64 array with a digest per row.
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
    num_rows = len(rows[0]) if rows else 0
    # The bytes of a row start with the indices of the batch and of the row.
    row_indices = np.arange(first_row, first_row + num_rows, dtype=np.uint64)
    positions = np.stack([np.full_like(row_indices, index), row_indices], axis=1)
    rows.insert(0, positions.astype("<u8").view(np.uint8).reshape(num_rows, 16))
    # Hash a limited number of rows at a time, because hashing copies them.
    chunk_rows = max(1, _CHUNK_BYTES // sum(part.shape[1] for part in rows))
    digests = []
    for start in range(0, num_rows, chunk_rows):
        digests += _digests([part[start : start + chunk_rows] for part in rows], seed.intdigest())
    return np.array(digests, np.uint64)


def _digests(parts: Sequence[np.ndarray], seed: int) -> list[int]:
    """Returns the digest of each row, after concatenating the parts along dimension 1."""
    concatenated = np.concatenate(parts, axis=1)
    width, view = concatenated.shape[1], concatenated.reshape(-1).data
    return [
        xxhash.xxh3_64_intdigest(view[start : start + width], seed)
        for start in range(0, len(view), width)
    ]


def total(digests: np.ndarray) -> int:
    """Returns the sum of the digests modulo 2^64."""
    return int(np.sum(digests, dtype=np.uint64))


def fingerprint_digest(pipeline: InputPipeline) -> str:
    """Returns the hex XXH3-128 digest of a pipeline's fingerprint."""
    text = json.dumps(pipeline.fingerprint(), sort_keys=True, default=str)
    return xxhash.xxh3_128_hexdigest(text.encode())
