"""Sets fields of a config (`--set path=value`), and checks them before anything is built."""

import dataclasses
import functools
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import fiddle as fdl

from praxis_lite.config.literals import UNKNOWN, WrongType, are_same, parse_value
from praxis_lite.config.named_values import (
    object_kind,
    parse_callable,
    shown_value,
    suggestion,
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
from praxis_lite.config.settings_file import SettingInFile
from praxis_lite.core.errors import ConfigError, shortened

__all__ = ("check_required",)

_TOKEN = re.compile(
    r"""\.?([^.\[\]=]+) | \[ (-?\d+) \] | \[ '([^']*)' \] | \[ "([^"]*)" \]""", re.X
)


def apply_overrides(
    config: fdl.Buildable,
    settings: Sequence[str],
    packages: Collection[str] = (),
    attributes: Collection[str] = (),
) -> None:
    """Sets fields of a config in place.

    A config that is shared by several fields is changed in all of them.

    Args:
        config: The root of the config.
        settings: Settings `path=value`. A path consists of config arguments, dict keys and sequence
            indices, such as `datasets.train.batch_size`, `mesh.ici_mesh_shape[1]` or
            `mesh.ici_mesh_shape.1`. A value is a Python literal, a bare word, items separated by
            commas, or the name of a function or class.
        packages: The user's top-level packages, whose functions and classes may be used.
        attributes: Attributes of the experiment's class, for error messages.

    Raises:
        ConfigError: A path does not exist, or a value has the wrong type. Earlier settings have
            already been applied.
    """
    for number, setting in enumerate(settings, start=1):
        check_form(setting, settings[number:])
    for setting in settings:
        try:
            _apply(config, setting, packages, attributes)
        except ConfigError as error:
            if isinstance(setting, SettingInFile):
                raise ConfigError(f"{setting.location}: {error}") from None
            raise


def value_at(config: fdl.Buildable, path: str, attributes: Collection[str] = ()) -> Any:
    """Returns the value at a path. Raises ConfigError if the path does not exist."""
    trail = _resolve(config, path)
    if trail is None:
        raise ConfigError(no_such_path(config, path, attributes))
    return trail[-1].value


def check_required(config: fdl.Buildable) -> None:
    """Checks that every `fdl.Config` has all required arguments of its callable.

    Arguments of an `fdl.Partial` may be missing, because its caller passes them.

    Raises:
        ConfigError: Arguments are missing. The message contains their paths.
    """
    missing = _unset_paths(config, "")
    if missing:
        raise ConfigError(
            f"Required settings are missing: {', '.join(dict.fromkeys(missing))}. Set them in the "
            f"experiment, or with --set, such as --set {missing[0]}=VALUE."
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
) -> None:
    path, _, text = setting.partition("=")
    path = path.strip()
    trail = _resolve(config, path)
    if trail is None:
        raise ConfigError(no_such_path(config, path, attributes))
    current, annotation = trail[-1].value, trail[-1].annotation
    path = functools.reduce(join, (step.key for step in trail), "")
    value = _checked_value(path, text, current, annotation, packages)
    # A default value stays unset: setting it could collide with an argument of the caller.
    if value is current or (holds_only_literals(current) and are_same(value, current)):
        return
    # Copy the containers from the inside out, up to the config that contains them, which is changed
    # in place.
    for step in reversed(trail):
        if isinstance(step.parent, fdl.Buildable):
            _assign(step.parent, step.key, value)
            return
        value = _replaced(step.parent, step.key, value)


class _Step(NamedTuple):
    """A step along a path: a key, the object in which the key was looked up, and the value."""

    parent: Any
    key: str | int
    value: Any
    annotation: Any


def _resolve(config: fdl.Buildable, path: str) -> list[_Step] | None:
    """Returns the steps along a path, or None if the path does not exist."""
    node, annotation, trail = config, UNKNOWN, []
    for token in _split(path):
        child = _child(node, annotation, token)
        if child is None:
            return None
        trail.append(_Step(node, *child))
        _, node, annotation = child
    return trail or None


def _child(node: Any, annotation: Any, token: str) -> tuple[Any, Any, Any] | None:
    below = children(node, annotation)
    for key, value, hint in below:
        if key == token or (isinstance(key, int) and str(key) == token):
            return key, value, hint
    # An index from the end.
    if isinstance(node, list | tuple) and re.fullmatch(r"-\d+", token) and below:
        index = len(below) + int(token)
        return below[index] if index >= 0 else None
    # A new item of a dict.
    if isinstance(node, dict) and object_kind(hint := item_type(annotation, token)) == "instance":
        return token, UNSET, hint
    # A new argument that the callable accepts as one of its **kwargs.
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
    """Returns a copy of a container in which the value at a key is replaced.

    The original container may be a default or a constant in the user's module.
    """
    if isinstance(container, dict):
        # Convert dataclass instances to configs, because configs contain no such instances.
        others = {
            name: settings_of(other) or other
            if dataclasses.is_dataclass(other) and not isinstance(other, type)
            else other
            for name, other in container.items()
        }
        return {**others, key: value}
    if (settings := settings_of(container)) is not None:
        _assign(settings, key, value)
        return settings
    assert isinstance(key, int), "The keys of a sequence are its indices."
    items = [*container[:key], value, *container[key + 1 :]]
    return container._make(items) if hasattr(container, "_make") else type(container)(items)


def _checked_value(
    path: str, text: str, current: Any, annotation: Any, packages: Collection[str]
) -> Any:
    """Parses the text after `path=`. Raises ConfigError if the value has the wrong type."""
    text = text.strip()
    is_config = not holds_only_literals(current)
    # The text that is shown for a config or function leaves it unchanged.
    if text == text_of_value(current, annotation) and is_config:
        return current
    may_be_named = object_kind(annotation) is not None or (is_config and _is_single(current))
    # A bare word is first tried as a string, below.
    is_named = is_config or "." in text or text.endswith("()")
    if may_be_named and is_named:
        value = parse_callable(text, current, annotation, packages)
        if value is not None:
            return value
    try:
        # A literal replaces a config only if the annotation allows it.
        if is_config and (annotation in (UNKNOWN, Any) or not _is_single(current)):
            raise WrongType("the name of a function, a class or a config")
        return parse_value(text, annotation, None if isinstance(current, Unknown) else current)
    except WrongType as wrong:
        value = parse_callable(text, current, annotation, packages) if may_be_named else None
        if value is not None:
            return value
        if is_config and not _is_single(current):
            raise ConfigError(
                f"{path} contains configs. Set the fields below it individually with --set."
            ) from None
        hint = suggestion(text, current, annotation) if may_be_named else ""
        raise ConfigError(
            f"{path}: found {shortened(repr(text), 200)}, expected "
            f"{expected_here(wrong, annotation, text, may_be_named)}. The current value is "
            f"{shown_value(current, annotation)}.{hint}"
        ) from None


def _is_single(current: Any) -> bool:
    return not isinstance(current, dict | list | tuple | set | frozenset)


def _split(path: str) -> list[str]:
    """Splits a path into keys, or returns [] if it is invalid."""
    keys, at = [], 0
    while at < len(path):
        match = _TOKEN.match(path, at)
        if match is None or (at == 0) != (not match.group().startswith((".", "["))):
            return []
        keys.append(next(group for group in match.groups() if group is not None))
        at = match.end()
    return keys
