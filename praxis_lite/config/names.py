"""Finds the object that a name in a config means, and the name under which an object is written."""

import enum
import importlib
import sys
import types
from collections.abc import Collection, Sequence
from typing import Any

from praxis_lite.config.configurable import (
    ARRAY_LIBRARIES,
    LIBRARIES,
    PUBLIC,
    is_allowed,
    is_of_kind,
    refused,
)
from praxis_lite.core.callables import imported_module
from praxis_lite.core.errors import ConfigError

# Modules in which a bare name after --set is looked up.
SHORT = (
    "praxis_lite",
    "praxis_lite.layers",
    "praxis_lite.optimizers",
    "praxis_lite.optimizers.schedules",
    "praxis_lite.decode",
    "praxis_lite.inputs",
    "optax",
    "optax.contrib",
    "jax.nn",
)


def imported(module: str, name: str) -> Any:
    """Imports `module:name`, already checked to be allowed.

    Raises:
        ConfigError: It does not exist, or is not a class, function or constant defined there.
            Exceptions of the module itself are raised unchanged.
    """
    gone = (
        f"config.json names {module}.{name}, which does not exist: the code has changed since the "
        "job began, or its package is not on sys.path. Restore it, or start a new job."
    )
    if module == "__main__":
        gone = (
            f"config.json names {module}.{name}, which a notebook or a script defined, and which "
            "is not defined here yet. Run the cell or the lines that define it first."
        )
    result = _holder(module)
    for depth, part in enumerate(name.split(".")):
        # Only modules and classes have named attributes; getattr of an instance may run code.
        if depth > 0 and not isinstance(result, type):
            raise ConfigError(refused("config.json", module, name))
        result = getattr(result, part, None)
        if result is None:
            raise ConfigError(gone)
        # `os.system` is an attribute of every module that imports os.
        if not _is_defined_in(result, module, depth):
            raise ConfigError(refused("config.json", module, name))
    if not is_of_kind(module, result):
        raise ConfigError(refused("config.json", module, name))
    return result


def named(text: str, packages: Collection[str], nearby: Sequence[str] = ()) -> Any:
    """Returns the object that a name after `--set` means, or None if a config may not name it.

    Args:
        text: A full name, `optax.lion`; or a bare one, `lion`, which is looked up in the modules
            `nearby` and SHORT, in this order.
        packages: The user's top-level packages.
        nearby: Modules that define the present value or the annotated class.
    """
    parts = text.split(".")
    if len(text) > 200 or not all(part.isidentifier() for part in parts):
        return None
    splits = [(".".join(parts[:n]), ".".join(parts[n:])) for n in range(len(parts) - 1, 0, -1)]
    for module, name in splits or [(place, text) for place in (*nearby, *SHORT)]:
        is_nearby = module in nearby and module in sys.modules
        may_look = is_nearby or is_allowed(module, name, packages)
        value = _shown_in(module, name) if may_look else None
        symbol = None if value is None else name_of(value)
        # Modules export names that others define: the defining module decides.
        if symbol is not None and is_allowed(*symbol, packages):
            return imported(*symbol)
    return None


def names_in(nearby: Sequence[str]) -> list[str]:
    """Returns the bare names of functions and classes that `named` knows."""
    names = {
        name for place in (*nearby, *SHORT) for name, item in vars(_loaded(place) or object).items()
        if callable(item) and not name.startswith("_")
        and (place in nearby or is_allowed(place, name, ()))
    }
    # The library's names are loaded on first use, so they are not in vars().
    ours = {name for place in SHORT for name in PUBLIC.get(place, ()) if not name.isupper()}
    return sorted(names | ours)


def name_of(value: Any) -> tuple[str, str] | None:
    """Returns (module, name) under which `value` itself is imported, or None.

    It is the library's public name, if there is one: private modules move.
    """
    if isinstance(value, enum.Enum):
        owner = name_of(type(value))
        return owner and (owner[0], f"{owner[1]}.{value.name}")
    if isinstance(value, types.MethodType):
        owner = name_of(value.__self__) if isinstance(value.__self__, type) else None
        return owner and (owner[0], f"{owner[1]}.{value.__name__}")
    module = getattr(value, "__module__", None)
    if not isinstance(module, str) or isinstance(value, types.ModuleType):
        return None
    if module != "builtins":
        for library in (*PUBLIC, *LIBRARIES):
            if (name := _name_in(_loaded(library), value)) is not None:
                return library, name
    if module not in sys.modules:
        return None
    name = _name_in(sys.modules[module], value)
    return None if name is None else (module, name)


def _shown_in(module: str, name: str) -> Any:
    result = _holder(module)
    for depth, part in enumerate(name.split(".")):
        result = getattr(result, part, None) if depth == 0 or isinstance(result, type) else None
    return result


def _holder(module: str) -> Any:
    """Returns a module, or None if there is none by that name."""
    if module == "jax.checkpoint_policies":  # An attribute, not a module.
        return importlib.import_module("jax").checkpoint_policies
    return imported_module(module)


def _is_defined_in(value: Any, module: str, depth: int) -> bool:
    place = getattr(value, "__module__", None)
    if not isinstance(place, str) or isinstance(value, enum.Enum):
        place = type(value).__module__
    top = module.partition(".")[0]
    if module in ARRAY_LIBRARIES:
        return True  # jax.numpy exports some names of numpy; the kind decides.
    if module not in (*LIBRARIES, *PUBLIC) and depth == 0:
        return place == module
    # The user's classes inherit methods from praxis_lite, and libraries export names of jaxlib.
    others = ("jaxlib",) if module in LIBRARIES else ("praxis_lite",)
    return place.partition(".")[0] in (top, *others)


def _loaded(library: str) -> Any:
    parent, _, last = library.rpartition(".")
    return sys.modules.get(library) or getattr(sys.modules.get(parent), last, None)


def _name_in(holder: Any, value: Any) -> str | None:
    # The first has the class before it, of a static method: `WeightInit.Xavier`.
    for attribute in ("__qualname__", "__name__"):
        name = getattr(value, attribute, None)
        if not isinstance(name, str) or name.startswith("__"):
            continue
        if _is_at(holder, name, value):
            return name
    # An instance at the top of a module, such as some of JAX's remat policies.
    names = vars(holder).items() if holder is not None else ()
    return next(
        (name for name, item in names if item is value and not name.startswith("__")), None
    )


def _is_at(holder: Any, name: str, value: Any) -> bool:
    for part in name.split("."):
        holder = getattr(holder, part, None)
    return holder is not None and holder is value
