"""A user's arrays as they stand in a batch: numbers of at most 32 bits, with weights."""

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
    """Returns the leaf `name` with 64-bit numbers as 32-bit, as JAX would make them.

    Raises:
        ConfigError: it holds no numbers, or integers too large; names the pipeline `owner`.
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
                f"{leaf.max()}, which {bounds.dtype} cannot hold. Scale them, or give floats."
            )
    return leaf.astype(dtype)


def require_numbers(owner: str, name: str, leaf: np.ndarray) -> None:
    """Raises ConfigError, which names the pipeline `owner`, if a leaf holds no numbers."""
    if leaf.dtype.kind in "OSUMm":
        raise ConfigError(
            f"{owner}: the array {name!r} holds {leaf.dtype}; numbers were wanted. Encode it as "
            "integers or floats, or leave it out."
        )


def narrow_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype that `narrow` gives."""
    narrower = {"int64": np.int32, "uint64": np.uint32, "float64": np.float32}
    return np.dtype(narrower.get(dtype.name, dtype))


def filled(
    owner: str, where: str, batch: Mapping[str, np.ndarray], batch_size: int
) -> dict[str, np.ndarray]:
    """Returns the leaves of `batch`, narrow, with weights, and with zero rows up to batch_size.

    Raises:
        ConfigError: leaves differ in their rows, or have too many; names the pipeline `owner` and
            the function `where` they come from.
    """
    leaves = with_weights({n: narrow(owner, n, leaf) for n, leaf in batch.items()})
    num_rows = {name: len(leaf) for name, leaf in leaves.items()}
    if len(set(num_rows.values())) != 1 or max(num_rows.values()) > batch_size:
        raise ConfigError(
            f"{owner}: a batch of {where} has the rows {num_rows}; all must be the same, and at "
            f"most batch_size, which is {batch_size}."
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
    """Returns examples as the rows of a batch, as `filled` does.

    Args:
        elements: one or more dicts of arrays or numbers, which all have the same names and shapes.

    Raises:
        ConfigError: they do not; names the pipeline `owner` and `where` they come from.
    """
    for item in elements:
        if not isinstance(item, Mapping) or item.keys() != elements[0].keys():
            is_dict = isinstance(item, Mapping)
            kind = f"a dict of {sorted(map(str, item))}" if is_dict else f"a {type(item).__name__}"
            raise ConfigError(
                f"{owner}: an element of {where} is {kind}; wanted is a dict of arrays or "
                "numbers by name, the same names in each, such as {'ids': ..., 'labels': ...}. "
                "Make one with a map."
            )
    leaves = {}
    for name in elements[0]:
        arrays = [np.asarray(element[name]) for element in elements]
        if len({array.shape for array in arrays}) > 1:
            raise ConfigError(
                f"{owner}: {name!r} of {where} has the shapes "
                f"{sorted({one.shape for one in arrays})}; all must be alike. Pad or cut it with a "
                "map."
            )
        leaves[name] = np.stack(arrays)
    return filled(owner, where, leaves, num_rows)
