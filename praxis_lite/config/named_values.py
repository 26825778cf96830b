"""Converts field values to text and back. Functions and classes are written as names.

A name such as `optax.lion` refers to the function or class itself, for example a template or an
optimizer; the fields below its path are its settings. A name with `()`, such as
`optax.constant_schedule()`, refers to the result of a call and becomes a config.
"""

import collections.abc
import functools
import typing
from collections.abc import Collection
from typing import Any

import fiddle as fdl

from praxis_lite.config.literals import UNKNOWN, format_value, is_plain, union_parts
from praxis_lite.config.names import name_of, named, names_in
from praxis_lite.config.paths import Unknown, describe, holds_only_literals, settings_of
from praxis_lite.core.errors import did_you_mean


def text_of_value(value: Any, annotation: Any) -> str | None:
    """Returns the text from which `--set` restores a value; None if there is no such text.

    The result is None if the value is unknown, contains configs (which have separate lines), or is
    a default without a name.
    """
    if isinstance(value, Unknown):
        return None
    if not holds_only_literals(value):
        return _full_name(value)
    text = format_value(value, annotation)
    # Also convert values that do not match their annotations.
    return format_value(value, UNKNOWN) if text is None else text


def shown_value(value: Any, annotation: Any) -> str:
    """Returns the `--set` text of a value for messages, or a description if there is none."""
    text = text_of_value(value, annotation)
    return describe(value) if text is None else text


def _full_name(value: Any) -> str | None:
    # A dataclass instance is written like a Config, as the call that creates it.
    symbol = None if isinstance(value, fdl.Buildable | functools.partial) else name_of(value)
    if symbol is not None:
        return ".".join(symbol)
    settings = settings_of(value)
    symbol = None if settings is None else name_of(fdl.get_callable(settings))
    if symbol is None:
        return None
    return ".".join(symbol) + ("()" if isinstance(settings, fdl.Config) else "")


def parse_callable(text: str, current: Any, annotation: Any, packages: Collection[str]) -> Any:
    """Resolves a name to a function, class or config; returns None if the name is unknown.

    Args:
        text: A full or bare name (see `names.named`), with or without `()`.
        current: The current value. A Config is replaced by a Config, and a Partial by a Partial.
        annotation: Annotation of the field. If it is a class, the result is a Config.
        packages: Top-level packages whose functions and classes may be used.
    """
    name, is_called = text.removesuffix("()"), text.endswith("()")
    value = named(name, packages, _modules_to_search(current, annotation))
    if value is None or (is_called and not callable(value)):
        return None
    if not is_called and value is _function(current):
        return current  # Keep the current settings.
    if is_called or isinstance(current, fdl.Config) or object_kind(annotation) == "instance":
        return fdl.Config(value)
    return fdl.Partial(value) if isinstance(current, fdl.Partial) else value


def object_kind(annotation: Any) -> str | None:
    """Returns the kind of values that a type accepts: "function", "instance" or None (literals)."""
    if any(kind in (collections.abc.Callable, type) for kind in _kinds(annotation)):
        return "function"
    return "instance" if _classes(annotation) else None


def suggestion(text: str, current: Any, annotation: Any) -> str:
    """Returns a hint such as ' Did you mean lion?' with similar names, or ''."""
    if {int, float, str, bool} & set(_kinds(annotation)):
        return ""  # The text may not have been meant as a name.
    return did_you_mean(text.removesuffix("()"), names_in(_modules_to_search(current, annotation)))


def _modules_to_search(current: Any, annotation: Any) -> list[str]:
    """Returns the modules in which to look up a bare name first."""
    symbol = name_of(_function(current))
    classes = [kind.__module__ for kind in _classes(annotation)]
    return ([] if symbol is None else [symbol[0]]) + classes


def _classes(annotation: Any) -> list[type]:
    return [kind for kind in _kinds(annotation) if isinstance(kind, type) and not is_plain(kind)]


def _kinds(annotation: Any) -> list[Any]:
    if annotation is UNKNOWN:
        return []
    return [typing.get_origin(part) or part for part in union_parts(annotation)]


def _function(value: Any) -> Any:
    if isinstance(value, fdl.Buildable):
        return fdl.get_callable(value)
    return value.func if isinstance(value, functools.partial) else value
