"""Converts fields to text and back, including functions and classes by their names.

A name such as `optax.lion` is the function or class itself, with the fields below it as its
settings (a template, an optimizer). With `()`, as in `optax.constant_schedule()`, it is the result
of the call, and becomes a config.
"""

import collections.abc
import functools
import typing
from collections.abc import Collection
from typing import Any

import fiddle as fdl

from praxis_lite.config.names import name_of, named, names_in
from praxis_lite.config.paths import Unknown, describe, holds_only_literals, settings_of
from praxis_lite.config.values import UNKNOWN, format_value, is_plain, union_parts
from praxis_lite.core.errors import did_you_mean


def text_of_value(value: Any, annotation: Any) -> str | None:
    """Returns the text after `path=` that `--set` turns into the same value, or None.

    None if the value is not known, if it contains configs, which have separate lines, or if it is a
    default without a name.
    """
    if isinstance(value, Unknown):
        return None
    if not holds_only_literals(value):
        return _full_name(value)
    text = format_value(value, annotation)
    # A value that does not match its annotation is written as well.
    return format_value(value, UNKNOWN) if text is None else text


def shown_value(value: Any, annotation: Any) -> str:
    """Returns the text for a message: that of `--set`, or a description of the value."""
    text = text_of_value(value, annotation)
    return describe(value) if text is None else text


def _full_name(value: Any) -> str | None:
    # A dataclass instance is written as the call that makes it, with `()`, like a Config.
    symbol = None if isinstance(value, fdl.Buildable | functools.partial) else name_of(value)
    if symbol is not None:
        return ".".join(symbol)
    settings = settings_of(value)
    symbol = None if settings is None else name_of(fdl.get_callable(settings))
    if symbol is None:
        return None
    return ".".join(symbol) + ("()" if isinstance(settings, fdl.Config) else "")


def parse_callable(text: str, present: Any, annotation: Any, packages: Collection[str]) -> Any:
    """Returns the function, class or config that `text` names, or None.

    Args:
        text: A name, full or bare (see `names.named`), with `()` or without.
        present: The present value: a Config is replaced by a Config, a Partial by a Partial.
        annotation: Of the field; if it is a class, the result is a Config of the instance.
        packages: Top-level packages whose functions and classes it may name.
    """
    name, is_called = text.removesuffix("()"), text.endswith("()")
    value = named(name, packages, _places(present, annotation))
    if value is None or (is_called and not callable(value)):
        return None
    if not is_called and value is _function(present):
        return present  # With the settings that it has.
    if is_called or isinstance(present, fdl.Config) or takes(annotation) == "instance":
        return fdl.Config(value)
    return fdl.Partial(value) if isinstance(present, fdl.Partial) else value


def takes(annotation: Any) -> str | None:
    """Returns "function" or "instance" if code makes the annotation's values; None if text does."""
    if any(kind in (collections.abc.Callable, type) for kind in _kinds(annotation)):
        return "function"
    return "instance" if _classes(annotation) else None


def suggestion(text: str, present: Any, annotation: Any) -> str:
    """Returns ' Did you mean lion?' with names that may replace `present`, or ''."""
    if {int, float, str, bool} & set(_kinds(annotation)):
        return ""  # No name may have been meant.
    return did_you_mean(text.removesuffix("()"), names_in(_places(present, annotation)))


def _places(present: Any, annotation: Any) -> list[str]:
    """Returns the modules in which a bare name is looked up first."""
    symbol = name_of(_function(present))
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
