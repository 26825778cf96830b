"""Token ids, positions and masks as a caller in Python gives them: checked, as int32 arrays."""

from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError, shown

_MOST = 2**31 - 1


def token_ids(
    given: Any, what: str, size: int | None = None, *, ndim: int = 2,
    counts: np.ndarray | None = None, kind: str = "ids",
) -> np.ndarray:
    """Returns int32 numbers from 0 to `size - 1`.

    Args:
      given: lists or an array of integers, with something in each dim.
      what: names the argument in messages, "logits: ids".
      size: of the vocabulary, or the number of positions; None: what int32 has.
      counts: bool, of the same shape; where it is False a number below 0 is padding, and becomes 0.
      kind: "ids" or "positions", for messages.

    Raises:
      ConfigError: it is something else; names the first number that is not there.
    """
    expected = f"whole numbers, int[{', '.join('BTDE'[:ndim] if ndim > 1 else 'T')}]"
    try:
        x = np.asarray(given)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{what} cannot be an array ({shown(str(error))}); wanted are {expected}, with rows of "
            "one length. Pad them, and say so by a mask."
        ) from None
    if x.ndim != ndim or not x.size or x.dtype.kind not in "iu":
        raise ConfigError(
            f"{what} is {x.dtype}{list(x.shape)}; wanted are {expected}, at least one of them."
        )
    most = _MOST if size is None else size - 1
    is_wrong = (x < 0) | (x > most)
    if counts is not None:
        is_wrong &= counts | (x > most)
    for place in np.argwhere(is_wrong)[:1]:
        of = "" if size is None else f", for the model has {size}"
        raise ConfigError(
            f"{what} has {x[tuple(place)]} at {place.tolist()}; wanted are {kind} from 0 to "
            f"{most}{of}."
        )
    return np.maximum(x, 0).astype(np.int32)


def padding_mask(given: Any, what: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns bool of a shape: True for tokens that are seen.

    Raises:
      ConfigError: it is not of this shape, or has something else than 0 and 1.
    """
    try:
        x = np.asarray(given)
    except (TypeError, ValueError, OverflowError):
        x = np.asarray(None)
    if x.dtype.kind not in "biuf" or x.shape != shape or not np.isin(x, (0, 1)).all():
        raise ConfigError(
            f"{what} is {x.dtype}{list(x.shape)}; wanted is an array {list(shape)} as ids have it, "
            "of 1 for tokens and 0 for padding."
        )
    return x != 0


def whole_number(given: Any, what: str, least: int, most: int = _MOST) -> int:
    """Returns a number of Python. Raises ConfigError if it is none of these."""
    is_whole = isinstance(given, int | np.integer) and not isinstance(given, bool)
    if not is_whole or not least <= given <= most:
        raise ConfigError(
            f"{what} is {shown(repr(given))}; wanted is a whole number from {least} to {most}."
        )
    return int(given)
