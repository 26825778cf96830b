"""Functions that a user gives: their modules, their names in messages, and their arguments."""

import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any

from praxis_lite.core.errors import ConfigError, require

__all__ = ("callable_name", "check_takes", "function_name")


def callable_name(function: Callable[..., Any]) -> str:
    """Returns `module.name` of a function, a class, or an instance that can be called."""
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    if not isinstance(name, str):
        return f"{callable_name(type(function))} object"
    return f"{function.__module__}.{name}"


def imported_module(name: str) -> types.ModuleType | None:
    """Imports a module; returns None if there is none by that name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # The module is there, but something that it imports is not.
        return None


def function_name(function: Any) -> str:
    """Returns the name of a function, or of the function that a partial calls."""
    return callable_name(getattr(function, "func", function))


def check_takes(what: str, function: Any, *arguments: str) -> None:
    """Raises ConfigError if a function of the user's cannot be called with these arguments."""
    call = f"({', '.join(arguments)})"
    require(callable(function), what, function, f"a function of {call}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # Some functions that are written in C have no signature.
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{what} is called with {call}, but {function_name(function)} takes "
            f"{signature}: {error}. Change its arguments, or bind the others with "
            "functools.partial (in an experiment: fdl.Partial)."
        ) from None
