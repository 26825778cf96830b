"""Many small cases in one test: it runs them all, and names each that fails."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def assert_each(check: Callable[[Any], None], cases: Iterable[tuple[str, Any]]) -> None:
    """Runs `check` on each (name, case); the error has a line for each that failed.

    For cases that take no time: a test of its own for each would take more than the case.
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
