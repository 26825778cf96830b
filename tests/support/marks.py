"""Marks of parametrized tests."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Returns the values as parameters, which are slow tests but for some."""
    return [
        pytest.param(one, marks=() if one in quick else pytest.mark.slow) for one in values
    ]
