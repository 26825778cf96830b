"""Formats the names of user-provided functions, and checks their signatures."""

import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any

from praxis_lite.core.errors import ConfigError, require

__all__ = ("callable_name", "check_takes", "function_name")


def callable_name(function: Callable[..., Any]) -> str:
    """Returns "module.name" for a function, a class or a callable instance."""
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    if not isinstance(name, str):
        return f"{callable_name(type(function))} object"
    return f"{function.__module__}.{name}"


def imported_module(name: str) -> types.ModuleType | None:
    """Imports a module; returns None if no module has that name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # The module exists, but one of its own imports is missing.
        return None


def function_name(function: Any) -> str:
    """Returns the name of a function, or of the function that a partial wraps."""
    return callable_name(getattr(function, "func", function))


def check_takes(what: str, function: Any, *arguments: str) -> None:
    """Raises ConfigError unless the user's function can be called with these arguments.

    Args:
      what: Path of the setting that contains the function, for the error message.
      function: The function, possibly a `functools.partial`.
      arguments: Names of the arguments, passed by position.
    """
    call = f"({', '.join(arguments)})"
    require(callable(function), what, function, f"a function with the arguments {call}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # Some functions written in C have no signature.
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{what} is called with {call}, but {function_name(function)} has the signature "
            f"{signature}: {error}. Change its arguments, or bind the additional ones with "
            "functools.partial (fdl.Partial in an experiment)."
        ) from None
