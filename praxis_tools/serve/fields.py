"""Validates the JSON fields of a request, with errors that name the field."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import orjson

from praxis_lite.core.errors import did_you_mean, is_number, shortened
from praxis_lite.host.file_reading import parse_json
from praxis_tools.serve.api_error import ApiError

# Takes a value and returns the converted value, or None if the value is invalid.
Check = Callable[[Any], Any]


class Field(NamedTuple):
    """A field in a request: a description of the expected values and a check."""

    expected: str
    check: Check


def integer(minimum: int, maximum: int) -> Field:
    """Returns a field for integers in a range."""
    return Field(
        f"an integer from {minimum} to {maximum}",
        lambda x: x if type(x) is int and minimum <= x <= maximum else None,
    )


def number(minimum: float, maximum: float) -> Field:
    """Returns a field for numbers in a range."""
    return Field(
        f"a number from {minimum:g} to {maximum:g}",
        lambda x: float(x) if is_number(x) and minimum <= x <= maximum else None,
    )


FLAG = Field("true or false", lambda x: x if type(x) is bool else None)
TEXT = Field("a string", lambda x: x if isinstance(x, str) else None)


def only(*values: Any, because: str) -> Field:
    """Returns a field for an unsupported feature, which only accepts values that disable it.

    Args:
      *values: Accepted values.
      because: The reason why other values are not accepted.
    """

    def check(x: Any) -> Any:
        return True if any(x == value and type(x) is type(value) for value in values) else None

    return Field(f"{' or '.join(map(_json, values)) or 'null'}: {because}", check)


def read(body: bytes, known: Mapping[str, Field]) -> dict[str, Any]:
    """Parses a request and returns its fields, treating null as missing.

    Raises:
      ApiError: The body is not a JSON object, repeats a key, or contains an unknown field or an
        invalid value.
    """
    try:
        # orjson also refuses unpaired surrogates, but ignores all but the last of repeated keys.
        orjson.loads(body)
        given = parse_json(body.decode())
    except ValueError as error:
        raise ApiError(400, f"The body is not JSON: {error}.", code="invalid_json") from None
    if not isinstance(given, dict):
        raise ApiError(400, f"The body is {_json(given)}; expected a JSON object.")
    return checked(given, known, "")


def checked(given: Mapping[str, Any], known: Mapping[str, Field], within: str) -> dict[str, Any]:
    """Checks the fields of a JSON object and returns their converted values.

    Args:
      given: The JSON object.
      known: Known fields, keyed by name.
      within: Prefix of the names in error messages.

    Raises:
      ApiError: There is an unknown field or an invalid value.
    """
    values = {}
    for name, value in given.items():
        path = shortened(f"{within}{name}")
        if value is None:
            continue
        if name not in known:
            raise ApiError(
                400,
                f"{path} is not a known field; known fields are {', '.join(known)}."
                f"{did_you_mean(name, known)} Remove the unknown field.",
                param=path,
                code="unknown_field",
            )
        values[name] = known[name].check(value)
        if values[name] is None:
            raise ApiError(
                400,
                f"{path} is {_json(value)}; expected {known[name].expected}.",
                param=path,
                code="invalid_value",
            )
    return values


def _json(value: Any) -> str:
    try:
        return shortened(orjson.dumps(value).decode())
    except TypeError:  # orjson can read deeper nesting than it can write, and no large integers.
        return "a value with too many levels or digits"
