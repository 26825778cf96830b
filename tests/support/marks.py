"""Marks of tests."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from praxis_lite.host.optional_packages import is_installed

needs_tensorflow = pytest.mark.skipif(
    not is_installed("tensorflow"), reason="there is no tensorflow, as on Python 3.14"
)
needs_tokamax = pytest.mark.skipif(not is_installed("tokamax"), reason="there is no tokamax")
needs_lm_eval = pytest.mark.skipif(not is_installed("lm_eval"), reason="there is no lm_eval")


def slow_but(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Returns the values as parameters, which are slow tests but for some."""
    return [
        pytest.param(value, marks=() if value in quick else pytest.mark.slow) for value in values
    ]


def slow_or_nightly(
    quick: Collection[Any], slow: Collection[Any], values: Iterable[Any]
) -> list[Any]:
    """Returns the values as parameters: some quick, some slow, and all others nightly."""

    def marks(value: Any) -> tuple[Any, ...]:
        if value in quick:
            return ()
        return (pytest.mark.slow,) if value in slow else (pytest.mark.nightly,)

    return [pytest.param(value, marks=marks(value)) for value in values]


def nightly_but(others: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Returns the values as parameters, nightly tests but for some; a tuple is several of them."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in others else pytest.mark.nightly,
        )
        for value in values
    ]


def every(step: int, values: Iterable[Any]) -> list[Any]:
    """Returns the values as parameters, of which the first and each `step`-th after it is quick."""
    values = list(values)
    return slow_but(values[::step], values)
