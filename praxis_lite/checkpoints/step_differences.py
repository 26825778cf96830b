"""Compares the arrays of two steps bitwise, and their data positions, configs and versions."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from praxis_lite.checkpoints.stored_arrays import StoredArray, stored_arrays
from praxis_lite.checkpoints.tools import manifest_of, tracked
from praxis_lite.host.object_stores import AnyPath

_ORIGINS = {
    "data": "the position in the training data",
    "config_xxh3_128": "the config's digest",
    "versions": "the versions",
}


def step_differences(first: AnyPath, second: AnyPath) -> Iterator[str]:
    """Compares the values and origins of two steps.

    Mesh, specs and padding are not compared.

    Args:
      first: The folder of the first step.
      second: The folder of the second step.

    Yields:
      A line for each difference.

    Raises:
      ConfigError: A step is damaged, or does not match its manifest.
    """
    manifests = [manifest_of(step_dir) for step_dir in (first, second)]
    first_arrays, second_arrays = (
        stored_arrays(step_dir, manifest)
        for step_dir, manifest in zip((first, second), manifests, strict=True)
    )
    for key, name in _ORIGINS.items():
        yield from _origin_differences(name, *(manifest[key] for manifest in manifests))
    for path in tracked(sorted(first_arrays | second_arrays)):
        array, other = first_arrays.get(path), second_arrays.get(path)
        if array is None or other is None:
            side, only = ("second", other) if array is None else ("first", array)
            assert only is not None, "Each path is that of an array."
            yield f"{path}: only in the {side}, {only.dtype.name}{list(only.shape)}"
            continue
        if array.shape != other.shape:
            yield f"{path}: shape {list(array.shape)} and {list(other.shape)}"
        if array.dtype != other.dtype:
            yield f"{path}: dtype {array.dtype.name} and {other.dtype.name}"
        elif array.shape == other.shape:
            yield from _value_differences(path, array, other)


def _origin_differences(name: str, value: Any, other: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        for key in sorted(value.keys() | other.keys()):
            yield from _origin_differences(f"{name}: {key}", value.get(key), other.get(key))
    elif value != other:
        yield f"{name}: {_value_text(value)} and {_value_text(other)}"


def _value_text(value: Any) -> str:
    return "not known" if value in (None, "") else str(value)


def _value_differences(path: str, array: StoredArray, other: StoredArray) -> Iterator[str]:
    num_different = num_not_finite = 0
    largest: Any = 0
    for rows in array.parts():
        x, y = np.ravel(array.read(rows)), np.ravel(other.read(rows))
        # Compare bits, because NaN != NaN and -0.0 == 0.0.
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
    """Returns the number of finite pairs, and their largest absolute difference."""
    if x.dtype.kind in "bui":
        pairs = zip(x.tolist(), y.tolist(), strict=True)  # Python's integers do not overflow.
        return len(x), max((abs(int(a) - int(b)) for a, b in pairs), default=0)
    wide = np.complex128 if x.dtype.kind == "c" else np.float64
    x, y = x.astype(wide), y.astype(wide)
    finite = np.isfinite(x) & np.isfinite(y)
    return int(finite.sum()), float(np.abs(x[finite] - y[finite]).max(initial=0.0))
