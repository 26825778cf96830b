"""What differs between two steps: their arrays to the bit, and where they come from."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from praxis_lite.checkpoints.stored_arrays import StoredArray, stored_arrays
from praxis_lite.checkpoints.tools import manifest_of, tracked

_ORIGINS = {
    "data": "the position in the training data", "config_xxh3_128": "the config's digest",
    "versions": "the versions",
}


def step_differences(first: Path, second: Path) -> Iterator[str]:
    """Yields a line for each difference between two steps' values and origins.

    How values are stored (mesh, specs, padding) does not count.

    Raises:
      ConfigError: a step is damaged, or is not what its manifest says.
    """
    manifests = [manifest_of(step_dir) for step_dir in (first, second)]
    arrays = [stored_arrays(*element) for element in zip((first, second), manifests, strict=True)]
    for key, what in _ORIGINS.items():
        yield from _origin(what, *(manifest[key] for manifest in manifests))
    for path in tracked(sorted(arrays[0] | arrays[1])):
        item, other = (result.get(path) for result in arrays)
        if item is None or other is None:
            only, array = ("second", other) if item is None else ("first", item)
            yield f"{path}: only in the {only}, {array.dtype.name}{list(array.shape)}"
            continue
        if item.shape != other.shape:
            yield f"{path}: shape {list(item.shape)} and {list(other.shape)}"
        if item.dtype != other.dtype:
            yield f"{path}: dtype {item.dtype.name} and {other.dtype.name}"
        elif item.shape == other.shape:
            yield from _values(path, item, other)


def _origin(what: str, item: Any, other: Any) -> Iterator[str]:
    if isinstance(item, Mapping) and isinstance(other, Mapping):
        for key in sorted(item.keys() | other.keys()):
            yield from _origin(f"{what}: {key}", item.get(key), other.get(key))
    elif item != other:
        yield f"{what}: {_shown(item)} and {_shown(other)}"


def _shown(value: Any) -> str:
    return "not known" if value in (None, "") else str(value)


def _values(path: str, array: StoredArray, other: StoredArray) -> Iterator[str]:
    num_different = num_not_finite = 0
    largest: Any = 0
    for rows in array.parts():
        x, y = np.ravel(array.read(rows)), np.ravel(other.read(rows))
        bits = [np.ascontiguousarray(a).view(np.uint8).reshape(a.size, -1) for a in (x, y)]
        different = (bits[0] != bits[1]).any(axis=1)
        num_different += int(different.sum())
        finite, distance = _distance(x[different], y[different])
        num_not_finite += int(different.sum()) - finite
        largest = max(largest, distance)
    if num_different:
        shown = f"{largest:.6g}" if isinstance(largest, float) else largest
        rest = f", {num_not_finite} of them not finite" if num_not_finite else ""
        yield (
            f"{path}: {num_different} of {math.prod(array.shape)} values differ, by {shown} at most"
            f"{rest}"
        )


def _distance(x: np.ndarray, y: np.ndarray) -> tuple[int, float | int]:
    """Returns how many pairs are finite, and their largest absolute difference."""
    if x.dtype.kind in "bui":
        pairs = zip(x.tolist(), y.tolist(), strict=True)  # Python's numbers do not wrap.
        return len(x), max((abs(int(a) - int(b)) for a, b in pairs), default=0)
    wide = np.complex128 if x.dtype.kind == "c" else np.float64
    x, y = x.astype(wide), y.astype(wide)
    finite = np.isfinite(x) & np.isfinite(y)
    return int(finite.sum()), float(np.abs(x[finite] - y[finite]).max(initial=0.0))
