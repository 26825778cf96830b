"""Numbers in a text, many at once: Python's `float` takes longer than all else of a report."""

import json

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from praxis_lite.run.trainer.metrics.json_lines import with_non_finite

# No float64 that Python writes is longer.
WIDTH = 24
# Of each character, its distance from the last.
_FROM_END = np.arange(WIDTH)[::-1]
# By the size of a number: 255 where it has a character, 0 before it.
_KEPT = np.where(np.arange(WIDTH + 1)[:, None] > _FROM_END, 255, 0).astype(np.uint8)
_TENS = 10.0 ** np.arange(WIDTH + 100)
_WHOLE_TENS = 10 ** np.minimum(np.arange(WIDTH + 1), 19).astype(np.uint64)  # No number has more.


def decimal_numbers(text: bytes, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns the number in each part of a text, NaN for JSON that is no number.

    They are those of Python's `float` up to 15 digits. Of more digits they may differ by two units
    in the last place, and so are the same float32.

    Args:
      text: ASCII, at least where the parts are.
      starts: where the parts begin in it, of shape (number of parts,).
      ends: where they end.

    Returns:
      float64, of shape (number of parts,).

    Raises:
      ValueError: a part is not JSON.
    """
    padded = np.frombuffer(bytes(WIDTH) + text, np.uint8)
    exponents = _negative_exponents(padded, starts, ends)
    mantissa_ends = ends - np.where(exponents > 0, len("e-05"), 0)
    sizes = mantissa_ends - starts
    characters = sliding_window_view(padded, WIDTH)[mantissa_ends]
    characters &= _KEPT[np.minimum(sizes, WIDTH)]
    is_negative = padded[starts + WIDTH] == ord("-")
    is_point = characters == ord(".")
    num_points = _counts(is_point)
    num_decimals = np.where(num_points > 0, WIDTH - 1 - is_point.argmax(1), 0)
    digits = characters - np.uint8(ord("0"))
    is_digit = digits < 10
    num_digits = _counts(is_digit)
    digits *= is_digit
    first, second, third = _eight_digits(digits.view("<u8")).T
    # With a 0 in place of the point.
    whole = first * np.uint64(10**16) + second * np.uint64(10**8) + third
    before, behind = np.divmod(whole, _WHOLE_TENS[num_decimals + num_points])
    # Without its point a number of 15 digits is exact, and so is the power of ten of a number that
    # is not tiny: the quotient is its float.
    numbers = (before * _WHOLE_TENS[num_decimals] + behind) / _TENS[num_decimals + exponents]
    numbers[is_negative] *= -1
    is_plain = (
        (first < 1_000) & (num_digits > 0) & (num_digits + num_points + is_negative == sizes)
        & (num_points == (num_decimals > 0))
    )
    # With another exponent, or words.
    others = np.flatnonzero(~is_plain)
    bounds = zip(starts[others].tolist(), ends[others].tolist(), strict=True)
    values = json.loads(b"[" + b",".join([text[start:end] for start, end in bounds]) + b"]")
    if len(values) != len(others):
        raise ValueError("a part is a piece of a list")
    numbers[others] = [number_or_nan(value) for value in values]
    return numbers


def _counts(is_set: np.ndarray) -> np.ndarray:
    """Returns how many of each row's flags are set: eight at once, as the bits of an integer."""
    first, second, third = np.bitwise_count(is_set.view(np.uint64)).T
    return first + second + third


def _eight_digits(words: np.ndarray) -> np.ndarray:
    """Returns the number whose eight digits are the bytes of a word, the first byte first.

    Neighbours are joined, then pairs, then fours: D. Lemire, "Quickly parsing eight digits", 2018.
    """
    twos = words * np.uint64(10) + (words >> np.uint64(8))
    even, odd = np.uint64(0xFF000000FF), np.uint64(16)
    fours = (twos & even) * np.uint64(100 + (1_000_000 << 32))
    return (fours + ((twos >> odd) & even) * np.uint64(1 + (10_000 << 32))) >> np.uint64(32)


def _negative_exponents(padded: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns the exponent 5 of "1.5e-05" by part, 0 for a part without such an exponent."""
    is_one = (ends - starts > 4) & (padded[ends + WIDTH - 4] == ord("e"))
    is_one &= padded[ends + WIDTH - 3] == ord("-")
    tens, units = (padded[ends + WIDTH - place] - np.uint8(ord("0")) for place in (2, 1))
    is_one &= (tens < 10) & (units < 10)
    return np.where(is_one, 10 * tens.astype(np.int64) + units, 0)


def is_number(value: object) -> bool:
    """Returns True for a number in a line of metrics.jsonl, finite or not."""
    return isinstance(with_non_finite(value), int | float)


def number_or_nan(value: object) -> float:
    """Returns a value in a line of metrics.jsonl as a float, NaN if it is no number."""
    if isinstance(value, float):
        return value
    try:
        return float(with_non_finite(value)) if is_number(value) else np.nan
    except OverflowError:  # An int beyond all floats.
        return np.inf if value > 0 else -np.inf
