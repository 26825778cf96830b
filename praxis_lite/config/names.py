"""Looks up the objects that names in configs refer to, and the names of objects."""

import enum
import importlib
import sys
import types
from collections.abc import Collection, Sequence
from typing import Any

from praxis_lite.config.allowed_names import (
    ARRAY_LIBRARIES,
    LIBRARIES,
    PUBLIC,
    is_allowed,
    is_of_kind,
    not_allowed_message,
)
from praxis_lite.core.callables import imported_module
from praxis_lite.core.errors import ConfigError
from praxis_lite.public_names import current_name, warn_deprecated

# The modules in which bare names after --set are looked up.
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
    """Imports and returns `module:name`, which must have passed `is_allowed`.

    Raises:
        ConfigError: The name does not exist, or is not a class, function or constant defined in the
            module. Exceptions raised by the module are propagated.
    """
    missing = (
        f"config.json contains {module}.{name}, which does not exist: the code has changed, or its "
        "package is not on sys.path. Restore it, or start a new job."
    )
    if module == "__main__":
        missing = (
            f"config.json contains {module}.{name}, which was defined in a notebook or script and "
            "is not defined here yet. Run the cell or the code that defines it first."
        )
    value = _module(module)
    for depth, part in enumerate(name.split(".")):
        # Only follow attributes of modules and classes, because getattr on an instance may run
        # code.
        if depth > 0 and not isinstance(value, type):
            raise ConfigError(not_allowed_message("config.json", module, name))
        value = getattr(value, part, None)
        if value is None:
            raise ConfigError(missing)
        # Reject imported names. For example, `os.system` is reachable in modules that import os.
        if not _is_defined_in(value, module, depth):
            raise ConfigError(not_allowed_message("config.json", module, name))
    if not is_of_kind(module, value):
        raise ConfigError(not_allowed_message("config.json", module, name))
    return value


def named(text: str, packages: Collection[str], nearby: Sequence[str] = ()) -> Any:
    """Returns the object that a name in `--set` refers to; None if it is unknown or not allowed.

    Args:
        text: A full name such as `optax.lion`, or a bare name such as `lion`, which is looked up in
            the modules in `nearby` and SHORT, in this order.
        packages: The user's top-level packages.
        nearby: Modules that define the current value or the annotated class.
    """
    parts = text.split(".")
    if len(text) > 200 or not all(part.isidentifier() for part in parts):
        return None
    # Try every split into module and attribute, starting with the longest module name.
    splits = [(".".join(parts[:n]), ".".join(parts[n:])) for n in range(len(parts) - 1, 0, -1)]
    for module, name in splits or [(module, text) for module in (*nearby, *SHORT)]:
        new_module, new_name = current_name(module, name)
        if (new_module, new_name) != (module, name):
            warn_deprecated(module, name)
            module, name = new_module, new_name
        is_nearby = module in nearby and module in sys.modules
        may_import = is_nearby or is_allowed(module, name, packages)
        value = _attribute_at(module, name) if may_import else None
        symbol = None if value is None else name_of(value)
        # Modules re-export names, so check that the defining module is allowed.
        if symbol is not None and is_allowed(*symbol, packages):
            return imported(*symbol)
    return None


def names_in(nearby: Sequence[str]) -> list[str]:
    """Returns the bare names of functions and classes that `named` accepts."""
    names = {
        name
        for module in (*nearby, *SHORT)
        for name, value in vars(_loaded(module) or object).items()
        if callable(value)
        and not name.startswith("_")
        and (module in nearby or is_allowed(module, name, ()))
    }
    # The library's names are imported on first use, so vars() does not contain them.
    ours = {name for module in SHORT for name in PUBLIC.get(module, ()) if not name.isupper()}
    return sorted(names | ours)


def name_of(value: Any) -> tuple[str, str] | None:
    """Returns (module, name) from which `value` can be imported, or None.

    A public name of the library is preferred, because private modules may move.
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


def _attribute_at(module: str, name: str) -> Any:
    value = _module(module)
    for depth, part in enumerate(name.split(".")):
        value = getattr(value, part, None) if depth == 0 or isinstance(value, type) else None
    return value


def _module(module: str) -> Any:
    """Imports and returns a module, or None if it does not exist."""
    if module == "jax.checkpoint_policies":  # This is an attribute, not a module.
        return importlib.import_module("jax").checkpoint_policies
    return imported_module(module)


def _is_defined_in(value: Any, module: str, depth: int) -> bool:
    """Returns whether an object belongs to a module instead of being imported by it."""
    home = getattr(value, "__module__", None)
    if not isinstance(home, str) or isinstance(value, enum.Enum):
        home = type(value).__module__
    top = module.partition(".")[0]
    if module in ARRAY_LIBRARIES:
        return True  # jax.numpy re-exports names from numpy; `is_of_kind` checks them.
    if module not in (*LIBRARIES, *PUBLIC) and depth == 0:
        return home == module
    # User classes inherit methods from praxis_lite, and libraries re-export names from jaxlib.
    others = ("jaxlib",) if module in LIBRARIES else ("praxis_lite",)
    return home.partition(".")[0] in (top, *others)


def _loaded(library: str) -> Any:
    parent, _, last = library.rpartition(".")
    return sys.modules.get(library) or getattr(sys.modules.get(parent), last, None)


def _name_in(holder: Any, value: Any) -> str | None:
    # The qualified name of a static method includes its class, as in `WeightInit.Xavier`.
    for attribute in ("__qualname__", "__name__"):
        name = getattr(value, attribute, None)
        if not isinstance(name, str) or name.startswith("__"):
            continue
        if _is_at(holder, name, value):
            return name
    # A module-level instance without a name, such as some of JAX's remat policies.
    members = vars(holder).items() if holder is not None else ()
    return next(
        (name for name, member in members if member is value and not name.startswith("__")), None
    )


def _is_at(holder: Any, name: str, value: Any) -> bool:
    for part in name.split("."):
        holder = getattr(holder, part, None)
    return holder is not None and holder is value
