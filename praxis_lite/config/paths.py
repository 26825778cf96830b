"""Iterates over fields of a config by path, such as `run.seed` or `task.chain[1]`."""

import collections.abc
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any

import fiddle as fdl

from praxis_lite.config.literals import UNKNOWN, is_dtype, union_parts
from praxis_lite.core.callables import callable_name


@dataclasses.dataclass(frozen=True)
class Unknown:
    """A placeholder for an unknown value."""

    text: str


UNSET = Unknown("<not set>")
MADE_BY_CLASS = Unknown("<made by the class>")


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a config.

    Attributes:
        path: Path from the root, as for `--set`.
        value: The value, the default value, or an `Unknown`.
        annotation: Annotation of the callable's parameter, or `UNKNOWN`.
        is_settable: Whether `--set` can replace the value. False if it contains configs or
            functions.
    """

    path: str
    value: Any
    annotation: Any
    is_settable: bool


def iterate_fields(config: fdl.Buildable) -> Iterator[Field]:
    """Yields every field below `config`, parents first, in the order of the signatures.

    The fields of a shared config are yielded once for each of its paths. A sequence or dict of
    plain values is a single field.
    """
    yield from _walk(config, UNKNOWN, "")


def children(node: Any, annotation: Any) -> list[tuple[str | int, Any, Any]]:
    """Returns (key, value, annotation) for each child of a config, dict or sequence."""
    if isinstance(node, fdl.Buildable):
        hints = _parameter_types(node)
        arguments = fdl.ordered_arguments(node, include_defaults=True, include_unset=True)
        return [
            (key, _value_or_default(node, key, value), hints.get(key, hints.get("**", UNKNOWN)))
            for key, value in arguments.items()
        ]
    if isinstance(node, dict):
        return [(key, value, item_type(annotation, key)) for key, value in node.items()]
    if isinstance(node, list | tuple):
        return [(index, item, item_type(annotation, index)) for index, item in enumerate(node)]
    settings = settings_of(node)
    return [] if settings is None else children(settings, annotation)


def item_type(annotation: Any, key: Any) -> Any:
    """Returns the annotation of an item, given the annotation of its container."""
    for part in union_parts(annotation):
        origin, args = typing.get_origin(part), typing.get_args(part)
        if isinstance(key, int) and origin is tuple and args:
            if args[-1] is Ellipsis:
                return args[0]
            return args[key] if key < len(args) else UNKNOWN
        is_mapping = isinstance(origin, type) and issubclass(origin, collections.abc.Mapping)
        if is_mapping and len(args) == 2:
            return args[1]
        if isinstance(key, int) and len(args) == 1 and not is_mapping:
            return args[0]
    return UNKNOWN


def settings_of(value: Any) -> fdl.Buildable | None:
    """Returns the config for a config, class, function or dataclass instance, or None."""
    if isinstance(value, fdl.Buildable):
        return value
    # A jitted function wraps a routine but is not one itself.
    is_jitted = callable(value) and hasattr(value, "__wrapped__")
    is_function = isinstance(value, type) or inspect.isroutine(value) or is_jitted
    try:
        if isinstance(value, functools.partial):
            return fdl.Partial(value.func, *value.args, **value.keywords)
        if is_function and not is_dtype(value):
            return fdl.Partial(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, Unknown | type):
            fields = [field.name for field in dataclasses.fields(value) if field.init]
            return fdl.Config(type(value), **{name: getattr(value, name) for name in fields})
    except (TypeError, ValueError, AttributeError):  # There is no valid signature.
        pass
    return None


def kwargs_type(config: fdl.Buildable) -> Any | None:
    """Returns the annotation of `**kwargs`, or `UNKNOWN`; None if there is no `**kwargs`."""
    return _parameter_types(config).get("**")


def join(path: str, key: Any) -> str:
    """Returns the path of a key below a path."""
    if isinstance(key, str) and all(part.isidentifier() for part in key.split("-")):
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"


def describe(value: Any) -> str:
    """Describes a non-literal value in angle brackets; the text is the same in every process."""
    if isinstance(value, Unknown):
        return value.text
    if isinstance(value, fdl.Buildable):
        return f"<{type(value).__name__} {callable_name(fdl.get_callable(value))}>"
    if isinstance(value, functools.partial):
        arguments = [repr(argument) for argument in value.args]
        arguments += [f"{key}={argument!r}" for key, argument in value.keywords.items()]
        return f"<partial {callable_name(value.func)}({', '.join(arguments)})>"
    if isinstance(value, dict):
        return f"<dict of {', '.join(map(str, value))}>"
    if isinstance(value, list | tuple):
        return f"<{type(value).__name__} of {len(value)}>"
    if callable(value):
        return f"<{callable_name(value)}>"
    return f"<{callable_name(type(value))}>"


def _walk(node: Any, annotation: Any, path: str) -> Iterator[Field]:
    for key, value, hint in children(node, annotation):
        below = join(path, key)
        has_parts = not holds_only_literals(value)
        yield Field(below, value, hint, not has_parts)
        if has_parts:
            yield from _walk(value, hint, below)


def holds_only_literals(value: Any) -> bool:
    """Returns whether `value` contains no config, function or dataclass instance."""
    if isinstance(value, dict):
        return all(holds_only_literals(item) for item in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return all(holds_only_literals(element) for element in value)
    has_settings = isinstance(value, fdl.Buildable) or dataclasses.is_dataclass(value)
    return is_dtype(value) or isinstance(value, Unknown) or not (has_settings or callable(value))


def _value_or_default(config: fdl.Buildable, key: str | int, value: Any) -> Any:
    function = fdl.get_callable(config)
    if key not in config.__arguments__ and dataclasses.is_dataclass(function):
        # If a field has a factory, the default in the signature is a sentinel.
        factories: dict[str | int, Any] = {
            field.name: field.default_factory for field in dataclasses.fields(function)
        }
        factory = factories.get(key, dataclasses.MISSING)
        if factory is not dataclasses.MISSING:
            # Only call the library's factories, because a user's factory may have side effects.
            is_known = factory in (dict, list, tuple, set) or factory.__module__.startswith(
                "praxis_lite.experiment."
            )
            return factory() if is_known else MADE_BY_CLASS
    return UNSET if value is fdl.NO_VALUE else value


def _parameter_types(config: fdl.Buildable) -> dict[str | int, Any]:
    """Returns annotations keyed by parameter name, by position if positional-only, or by "**"."""
    parameters = config.__signature_info__.parameters
    resolved = _resolved_annotations(fdl.get_callable(config))
    hints: dict[str | int, Any] = {}
    for index, (name, parameter) in enumerate(parameters.items()):
        hint = resolved.get(name, parameter.annotation)
        # An annotation that cannot be evaluated is a string.
        hint = UNKNOWN if isinstance(hint, str) else hint
        if parameter.kind is parameter.VAR_POSITIONAL:
            # Fiddle stores positional arguments by index.
            hints |= {key: hint for key in config.__arguments__ if isinstance(key, int)}
        elif parameter.kind is parameter.VAR_KEYWORD:
            hints["**"] = hint
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            hints[index] = hint
        else:
            hints[name] = hint
    return hints


def _resolved_annotations(function: Any) -> dict[str, Any]:
    """Returns a callable's annotations, keyed by parameter; `UNKNOWN` if evaluation fails."""
    # typing.get_type_hints would fail for all parameters if one annotation uses a name that is
    # imported under TYPE_CHECKING.
    if isinstance(function, type):
        # The class whose __init__ is called.
        owner = next(base for base in function.__mro__ if "__init__" in vars(base))
        if "__dataclass_fields__" in vars(owner):
            annotations: dict[str, Any] = {}
            # The fields of a dataclass are annotated in the class bodies.
            for base in reversed(owner.__mro__):
                local = inspect.get_annotations(base).items()
                annotations |= {key: _evaluate(hint, base) for key, hint in local}
            return annotations
        function = vars(owner)["__init__"]
    function = inspect.unwrap(function)
    hints = inspect.get_annotations(function)
    return {key: _evaluate(hint, function) for key, hint in hints.items()}


def _evaluate(hint: Any, owner: Any) -> Any:
    if not isinstance(hint, str):
        return hint
    namespace = getattr(owner, "__globals__", None)
    if namespace is None:
        namespace = vars(inspect.getmodule(owner) or typing)
    # `get_type_hints` evaluates all annotations of an object, so pass one with a single annotation.
    item = types.SimpleNamespace(__annotations__={"hint": hint})
    try:
        return typing.get_type_hints(item, namespace, include_extras=True)["hint"]
    except (NameError, AttributeError, TypeError, SyntaxError):
        return UNKNOWN
