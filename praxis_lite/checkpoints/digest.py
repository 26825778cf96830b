"""Computes digests of a step's logical values, which do not depend on the mesh."""

import numpy as np
import xxhash

from praxis_lite.checkpoints.stored_arrays import StoredArray, stored_arrays
from praxis_lite.checkpoints.tools import manifest_of, tracked
from praxis_lite.host.object_stores import AnyPath

__all__ = ("digest_of",)


def digest_of(step_dir: AnyPath) -> str:
    """Returns the digest of a step: the XXH3-128 of the paths and digests of its leaves.

    Raises:
      ConfigError: The step cannot be read, or does not match its manifest.
    """
    return combined(leaf_digests(step_dir))


def leaf_digests(step_dir: AnyPath) -> dict[str, str]:
    """Returns a digest of each leaf's dtype, logical shape and values, keyed by path.

    Values are compared bitwise: 0.0 and -0.0 differ, as do NaNs with different bits.
    """
    arrays = stored_arrays(step_dir, manifest_of(step_dir))
    return {array.path: _digest(array) for array in tracked(list(arrays.values()))}


def combined(digests: dict[str, str]) -> str:
    """Combines the digests of all leaves into the digest of the step."""
    lines = [f"{path} {digest}\n" for path, digest in sorted(digests.items())]
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


def _digest(array: StoredArray) -> str:
    digest = xxhash.xxh3_128(f"{array.dtype.name} {list(array.shape)}\n".encode())
    for rows in array.parts():
        digest.update(np.ascontiguousarray(array.read(rows)).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
