"""`--set path=value`: a field of any config, checked before anything is built."""

import dataclasses
import functools
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import fiddle as fdl

from praxis_lite.config.callables import (
    parse_callable,
    shown_value,
    suggestion,
    takes,
    text_of_value,
)
from praxis_lite.config.override_errors import check_form, expected_here, no_such_path
from praxis_lite.config.paths import (
    UNSET,
    Unknown,
    children,
    holds_only_literals,
    item_type,
    join,
    kwargs_type,
    settings_of,
)
from praxis_lite.config.values import UNKNOWN, WrongType, parse_value
from praxis_lite.core.errors import ConfigError, shown

__all__ = ("check_required",)

_TOKEN = re.compile(
    r"""\.?([^.\[\]=]+) | \[ (-?\d+) \] | \[ '([^']*)' \] | \[ "([^"]*)" \]""", re.X
)


def apply_overrides(
    config: fdl.Buildable,
    settings: Sequence[str],
    packages: Collection[str] = (),
    attributes: Collection[str] = (),
) -> list[str]:
    """Sets fields of `config` in place; returns a line 'path: old -> new' for each.

    A config that is shared by several fields is changed in all of them.

    Args:
        config: The root.
        settings: `path=value` each. A path walks the arguments of configs, the keys of dicts and
            the indices of sequences: `datasets.train.batch_size`, `mesh.ici_mesh_shape[1]` or
            `mesh.ici_mesh_shape.1`. A value is a Python literal, a bare word, items separated by
            commas, or the name of a function or class.
        packages: The user's top-level packages, whose functions and classes may be named.
        attributes: Attributes of the experiment's class, for the errors: `configured` sets them.

    Raises:
        ConfigError: There is no such path, or the value has another type than the field. Settings
            before it are applied.
    """
    for number, setting in enumerate(settings, start=1):
        check_form(setting, settings[number:])
    return [_apply(config, setting, packages, attributes) for setting in settings]


def value_at(config: fdl.Buildable, path: str, attributes: Collection[str] = ()) -> Any:
    """Returns the value at a path; raises ConfigError if there is none, as `apply_overrides`."""
    trail = _resolve(config, path)
    if trail is None:
        raise ConfigError(no_such_path(config, path, attributes))
    return trail[-1].value


def check_required(config: fdl.Buildable) -> None:
    """Checks that every `fdl.Config` has the arguments that its callable requires.

    An `fdl.Partial` may lack some: its caller gives them.

    Raises:
        ConfigError: Some are missing; names their paths.
    """
    missing = _unset_paths(config, "")
    if missing:
        raise ConfigError(
            f"{', '.join(dict.fromkeys(missing))}: required, and not set. Set it in the "
            f"experiment, or with --set {missing[0]}=VALUE."
        )


def _unset_paths(node: Any, path: str) -> list[str]:
    missing = []
    for key, value, _ in children(node, UNKNOWN):
        below = join(path, key)
        if value is UNSET and isinstance(node, fdl.Config):
            missing.append(below)
        missing += _unset_paths(value, below)
    return missing


def _apply(
    config: fdl.Buildable, setting: str, packages: Collection[str], attributes: Collection[str]
) -> str:
    path, _, text = setting.partition("=")
    path = path.strip()
    trail = _resolve(config, path)
    if trail is None:
        raise ConfigError(no_such_path(config, path, attributes))
    present, annotation = trail[-1].value, trail[-1].annotation
    path = functools.reduce(join, (step.key for step in trail), "")
    value = _checked_value(path, text, present, annotation, packages)
    change = f"{path}: {shown_value(present, annotation)} -> {shown_value(value, annotation)}"
    if value is present:
        return change
    for step in reversed(trail):
        if isinstance(step.parent, fdl.Buildable):
            _assign(step.parent, step.key, value)
            break
        value = _replaced(step.parent, step.key, value)
    return change


class _Step(NamedTuple):
    """A key of a path: the object it was looked up in, and the value there."""

    parent: Any
    key: str | int
    value: Any
    annotation: Any


def _resolve(config: fdl.Buildable, path: str) -> list[_Step] | None:
    node, annotation, trail = config, UNKNOWN, []
    for token in _split(path):
        result = _child(node, annotation, token)
        if result is None:
            return None
        trail.append(_Step(node, *result))
        _, node, annotation = result
    return trail or None


def _child(node: Any, annotation: Any, token: str) -> tuple[Any, Any, Any] | None:
    below = children(node, annotation)
    for key, value, hint in below:
        if key == token or (isinstance(key, int) and str(key) == token):
            return key, value, hint
    if isinstance(node, list | tuple) and re.fullmatch(r"-\d+", token) and below:
        index = len(below) + int(token)
        return below[index] if index >= 0 else None
    if isinstance(node, dict) and takes(hint := item_type(annotation, token)) == "instance":
        return token, UNSET, hint
    settings = settings_of(node)
    if settings is None or not token.isidentifier() or token.startswith("__"):
        return None
    hint = kwargs_type(settings)
    return None if hint is None else (token, UNSET, hint)


def _assign(config: fdl.Buildable, key: str | int, value: Any) -> None:
    if isinstance(key, int):
        config[key] = value
    else:
        setattr(config, key, value)


def _replaced(container: Any, key: str | int, value: Any) -> Any:
    # A new container, because the old one may be a default or a constant of the user's module.
    if isinstance(container, dict):
        # The other items become part of the config too, which holds no dataclass instances.
        others = {
            name: settings_of(item) or item
            if dataclasses.is_dataclass(item) and not isinstance(item, type) else item
            for name, item in container.items()
        }
        return {**others, key: value}
    if (settings := settings_of(container)) is not None:
        _assign(settings, key, value)
        return settings
    items = [*container[:key], value, *container[key + 1 :]]
    return container._make(items) if hasattr(container, "_make") else type(container)(items)


def _checked_value(
    path: str, text: str, present: Any, annotation: Any, packages: Collection[str]
) -> Any:
    text = text.strip()
    is_config = not holds_only_literals(present)
    if text == text_of_value(present, annotation) and is_config:
        return present
    may_be_named = takes(annotation) or (is_config and _is_single(present))
    is_named = is_config or "." in text or text.endswith("()")  # A bare word may be just that.
    if may_be_named and is_named:
        result = parse_callable(text, present, annotation, packages)
        if result is not None:
            return result
    try:
        if is_config and (annotation in (UNKNOWN, Any) or not _is_single(present)):
            raise WrongType("a function, a class or a config, by its name")
        return parse_value(text, annotation, None if isinstance(present, Unknown) else present)
    except WrongType as wrong:
        result = parse_callable(text, present, annotation, packages) if may_be_named else None
        if result is not None:
            return result
        if is_config and not _is_single(present):
            raise ConfigError(
                f"{path} holds configs; --set sets the fields below it one by one."
            ) from None
        hint = suggestion(text, present, annotation) if may_be_named else ""
        raise ConfigError(
            f"{path}: found {shown(repr(text), 200)}, expected "
            f"{expected_here(wrong, annotation, text, may_be_named)}. It is now "
            f"{shown_value(present, annotation)}.{hint}"
        ) from None


def _is_single(present: Any) -> bool:
    return not isinstance(present, dict | list | tuple | set | frozenset)


def _split(path: str) -> list[str]:
    """Returns the keys of a path, or [] if it is not well formed."""
    keys, at = [], 0
    while at < len(path):
        match = _TOKEN.match(path, at)
        if match is None or (at == 0) != (not match.group().startswith((".", "["))):
            return []
        keys.append(next(group for group in match.groups() if group is not None))
        at = match.end()
    return keys
