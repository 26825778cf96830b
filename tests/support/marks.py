"""Pytest marks and parameters with marks."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from praxis_lite.host.optional_packages import is_installed

needs_tensorflow = pytest.mark.skipif(
    not is_installed("tensorflow"),
    reason="tensorflow is not installed",
)
needs_tokamax = pytest.mark.skipif(not is_installed("tokamax"), reason="tokamax is not installed")
needs_lm_eval = pytest.mark.skipif(not is_installed("lm_eval"), reason="lm_eval is not installed")


def slow_but(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Returns the values as parameters; all except those in `quick` are marked slow."""
    return [
        pytest.param(value, marks=() if value in quick else pytest.mark.slow) for value in values
    ]


def slow_or_nightly(
    quick: Collection[Any], slow: Collection[Any], values: Iterable[Any]
) -> list[Any]:
    """Returns the values as parameters: quick, slow, or else nightly."""

    def marks(value: Any) -> tuple[Any, ...]:
        if value in quick:
            return ()
        return (pytest.mark.slow,) if value in slow else (pytest.mark.nightly,)

    return [pytest.param(value, marks=marks(value)) for value in values]


def nightly_but(others: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Returns the values as parameters, marked nightly except those in `others`.

    Tuples are unpacked to several parameters.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in others else pytest.mark.nightly,
        )
        for value in values
    ]


def every(step: int, values: Iterable[Any]) -> list[Any]:
    """Returns the values as parameters; every `step`-th value is quick, and the others are slow."""
    values = list(values)
    return slow_but(values[::step], values)
