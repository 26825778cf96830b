"""Converts the text after `=` in `--set` to a literal of the annotated type, and back."""

import ast
import collections.abc
import contextlib
import dataclasses
import enum
import inspect
import re
import sys
import types
import typing
from typing import Any

UNKNOWN = inspect.Parameter.empty
_BARE_WORDS = {"none": None, "true": True, "false": False}
_SEQUENCES = (collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


class WrongType(Exception):
    """An error for text that is not a value of the expected type. The message is the type name."""


@dataclasses.dataclass(frozen=True)
class _Word:
    """Text that is not a Python literal."""

    text: str


def parse_value(text: str, annotation: Any, current: Any = None) -> Any:
    """Parses text as a value of the annotated type.

    Args:
        text: A Python literal, `none`, `true`, `false`, a bare word, or items separated by commas.
        annotation: Annotation of the parameter. If it is `UNKNOWN`, the type of `current` is used.
        current: The current value, or the default.

    Raises:
        WrongType: The text is not a value of this type.
    """
    if is_dtype(current) or _names_dtype(annotation):
        return _parse_dtype(text, annotation, current)
    if annotation is UNKNOWN:
        annotation = _type_of(current)
    read = _read(text)
    # Try an exact match first: for `str | int`, 7 is a number; for `str | None`, none is None.
    for lenient in (False, True):
        with contextlib.suppress(WrongType):
            return _fit(read, text, annotation, lenient)
    if read is None and current is None:
        return None  # Accept None for `width: int = None`, as in older code.
    raise WrongType(type_name(annotation))


def format_value(value: Any, annotation: Any) -> str | None:
    """Returns the shortest text that `parse_value` parses as `value`, or None."""
    candidates = [repr(value)]
    if isinstance(value, str):
        candidates = [value, repr(value)]
    elif is_dtype(value):
        candidates = [dtype_name(value)]
    elif isinstance(value, enum.Enum):
        candidates = [value.name]
    elif type(value) is tuple and value:
        items = [item if isinstance(item, str) else repr(item) for item in value]
        # Prefer text without brackets, which needs no quotes in a shell.
        candidates = [",".join(items) + ("," if len(value) == 1 else ""), repr(value)]
    for text in candidates:
        if text == text.strip() and text.isprintable():
            with contextlib.suppress(WrongType):
                if are_same(parse_value(text, annotation, value), value):
                    return text
    return None


def are_same(item: Any, other: Any) -> bool:
    """Returns whether two values without configs are written as the same text."""
    if type(item) in (int, float) and type(other) in (int, float):
        # A float field may contain the integer 1.
        return item == other or (item != item and other != other)
    if type(item) is not type(other):
        return False
    if isinstance(item, list | tuple):
        return len(item) == len(other) and all(map(are_same, item, other))
    return repr(item) == repr(other)


def is_bare_word(text: str) -> bool:
    """Returns whether unquoted text is parsed as a string, not as a number or sequence."""
    is_number = text.lower().lstrip("-") in ("inf", "nan")
    return _read(text) == _Word(text) and text.isprintable() and not is_number


def type_name(annotation: Any) -> str:
    """Returns a readable form of an annotation."""
    if annotation is UNKNOWN or annotation is Any:
        return "any literal"
    if annotation is None or annotation is types.NoneType:
        return "None"
    if annotation is bool:
        return "true or false"
    if typing.get_origin(annotation) is typing.Literal:
        return f"one of {', '.join(map(str, typing.get_args(annotation)))}"
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__name__
    text = str(annotation).replace("NoneType", "None")
    text = text.replace("typing.", "").replace("collections.abc.", "")
    # Omit private modules, as in optax._src.base.GradientTransformation.
    return re.sub(r"\._\w+\.(?:\w+\.)*", ".", text)


def is_plain(annotation: Any) -> bool:
    """Returns whether values of the type can be written as text."""
    kind = typing.get_origin(annotation) or annotation
    if not isinstance(kind, type):
        return True
    plain = (bool, int, float, str, types.NoneType, *_MAPPINGS, *_SEQUENCES, tuple, list, set)
    return kind in (*plain, frozenset) or issubclass(kind, enum.Enum) or _names_dtype(annotation)


def union_parts(annotation: Any) -> tuple[Any, ...]:
    """Returns the members of a union; for other annotations, the annotation itself."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def is_dtype(value: Any) -> bool:
    """Returns whether `value` is a dtype, or a scalar type such as `jnp.bfloat16`."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.dtype | type):
        return False
    # jnp.float32 has an attribute `dtype`; scalar types of ml_dtypes are subclasses of np.generic.
    has_dtype = isinstance(getattr(value, "dtype", None), numpy.dtype)
    return isinstance(value, numpy.dtype) or has_dtype or issubclass(value, numpy.generic)


def dtype_name(value: Any) -> str:
    """Returns the name of a dtype or scalar type, such as 'bfloat16' for `jnp.bfloat16`."""
    return sys.modules["numpy"].dtype(value).name


def _read(text: str) -> Any:
    word = text.strip().lower()
    if word in _BARE_WORDS:
        return _BARE_WORDS[word]
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    # Items need not be literals, as in `data,mdl`.
    if "," in text:
        items = text.strip().removesuffix(",").split(",")
        return tuple(_read(item) for item in items)
    return _Word(text.strip())


def _fit(read: Any, text: str | None, expected: Any, lenient: bool) -> Any:
    """Converts a parsed value to a type. Raises WrongType if that is not possible.

    Args:
        read: The parsed value.
        text: The text from which `read` was parsed, or None inside a container.
        expected: The annotation.
        lenient: Whether to allow conversions such as from numbers to strings or from integers to
            floats.
    """
    if expected in (UNKNOWN, Any, object) or isinstance(expected, typing.TypeVar):
        return _plain(read)
    if expected is None or expected is types.NoneType:
        return _require(read is None, read, expected)
    for alias in ("__value__", "__supertype__"):  # `type X = ...` in Python 3.12, or NewType.
        if hasattr(expected, alias):
            return _fit(read, text, getattr(expected, alias), lenient)
    origin, args = typing.get_origin(expected), typing.get_args(expected)
    if origin is typing.Annotated:
        return _fit(read, text, args[0], lenient)
    # The first member that accepts the value is used. `parse_value` tries exact matches first.
    if (members := union_parts(expected)) != (expected,):
        for member in members:
            with contextlib.suppress(WrongType):
                return _fit(read, text, member, lenient)
        raise WrongType(type_name(expected))
    if origin is typing.Literal:
        # The words "none" and "true" may be members of the Literal.
        actual = text if lenient and text in args else _plain(read)
        # Compare types too, because True == 1.
        is_member = any(type(a) is type(actual) and a == actual for a in args)
        return _require(is_member, actual, expected)
    kind = origin or expected
    if kind is float and lenient and type(read) is int:
        return float(read)
    if kind is float and isinstance(read, _Word) and read.text.lower() in ("inf", "-inf", "nan"):
        return float(read.text)
    if kind is str and isinstance(read, _Word):
        return read.text
    # For a str, `--set name=7` means the text "7".
    if kind is str and lenient and text is not None and type(read) is not str:
        return text
    if kind in (bool, int, float, str):
        return _require(type(read) is kind, read, expected)
    if kind in _MAPPINGS:
        _require(type(read) is dict, read, expected)
        key, value = args if len(args) == 2 else (UNKNOWN, UNKNOWN)
        return {_fit(k, None, key, lenient): _fit(v, None, value, lenient) for k, v in read.items()}
    if kind in (tuple, list, set, frozenset, *_SEQUENCES):
        return _fit_items(read, expected, kind, args, lenient)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        _require(isinstance(read, _Word) and read.text in kind.__members__, read, expected)
        return kind[read.text]
    raise WrongType(type_name(expected))


def _fit_items(read: Any, expected: Any, kind: Any, args: tuple[Any, ...], lenient: bool) -> Any:
    kinds = (set, list, tuple) if kind in (set, frozenset) else (list, tuple)
    _require(type(read) in kinds, read, expected)
    if kind is tuple and args and args[-1] is not Ellipsis:
        _require(len(args) == len(read), read, expected)
        item_types = list(args)
    else:
        item_types = [args[0] if args else UNKNOWN] * len(read)
    items = [_fit(item, None, type_, lenient) for item, type_ in zip(read, item_types, strict=True)]
    # For an abstract type such as Sequence, the parsed type is used.
    return (type(read) if kind in _SEQUENCES else kind)(items)


def _require(holds: bool, value: Any, expected: Any) -> Any:
    if not holds:
        raise WrongType(type_name(expected))
    return value


def _plain(read: Any) -> Any:
    if isinstance(read, _Word):
        return read.text
    return tuple(_plain(item) for item in read) if type(read) is tuple else read


def _type_of(current: Any) -> Any:
    """Returns the type that a replacement for `current` must have."""
    if current is None or current is UNKNOWN:
        return UNKNOWN
    # If all items have the same type, so must the items of the replacement.
    if type(current) in (tuple, list) and current:
        kinds = {type(item) for item in current}
        if len(kinds) == 1 and (kind := kinds.pop()) in (int, float, str, bool):
            if type(current) is tuple:
                return types.GenericAlias(tuple, (kind, ...))
            return types.GenericAlias(list, kind)
    return type(current)


def _names_dtype(annotation: Any) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    parts = union_parts(annotation)
    return any(typing.get_origin(part) is numpy.dtype or part is numpy.dtype for part in parts)


def _parse_dtype(text: str, annotation: Any, current: Any) -> Any:
    import numpy as np

    name = text.strip().strip("'\"")
    optional = types.NoneType in union_parts(annotation) or annotation is UNKNOWN
    if name.lower() == "none" and (optional or current is None):
        return None
    expected = "the name of a dtype, such as float32 or bfloat16"
    scalar = getattr(sys.modules.get("jax.numpy", np), name, None)
    if not is_dtype(scalar):
        raise WrongType(expected)
    # Return the same kind of object as the current value: np.dtype, np.float32 or jnp.bfloat16.
    if isinstance(current, np.dtype):
        return np.dtype(scalar)
    if isinstance(current, type) and issubclass(current, np.generic):
        return np.dtype(scalar).type
    return scalar
