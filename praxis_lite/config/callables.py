"""Fields as text, functions and classes among them: `optax.lion`, `optax.constant_schedule()`.

A name is the function or class itself, with the fields below it as its settings (a template, an
optimizer). With `()` it is what that returns (a config of its own, such as a schedule's).
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

_PLAIN = (bool, int, float, str, bytes, complex, type(None))


def text_of_value(value: Any, annotation: Any) -> str | None:
    """Returns the text behind `path=`, which `--set` turns into the same value, or None.

    None if the value is not there to be seen, if it holds configs that have lines of their own, and
    if it is a default without a name.
    """
    if isinstance(value, Unknown):
        return None
    if not holds_only_literals(value):
        return _full_name(value)
    text = format_value(value, annotation)
    # A value of another type than its annotation says is written all the same.
    return repr(value) if text is None and _is_plain(value) else text


def shown_value(value: Any, annotation: Any) -> str:
    """Returns the text for a message: that of `--set`, or a description of the value."""
    text = text_of_value(value, annotation)
    return describe(value) if text is None else text


def _full_name(value: Any) -> str | None:
    # An instance of a dataclass stands for the call that makes it, with `()`, as a Config does.
    symbol = None if isinstance(value, fdl.Buildable | functools.partial) else name_of(value)
    if symbol is not None:
        return ".".join(symbol)
    settings = settings_of(value)
    symbol = None if settings is None else name_of(fdl.get_callable(settings))
    if symbol is None:
        return None
    return ".".join(symbol) + ("()" if isinstance(settings, fdl.Config) else "")


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    if type(value) in (list, tuple, set, frozenset):
        return all(_is_plain(element) for element in value)
    return type(value) in _PLAIN


def parse_callable(text: str, present: Any, annotation: Any, packages: Collection[str]) -> Any:
    """Returns the function, class or config that `text` names, or None.

    Args:
        text: a name, full or bare (see `names.named`), with `()` or without.
        present: what stands there: a Config or a Partial gives way to its like.
        annotation: of the field; where it is a class, a Config makes the instance.
        packages: top-level packages whose functions and classes it may name.
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
    """Returns ' Did you mean lion?' with names that may stand in the place of `present`, or ''."""
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
