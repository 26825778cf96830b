"""A model cut at its pipeline: what is before it, and what follows, each a function of its own.

While a cut is in force, a Pipeline that is called without a cache hands its arguments to it, and
returns what the cut returns. What follows the pipeline is dead code where its arguments alone are
used, and what precedes it where its results are given.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

# (pipeline, x, key, inputs) -> x.
Cut = Callable[[Any, Any, Any, dict[str, Any]], Any]

_CUT: contextvars.ContextVar[Cut | None] = contextvars.ContextVar("cut", default=None)


def cut_in_force() -> Cut | None:
    """Returns the function that stands for a pipeline's call, or None."""
    return _CUT.get()


@contextlib.contextmanager
def cutting(cut: Cut) -> Iterator[None]:
    """Puts a cut in force."""
    token = _CUT.set(cut)
    try:
        yield
    finally:
        _CUT.reset(token)
