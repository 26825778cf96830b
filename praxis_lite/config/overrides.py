"""`--set path=value`: one field of any config, checked before anything is built."""

import contextlib
import difflib
import functools
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import fiddle as fdl

from praxis_lite.config.callables import parse_callable, suggestion, takes
from praxis_lite.config.paths import (
    UNSET,
    Field,
    Unknown,
    children,
    holds_only_literals,
    iterate_fields,
    join,
    settings_of,
    takes_any_name,
)
from praxis_lite.config.text_forms import shown_value, text_of_value
from praxis_lite.config.values import (
    UNKNOWN,
    WrongType,
    is_plain,
    parse_value,
    type_name,
    union_parts,
)
from praxis_lite.errors import ConfigError, did_you_mean, shown

# Far beyond what anyone means; likenesses of longer paths take long to compute.
_LONGEST_PATH, _LONGEST_VALUE = 500, 10_000

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

    A config that stands in several places is changed in all of them.

    Args:
        config: the root.
        settings: `path=value` each. A path walks the arguments of configs, the keys of dicts and
            the indices of sequences: `datasets.train.batch_size`, `mesh.ici_mesh_shape[1]` or
            `mesh.ici_mesh_shape.1`. A value is a Python literal, a bare word, items split by
            commas, or where a function, class or config stands or may stand, a name.
        packages: top-level packages of the user's own, whose functions and classes may be named.
        attributes: of the experiment's class, which can be set too (`configured`); for the errors.

    Raises:
        ConfigError: no such path, or no value of that field's type. Settings before it are applied.
    """
    for number, setting in enumerate(settings, start=1):
        _check_form(setting, settings[number:])
    return [_apply(config, setting, packages, attributes) for setting in settings]


def all_paths(config: fdl.Buildable) -> list[str]:
    """Returns the path of every field, those left at their defaults included."""
    return [field.path for field in iterate_fields(config)]


def check_required(config: fdl.Buildable) -> None:
    """Checks that every `fdl.Config` has the arguments that its callable requires.

    An `fdl.Partial` may lack some: whoever calls it gives them.

    Raises:
        ConfigError: names the paths.
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


def _check_form(setting: str, following: Sequence[str]) -> None:
    """Checks that a setting is `path=value`; `following` are those behind it."""
    path, equals, text = setting.partition("=")
    path, said = path.strip(), f"--set {shown(setting)}"
    if not equals:
        # `a.b 20`, `a.b = 20` and `a.b:20`, as other programs take them.
        value = next((one.removeprefix("=") for one in following if one != "="), "")
        if ":" in path:
            path, _, value = path.partition(":")
        is_meant = value and "=" not in value
        meant = f"{path}={value}" if is_meant else f"{path}=VALUE"
        raise ConfigError(
            f"{said} has no '='; wanted is path=value, such as run.seed=7. Write --set "
            f"{shown(meant)}, without blanks around the '='."
        )
    if not path:
        raise ConfigError(
            f"{said} names no field before the '='; wanted is path=value, such as run.seed=7, "
            "without blanks around the '='."
        )
    for part, what, most in ((path, "path", _LONGEST_PATH), (text, "value", _LONGEST_VALUE)):
        if len(part) > most:
            raise ConfigError(
                f"{said}: the {what} has {len(part)} characters, wanted are at most {most}."
            )


def _apply(
    config: fdl.Buildable, setting: str, packages: Collection[str], attributes: Collection[str]
) -> str:
    path, _, text = setting.partition("=")
    path = path.strip()
    trail = _resolve(config, path)
    if trail is None:
        raise ConfigError(_no_such_path(config, path, attributes))
    present, annotation = trail[-1].value, trail[-1].annotation
    path = _joined(step.key for step in trail)
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
    """One key of a path: what it was looked up in, and what stands there."""

    parent: Any
    key: str | int
    value: Any
    annotation: Any


def _resolve(config: fdl.Buildable, path: str) -> list[_Step] | None:
    node, annotation, trail = config, UNKNOWN, []
    for token in _split(path):
        found = _child(node, annotation, token)
        if found is None:
            return None
        trail.append(_Step(node, *found))
        _, node, annotation = found
    return trail or None


def _child(node: Any, annotation: Any, token: str) -> tuple[Any, Any, Any] | None:
    below = children(node, annotation)
    for key, value, hint in below:
        if key == token or (isinstance(key, int) and str(key) == token):
            return key, value, hint
    if isinstance(node, list | tuple) and re.fullmatch(r"-\d+", token) and below:
        index = len(below) + int(token)
        return below[index] if index >= 0 else None
    settings = settings_of(node)
    if settings is not None and token.isidentifier() and not token.startswith("__"):
        takes_any, hint = takes_any_name(settings)
        if takes_any:
            return token, UNSET, hint
    return None


def _assign(config: fdl.Buildable, key: str | int, value: Any) -> None:
    if isinstance(key, int):
        config[key] = value
    else:
        setattr(config, key, value)


def _replaced(container: Any, key: str | int, value: Any) -> Any:
    # A new one: the old may be a default, or a constant of the user's module.
    if isinstance(container, dict):
        return {**container, key: value}
    if (settings := settings_of(container)) is not None:
        _assign(settings, key, value)
        return settings
    items = [*container[:key], value, *container[key + 1 :]]
    return container._make(items) if hasattr(container, "_make") else type(container)(items)


def _joined(keys: Iterable[str | int]) -> str:
    return functools.reduce(join, keys, "")


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
        found = parse_callable(text, present, annotation, packages)
        if found is not None:
            return found
    try:
        if is_config and (annotation in (UNKNOWN, Any) or not _is_single(present)):
            raise WrongType("a function, a class or a config, by its name")
        return parse_value(text, annotation, None if isinstance(present, Unknown) else present)
    except WrongType as wrong:
        found = parse_callable(text, present, annotation, packages) if may_be_named else None
        if found is not None:
            return found
        if is_config and not _is_single(present):
            raise ConfigError(
                f"{path}: holds configs, and --set sets them one by one, by the fields below it."
            ) from None
        hint = suggestion(text, present, annotation) if may_be_named else ""
        raise ConfigError(
            f"{path}: found {shown(repr(text), 200)}, wanted "
            f"{_wanted(wrong, annotation, text, may_be_named)}. It is now "
            f"{shown_value(present, annotation)}.{hint}"
        ) from None


def _wanted(wrong: WrongType, annotation: Any, text: str, may_be_named: bool) -> str:
    wanted, parts = str(wrong), union_parts(annotation)
    plain = [type_name(part) for part in parts if is_plain(part)]
    others = [_kind(part) for part in parts if not is_plain(part)]
    if may_be_named:
        wanted = " or ".join([*plain, *others]) if plain and others else wanted
        return (
            f"{wanted}; a function or class is said by its name, such as optax.lion (of your own: "
            "--packages), and what it returns with (), such as optax.constant_schedule()"
        )
    if "Sequence[" in wanted and "," not in text:
        with contextlib.suppress(WrongType):
            parse_value(f"{text},", annotation)
            return f"{wanted}; a sequence of one is written {shown(text)},"
        return f"{wanted}, its items with commas between them"
    if plain and others:
        return (
            f"{' or '.join(plain)}; {' or '.join(others)} in its place is set in the experiment's "
            "code"
        )
    return wanted


def _kind(annotation: Any) -> str:
    if "Callable" in str(annotation):
        return "a function"
    name = type_name(annotation).rpartition(".")[2]
    return f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"


def _is_single(present: Any) -> bool:
    return not isinstance(present, dict | list | tuple | set | frozenset)


def _no_such_path(config: fdl.Buildable, path: str, attributes: Collection[str]) -> str:
    if hint := did_you_mean(path, attributes):
        return f"--set {shown(path)}: the experiment has no such attribute or field.{hint}"
    fields = list(iterate_fields(config))
    near = _nearest(path, fields) or _beside(path, fields)
    roots = [str(key) for key, _, _ in children(config, UNKNOWN)]
    hint = (
        f"The nearest are {', '.join(near)}."
        if near
        else f"Paths begin with {', '.join(roots)}; config.txt in the job's directory lists all."
    )
    if path.isupper() and not attributes:
        hint = (
            "An attribute of the experiment's class is set where that makes its config, in "
            "training and --mode=explain; eval and decode take the job's as it is: set the fields."
        )
    if below := re.fullmatch(r"(.*(?:weight|activation)_split_dims_mapping)\.\w+", path):
        hint = (
            f"In Pax a mapping is a field below {_last(below[1])}; here {_last(below[1])} is the "
            f"mapping itself, a plain sequence: --set {shown(below[1])}=data,mdl."
        )
    return f"--set {shown(path)}: the config has no such field. {hint}"


def _nearest(path: str, fields: Sequence[Field]) -> list[str]:
    last = _last(path)

    def likeness(field: Field) -> float:
        # The last name counts as much as all the rest: people forget where a field lies.
        whole = difflib.SequenceMatcher(None, path, field.path).ratio()
        if field.is_settable and path.startswith((f"{field.path}.", f"{field.path}[")):
            return whole + 1  # A step too far.
        return whole + difflib.SequenceMatcher(None, last, _last(field.path)).ratio()

    scored = sorted(((likeness(one), one.path) for one in fields), reverse=True)
    return [one for score, one in scored[:5] if score >= 1.2]


def _beside(path: str, fields: Sequence[Field]) -> list[str]:
    """Returns the fields of the config whose field the last name was meant to be."""
    above = path[: -len(_last(path))]
    beside = [one.path for one in fields if one.path.startswith(above)]
    return [one for one in beside if above and _last(one) == one[len(above) :]]


def _last(path: str) -> str:
    return re.split(r"[.\[]", path)[-1]


def _split(path: str) -> list[str]:
    """Returns the keys of a path, none where it is not well formed."""
    keys, at = [], 0
    while at < len(path):
        match = _TOKEN.match(path, at)
        if match is None or (at == 0) != (not match.group().startswith((".", "["))):
            return []
        keys.append(next(group for group in match.groups() if group is not None))
        at = match.end()
    return keys
