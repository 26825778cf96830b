"""A digest of a step's true values: the same on every mesh that could have saved them."""

from pathlib import Path

import numpy as np
import xxhash

from praxis_lite.checkpoints.files.stored_arrays import StoredArray, stored_arrays
from praxis_lite.checkpoints.tools import Progress, manifest_of, no_progress


def digest_of(step_dir: Path) -> str:
    """Returns the digest of a step: XXH3-128 of its leaves' paths and digests, in order.

    Raises:
      ConfigError: the step cannot be read, or is not what its manifest says.
    """
    return combined(leaf_digests(step_dir))


def leaf_digests(step_dir: Path, progress: Progress = no_progress) -> dict[str, str]:
    """Returns a digest per leaf, by path: of its dtype, its true shape and its true values.

    Padding does not count; 0.0 and -0.0, and NaNs of other bits, are different.
    """
    arrays = stored_arrays(step_dir, manifest_of(step_dir))
    done, total, digests = 0, sum(array.num_bytes for array in arrays.values()), {}
    for path, array in arrays.items():
        progress(path, done / max(total, 1))
        done += array.num_bytes
        digests[path] = _digest(array)
    return digests


def combined(digests: dict[str, str]) -> str:
    """Returns the digest of a whole step."""
    lines = [f"{path} {digest}\n" for path, digest in sorted(digests.items())]
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


def _digest(array: StoredArray) -> str:
    digest = xxhash.xxh3_128(f"{array.dtype.name} {list(array.shape)}\n".encode())
    for rows in array.parts():
        digest.update(np.ascontiguousarray(array.read(rows)).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
