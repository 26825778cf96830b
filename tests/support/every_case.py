"""Runs many small cases in a single test, and lists all cases that fail."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def assert_each(check: Callable[[Any], None], cases: Iterable[tuple[str, Any]]) -> None:
    """Calls `check` for each (name, case); the error message has a line for each failed case.

    Use this for fast cases, for which the overhead of separate tests would dominate.
    """
    num_cases, failed = 0, []
    for name, case in cases:
        num_cases += 1
        try:
            check(case)
        except (Exception, pytest.fail.Exception) as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
    assert num_cases > 0, "no case"
    assert not failed, "\n".join(failed)
