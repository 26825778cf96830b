"""Converts a user's arrays to leaves of a batch: numbers of at most 32 bits, with weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError


def with_weights(leaves: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns `leaves` with `weights`: if absent, 1.0 per label, or per row without labels."""
    if "weights" in leaves:
        return dict(leaves)
    shape = leaves["labels"].shape if "labels" in leaves else next(iter(leaves.values())).shape[:1]
    return {**leaves, "weights": np.ones(shape, np.float32)}


def narrow(owner: str, name: str, leaf: np.ndarray) -> np.ndarray:
    """Returns the leaf `name` with 64-bit numbers converted to 32 bits, as in JAX.

    Raises:
        ConfigError: it is not numeric, or an integer is too large; names the pipeline `owner`.
    """
    require_numbers(owner, name, leaf)
    dtype = narrow_dtype(leaf.dtype)
    if dtype == leaf.dtype:
        return leaf
    if leaf.dtype.kind in "iu" and leaf.size:
        bounds = np.iinfo(dtype)
        if leaf.min() < bounds.min or leaf.max() > bounds.max:
            raise ConfigError(
                f"{owner}: the array {name!r} holds {leaf.dtype} numbers from {leaf.min()} to "
                f"{leaf.max()}, which exceeds {bounds.dtype}. Scale them, or use floats."
            )
    return leaf.astype(dtype)


def require_numbers(owner: str, name: str, leaf: np.ndarray) -> None:
    """Raises ConfigError, which names the pipeline `owner`, if a leaf is not numeric."""
    if leaf.dtype.kind in "OSUMm":
        raise ConfigError(
            f"{owner}: the array {name!r} holds {leaf.dtype}; expected numbers. Encode it as "
            "integers or floats, or leave it out."
        )


def narrow_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype of the result of `narrow`."""
    narrower = {"int64": np.int32, "uint64": np.uint32, "float64": np.float32}
    return np.dtype(narrower.get(dtype.name, dtype))


def padded_rows(
    owner: str, where: str, batch: Mapping[str, np.ndarray], batch_size: int
) -> dict[str, np.ndarray]:
    """Returns the leaves of `batch` as 32 bits, with weights, padded with zeros to batch_size rows.

    Raises:
        ConfigError: leaves differ in their rows, or have too many; names the pipeline `owner` and
            the function `where` they come from.
    """
    leaves = with_weights({n: narrow(owner, n, leaf) for n, leaf in batch.items()})
    num_rows = {name: len(leaf) for name, leaf in leaves.items()}
    if len(set(num_rows.values())) != 1 or max(num_rows.values()) > batch_size:
        raise ConfigError(
            f"{owner}: a batch of {where} has these numbers of rows: {num_rows}; they must be the "
            f"same, and at most batch_size, {batch_size}."
        )
    num_missing = batch_size - num_rows["weights"]
    if not num_missing:
        return leaves
    return {
        name: np.concatenate([leaf, np.zeros((num_missing, *leaf.shape[1:]), leaf.dtype)])
        for name, leaf in leaves.items()
    }


def stacked(
    owner: str, where: str, elements: Sequence[Any], num_rows: int
) -> dict[str, np.ndarray]:
    """Stacks examples to the rows of a batch; see `padded_rows`.

    Args:
        elements: one or more dicts of arrays or numbers, all with the same names and shapes.

    Raises:
        ConfigError: they differ; names the pipeline `owner` and `where` they come from.
    """
    for element in elements:
        is_dict = isinstance(element, Mapping)
        if not is_dict or element.keys() != elements[0].keys():
            kind = (
                f"a dict of {sorted(map(str, element))}" if is_dict
                else f"a {type(element).__name__}"
            )
            raise ConfigError(
                f"{owner}: an element of {where} is {kind}; expected a dict of arrays or numbers "
                "with the same names in each, such as {'ids': ..., 'labels': ...}. Return one from "
                "a map."
            )
    leaves = {}
    for name in elements[0]:
        arrays = [np.asarray(element[name]) for element in elements]
        if len({array.shape for array in arrays}) > 1:
            raise ConfigError(
                f"{owner}: {name!r} of {where} has the shapes "
                f"{sorted({array.shape for array in arrays})}; they must be equal. Pad or cut it "
                "with a map."
            )
        leaves[name] = np.stack(arrays)
    return padded_rows(owner, where, leaves, num_rows)
