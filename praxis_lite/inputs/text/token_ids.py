"""Validates token ids, positions and counts that users pass to the Python API."""

from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError, shortened

__all__ = ("checked_int", "token_ids")

_MAX = 2**31 - 1


def token_ids(
    ids: Any,
    name: str,
    size: int | None = None,
    *,
    ndim: int = 2,
    counts: np.ndarray | None = None,
) -> np.ndarray:
    """Validates token ids or positions, and returns them as an int32 array.

    Args:
      ids: A nonempty array or nonempty lists of integers.
      name: Name of the argument for error messages, such as "logits: ids".
      size: Vocabulary size, or number of positions. If None, any non-negative int32 is valid.
      ndim: Expected rank.
      counts: Bool array of the same shape, False for padding. Negative numbers in padding are
        replaced by 0.

    Raises:
      ConfigError: A number is out of range, or the rank or dtype of the array is wrong.
    """
    x = np.asarray(ids)
    if x.ndim != ndim or not x.size or x.dtype.kind not in "iu":
        rank = ", ".join("BTDE"[:ndim] if ndim > 1 else "T")
        raise ConfigError(f"{name} is {x.dtype}{list(x.shape)}; expected a nonempty int[{rank}].")
    largest = _MAX if size is None else size - 1
    is_wrong = (x < 0) | (x > largest)
    if counts is not None:
        # In padding, negative numbers are allowed, but too large numbers are not.
        is_wrong &= counts | (x > largest)
    for index in np.argwhere(is_wrong)[:1]:
        raise ConfigError(
            f"{name} has {x[tuple(index)]} at {index.tolist()}; expected numbers from 0 to "
            f"{largest}."
        )
    return np.maximum(x, 0).astype(np.int32)


def checked_int(value: Any, name: str, minimum: int, maximum: int = _MAX) -> int:
    """Returns an int; raises ConfigError unless `value` is an integer in the given range."""
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or not minimum <= value <= maximum:
        raise ConfigError(
            f"{name} is {shortened(repr(value))}; expected an integer from {minimum} to {maximum}."
        )
    return int(value)
