"""Types of the fields of a config.json, by the names that families' tables give them."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.tools.huggingface.fields.decoder_settings import FULL, SLIDING

OR_NULL = " or null"
# Wide enough for any published model, and narrow enough for products of sizes in 64 bits.
MAX_LAYERS, MAX_SIZE, MAX_COUNT, MAX_NUMBER = 1000, 2**24, 2**31 - 1, 1e30


class FieldType(NamedTuple):
    """A type of values: the test that a value belongs to it, and its description for a message."""

    description: str
    includes: Callable[[Any], bool]


def check_type(name: str, value: Any, kind: str) -> None:
    """Checks that a value has a type.

    Args:
      name: of the field in the message, "config.json: hidden_size".
      kind: a name in TYPES, with " or null" behind it where null is a value.

    Raises:
      ConfigError: it has not; names the field, its value and the type.
    """
    plain = kind.removesuffix(OR_NULL)
    may_be_null = plain != kind
    expected = f"{TYPES[plain].description}{OR_NULL if may_be_null else ''}"
    if value is None and not may_be_null:
        raise ConfigError(f"{name} is null or missing; wanted is {expected}.")
    require(value is None or TYPES[plain].includes(value), name, value, expected)


def is_number(value: Any) -> bool:
    """Returns True for a finite number of JSON, which true and false are not."""
    return type(value) in (int, float) and abs(value) <= MAX_NUMBER and math.isfinite(value)


def _whole(least: int, most: int) -> FieldType:
    return FieldType(
        f"an integer from {least} to {most}",
        lambda value: type(value) is int and least <= value <= most,
    )


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_by_kind_of_layer(value: Any) -> bool:
    return (
        isinstance(value, Mapping) and bool(value) and value.keys() <= {SLIDING, FULL}
        and all(x is None or isinstance(x, Mapping) for x in value.values())
    )


def _is_list_of(is_item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_item, value))


TYPES: dict[str, FieldType] = {
    "anything": FieldType("anything", lambda value: True),
    "true or false": FieldType("true or false", lambda value: isinstance(value, bool)),
    "text": FieldType("a text", lambda value: isinstance(value, str)),
    "layers": _whole(1, MAX_LAYERS),
    "size": _whole(1, MAX_SIZE),
    "count": _whole(1, MAX_COUNT),
    "count from 0": _whole(0, MAX_COUNT),
    "number from 0": FieldType("a number from 0 on", lambda x: is_number(x) and x >= 0),
    "number above 0": FieldType("a number above 0", lambda x: is_number(x) and x > 0),
    "number above 1": FieldType("a number above 1", lambda x: is_number(x) and x > 1),
    "number": FieldType("a number", is_number),
    "probability": FieldType("a number from 0 to below 1", lambda x: is_number(x) and 0 <= x < 1),
    "share": FieldType(
        "a number above 0 and at most 1", lambda x: is_number(x) and 0 < x <= 1
    ),
    "numbers above 0": FieldType(
        "a list of numbers above 0", _is_list_of(lambda x: is_number(x) and x > 0)
    ),
    "layer numbers": FieldType(
        "a list of numbers of layers", _is_list_of(lambda x: type(x) is int and x >= 0)
    ),
    "kinds of layers": FieldType(
        f"a list of {SLIDING!r} and {FULL!r}",
        _is_list_of(lambda x: isinstance(x, str) and x in (SLIDING, FULL)),
    ),
    "object": FieldType("an object", _is_object),
    "object by kind of layer": FieldType(
        f"an object of {SLIDING!r} and {FULL!r}, an object each", _is_by_kind_of_layer
    ),
}
