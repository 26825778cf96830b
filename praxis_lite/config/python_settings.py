"""Converts settings that are passed in Python (values keyed by path) to strings for `--set`."""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import fiddle as fdl

from praxis_lite.config.literals import UNKNOWN, format_value, is_bare_word, is_dtype
from praxis_lite.config.names import name_of
from praxis_lite.config.paths import holds_only_literals, join
from praxis_lite.core.errors import ConfigError, shortened

__all__ = ("Settings",)

Settings = Mapping[str, Any] | Sequence[str]


def as_texts(settings: Settings) -> tuple[str, ...]:
    """Converts settings to strings "path=value", as for `--set`.

    Args:
      settings: A list of such strings, or a mapping with values keyed by path. A value may be a
        number, string, dtype, enum member or None; a list, tuple, set or dict of these; a function
        or class that is allowed in configs; an `fdl.Config`; or a dataclass instance.

    Raises:
      ConfigError: A value cannot be converted, or `settings` has the wrong type.
    """
    if isinstance(settings, Mapping):
        return tuple(text for path, value in settings.items() for text in _texts(path, value))
    is_texts = isinstance(settings, Sequence) and not isinstance(settings, str | bytes)
    if not is_texts or not all(isinstance(text, str) for text in settings):
        raise ConfigError(
            f"settings is {shortened(repr(settings))}; expected a dict of values keyed by path, "
            "such as {'run.num_train_steps': 200}, or a list such as ['run.num_train_steps=200']."
        )
    return tuple(settings)


def _texts(path: str, value: Any) -> list[str]:
    """Returns the setting for a value; for a config, also the settings for its arguments."""
    if not isinstance(path, str):
        raise ConfigError(f"settings has the key {path!r}; expected a path, such as 'run.seed'.")
    if is_dtype(value) or isinstance(value, enum.Enum) or holds_only_literals(value):
        text = _literal(value)
        if text is None:
            raise ConfigError(f"{path}: {_refused(value)}")
        return [f"{path}={text}"]
    if (symbol := name_of(value)) is not None:
        return [f"{path}={'.'.join(symbol)}"]
    call = value if isinstance(value, fdl.Config) else _call_of(value)
    if call is None or (symbol := name_of(fdl.get_callable(call))) is None:
        raise ConfigError(f"{path}: {_refused(value)}")
    texts = [f"{path}={'.'.join(symbol)}()"]
    for name, argument in call.__arguments__.items():
        texts += _texts(join(path, name), argument)
    return texts


def _call_of(value: Any) -> fdl.Config | None:
    """Returns the config of a dataclass instance without default values, or None."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    return fdl.Config(
        type(value),
        **{
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if field.init and getattr(value, field.name) != field.default
        },
    )


def _literal(value: Any) -> str | None:
    """Returns the text of a value without functions or configs, or None."""
    value = _plain(value)
    if isinstance(value, str):
        return value if is_bare_word(value) else repr(value)
    return format_value(value, UNKNOWN)


def _plain(value: Any) -> Any:
    """Converts NumPy scalars in a value to Python numbers."""
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(map(_plain, value))
    if type(value) is dict:
        return {_plain(key): _plain(item) for key, item in value.items()}
    is_scalar = getattr(value, "shape", None) == () and hasattr(value, "item")
    return value.item() if is_scalar and not is_dtype(value) else value


def _refused(value: Any) -> str:
    return (
        f"{shortened(repr(value), 200)} cannot be stored in config.json; expected numbers, "
        "strings, None, lists and dicts of these, or functions and classes with a name, such as "
        "optax.lion, and their arguments, keyed by path. Define it at the top level of a module or "
        "notebook, or return it from a method of the experiment."
    )
