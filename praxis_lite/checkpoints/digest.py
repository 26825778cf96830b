"""A digest of a step's values without padding: the same for every mesh that saved them."""

from pathlib import Path

import numpy as np
import xxhash

from praxis_lite.checkpoints.stored_arrays import StoredArray, stored_arrays
from praxis_lite.checkpoints.tools import manifest_of, tracked

__all__ = ("digest_of",)


def digest_of(step_dir: Path) -> str:
    """Returns the digest of a step: XXH3-128 of its leaves' paths and digests, in order.

    Raises:
      ConfigError: the step cannot be read, or is not what its manifest says.
    """
    return combined(leaf_digests(step_dir))


def leaf_digests(step_dir: Path) -> dict[str, str]:
    """Returns a digest per leaf, by path: of its dtype, and of its shape and values unpadded.

    0.0 and -0.0, and NaNs of other bits, are different.
    """
    arrays = stored_arrays(step_dir, manifest_of(step_dir))
    return {array.path: _digest(array) for array in tracked(list(arrays.values()))}


def combined(digests: dict[str, str]) -> str:
    """Returns the digest of a whole step."""
    lines = [f"{path} {digest}\n" for path, digest in sorted(digests.items())]
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


def _digest(array: StoredArray) -> str:
    digest = xxhash.xxh3_128(f"{array.dtype.name} {list(array.shape)}\n".encode())
    for rows in array.parts():
        digest.update(np.ascontiguousarray(array.read(rows)).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
