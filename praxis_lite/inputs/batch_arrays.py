"""Converts user arrays to batch leaves: at most 32 bits per number, plus a `weights` leaf."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError

NOT_NUMBERS = "OSUMm"  # NumPy's kinds of dtypes for objects, strings and times.


def with_weights(leaves: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Adds `weights` of 1.0 to a batch without weights.

    The weights have the shape of `labels`, or [rows] if the batch has no `labels`.
    """
    if "weights" in leaves:
        return dict(leaves)
    shape = leaves["labels"].shape if "labels" in leaves else next(iter(leaves.values())).shape[:1]
    return {**leaves, "weights": np.ones(shape, np.float32)}


def narrow(owner: str, name: str, leaf: np.ndarray) -> np.ndarray:
    """Converts a leaf of 64-bit numbers to 32 bits, as JAX does by default.

    Args:
        owner: Name of the pipeline, for the error message.
        name: Name of the leaf, for the error message.
        leaf: The array to convert.

    Raises:
        ConfigError: The leaf is not numeric, or an integer does not fit into 32 bits.
    """
    require_numbers(owner, name, leaf)
    dtype = narrow_dtype(leaf.dtype)
    if dtype == leaf.dtype:
        return leaf
    if leaf.dtype.kind in "iu" and leaf.size:
        bounds = np.iinfo(dtype)
        if leaf.min() < bounds.min or leaf.max() > bounds.max:
            raise ConfigError(
                f"{owner}: the array {name!r} has {leaf.dtype} values from {leaf.min()} to "
                f"{leaf.max()}, which do not fit into {bounds.dtype}. Scale them or use floats."
            )
    return leaf.astype(dtype)


def require_numbers(owner: str, name: str, leaf: np.ndarray) -> None:
    """Raises ConfigError if the leaf `name` of the pipeline `owner` is not numeric."""
    if leaf.dtype.kind in NOT_NUMBERS:
        raise ConfigError(
            f"{owner}: the array {name!r} has the dtype {leaf.dtype}; expected numbers. Encode it "
            "as integers or floats, or remove it."
        )


def narrow_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype to which `narrow` converts `dtype`."""
    narrower = {"int64": np.int32, "uint64": np.uint32, "float64": np.float32}
    return np.dtype(narrower.get(dtype.name, dtype))


def padded_rows(
    owner: str, where: str, batch: Mapping[str, np.ndarray], batch_size: int
) -> dict[str, np.ndarray]:
    """Narrows the leaves to 32 bits, adds `weights`, and pads with zeros to `batch_size` rows.

    Args:
        owner: Name of the pipeline, for the error message.
        where: Name of the function that returned the batch, for the error message.
        batch: Arrays with at most `batch_size` rows.
        batch_size: Number of rows to return.

    Raises:
        ConfigError: The leaves differ in their number of rows, or have more than `batch_size` rows.
    """
    leaves = with_weights({n: narrow(owner, n, leaf) for n, leaf in batch.items()})
    num_rows = {name: len(leaf) for name, leaf in leaves.items()}
    if len(set(num_rows.values())) != 1 or max(num_rows.values()) > batch_size:
        raise ConfigError(
            f"{owner}: the leaves of a batch from {where} have {num_rows} rows; expected the same "
            f"number in each, at most batch_size={batch_size}."
        )
    num_missing = batch_size - num_rows["weights"]
    if not num_missing:
        return leaves
    return {
        name: np.concatenate([leaf, np.zeros((num_missing, *leaf.shape[1:]), leaf.dtype)])
        for name, leaf in leaves.items()
    }


def stack_examples(
    owner: str, where: Callable[[int], str], elements: Sequence[Any], num_rows: int
) -> dict[str, np.ndarray]:
    """Stacks examples into a batch and pads it to `num_rows` rows; see `padded_rows`.

    Args:
        owner: Name of the pipeline, for the error message.
        where: Returns the origin of the element at an index, for the error message.
        elements: One or more dicts of arrays or numbers, all with the same names and shapes.
        num_rows: Number of rows to return.

    Raises:
        ConfigError: An element is not a dict of numbers, or two differ in their names or shapes.
    """
    for n, element in enumerate(elements):
        if not isinstance(element, Mapping):
            raise ConfigError(
                f"{owner}: {where(n)} is a {type(element).__name__}; expected a dict of arrays or "
                "numbers, such as {'ids': ..., 'labels': ...}. Add a map that returns such dicts."
            )
        if element.keys() != elements[0].keys():
            raise ConfigError(
                f"{owner}: {where(n)} has the keys {sorted(map(str, element))}, but {where(0)} has "
                f"{sorted(map(str, elements[0]))}; expected the same keys in every example. Fix "
                "the data, or add a map that returns the same keys."
            )
    leaves = {}
    for name in elements[0]:
        arrays = [np.asarray(element[name]) for element in elements]
        for n, array in enumerate(arrays):
            if array.shape != arrays[0].shape:
                raise ConfigError(
                    f"{owner}: {name!r} has the shape {array.shape} in {where(n)}, but "
                    f"{arrays[0].shape} in {where(0)}; expected the same shape in every example. "
                    "Fix the data, or pad or crop it with a map."
                )
            if array.dtype.kind in NOT_NUMBERS:
                require_numbers(f"{owner}: {where(n)}", name, array)
        leaves[name] = np.stack(arrays)
    return padded_rows(owner, owner, leaves, num_rows)
