"""Checks of token ids, positions and counts that a caller passes in Python."""

from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError, shown

__all__ = ("token_ids", "whole_number")

_MOST = 2**31 - 1


def token_ids(
    given: Any, what: str, size: int | None = None, *, ndim: int = 2,
    counts: np.ndarray | None = None,
) -> np.ndarray:
    """Returns int32 numbers from 0 to `size - 1`.

    Args:
      given: lists or an array of integers, not empty.
      what: names the argument in messages, "logits: ids".
      size: of the vocabulary, or the number of positions; None: any int32.
      counts: bool, of the same shape; where it is False, a negative number is padding, and becomes
        0.

    Raises:
      ConfigError: a number is out of range, or they are no integers of this rank.
    """
    x = np.asarray(given)
    if x.ndim != ndim or not x.size or x.dtype.kind not in "iu":
        rank = ", ".join("BTDE"[:ndim] if ndim > 1 else "T")
        raise ConfigError(f"{what} is {x.dtype}{list(x.shape)}; expected int[{rank}], not empty.")
    most = _MOST if size is None else size - 1
    is_wrong = (x < 0) | (x > most)
    if counts is not None:
        is_wrong &= counts | (x > most)
    for index in np.argwhere(is_wrong)[:1]:
        raise ConfigError(
            f"{what} has {x[tuple(index)]} at {index.tolist()}; expected numbers from 0 to {most}."
        )
    return np.maximum(x, 0).astype(np.int32)


def whole_number(given: Any, what: str, least: int, most: int = _MOST) -> int:
    """Returns a Python int. Raises ConfigError if it is not an integer from `least` to `most`."""
    is_whole = isinstance(given, int | np.integer) and not isinstance(given, bool)
    if not is_whole or not least <= given <= most:
        raise ConfigError(
            f"{what} is {shown(repr(given))}; expected an integer from {least} to {most}."
        )
    return int(given)
