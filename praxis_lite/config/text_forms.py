"""A field's value as the text that `--set` takes for it."""

from typing import Any

from praxis_lite.config.callables import text_of
from praxis_lite.config.paths import Unknown, describe, holds_only_literals
from praxis_lite.config.values import format_value

_PLAIN = (bool, int, float, str, bytes, complex, type(None))


def text_of_value(value: Any, annotation: Any) -> str | None:
    """Returns the text behind `path=`, which `--set` turns into the same value; or None.

    None where the value is not there to be seen, where it holds configs that have lines of their
    own, and where it is a default that has no name.
    """
    if isinstance(value, Unknown):
        return None
    if not holds_only_literals(value):
        return text_of(value)
    text = format_value(value, annotation)
    if text is None and _is_plain(value):
        return repr(value)  # Of another type than its annotation says.
    return text


def shown_value(value: Any, annotation: Any) -> str:
    """Returns the text for a message: that of `--set`, or what the value is."""
    text = text_of_value(value, annotation)
    return describe(value) if text is None else text


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(one) for pair in value.items() for one in pair)
    if type(value) in (list, tuple, set, frozenset):
        return all(_is_plain(one) for one in value)
    return type(value) in _PLAIN
