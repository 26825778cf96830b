"""Paths of a tree's leaves as strings, such as "params/softmax/w", and patterns to match them."""

import re
from collections.abc import Callable
from typing import Any

import jax

from praxis_lite.core.errors import ConfigError

__all__ = ("leaves_with_path", "path_of")


class BadPattern(ConfigError, re.error):
    """A pattern that is not a valid regular expression."""

    __init__ = Exception.__init__  # The constructor of re.error requires other arguments.


def path_of(keys: tuple[Any, ...]) -> str:
    """Converts the JAX keys of a leaf to a path, joined by "/"."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def leaves_with_path(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[str, Any]]:
    """Returns (path, leaf) for each leaf of a tree; for `is_leaf`, see `jax.tree.leaves`."""
    return [(path_of(keys), x) for keys, x in jax.tree.leaves_with_path(tree, is_leaf=is_leaf)]


def path_pattern(setting: str, pattern: Any) -> re.Pattern[str]:
    """Compiles a regular expression from a setting.

    Raises:
      BadPattern: The pattern is not a valid regular expression. BadPattern is also a re.error.
    """
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise BadPattern(
            f"{setting}: {pattern!r} is not a valid regular expression: {error}. Fix the pattern."
        ) from error
