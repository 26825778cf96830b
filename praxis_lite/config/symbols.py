"""Which functions and classes a config's text may name, and whether they are there."""

import enum
import importlib
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

from fiddle.experimental import serialization

from praxis_lite.errors import ConfigError

# Reading a config imports what it names and building it calls that: only these, and the package
# of the experiment, may be named.
_PACKAGES = frozenset(
    ["praxis_lite", "tasks", "experiments", "jax", "jaxlib", "flax", "optax", "numpy", "fiddle"]
    + ["ml_dtypes"]
)
_BUILTINS = frozenset(
    one.__name__
    for one in (bool, bytes, complex, dict, float, frozenset, int, list, set, slice, str, tuple)
)


def symbol_of(value: Any) -> tuple[str, str] | None:
    """Returns (module, name) under which `value` itself can be imported, or None."""
    if isinstance(value, enum.Enum):
        return type(value).__module__, f"{type(value).__qualname__}.{value.name}"
    module = getattr(value, "__module__", None)
    if not isinstance(module, str) or module not in sys.modules:
        return None
    if isinstance(value, types.MethodType):
        is_of_class = isinstance(value.__self__, type)
        return (module, value.__qualname__) if is_of_class else None
    for name in (getattr(value, "__qualname__", None), getattr(value, "__name__", None)):
        if isinstance(name, str) and _get(sys.modules[module], name) is value:
            return module, name
    # An instance at the top of a module, such as some of JAX's remat policies.
    names = [name for name, one in vars(sys.modules[module]).items() if one is value]
    return (module, names[0]) if names else None


def _get(module: types.ModuleType, symbol: str) -> Any:
    for name in symbol.split("."):
        module = getattr(module, name, None)
    return module


class SymbolPolicy(serialization.PyrefPolicy):
    """Lets fiddle import from some packages, and only what is defined in them."""

    def __init__(self, packages: frozenset[str]):
        self._packages = packages

    def allows_import(self, module: str, symbol: str) -> bool:
        if any(part.startswith("__") for part in symbol.split(".")):
            return False
        if module == "builtins":
            return symbol in _BUILTINS
        return module.partition(".")[0] in self._packages

    def allows_value(self, value: Any) -> bool:
        # `os.system` is an attribute of many an allowed module that imports os.
        if isinstance(value, types.ModuleType):
            return False
        module = getattr(value, "__module__", None)
        if not isinstance(module, str):
            module = type(value).__module__
        if module == "builtins":
            return getattr(value, "__name__", None) in _BUILTINS
        return module.partition(".")[0] in self._packages


def policy_for(experiment: str, packages: Sequence[str]) -> SymbolPolicy:
    """Returns what one experiment's config may name: the usual packages, its own, `packages`."""
    own = experiment.partition(".")[0]
    # The text itself says whose it is: that must not open the standard library.
    is_usable = own not in sys.stdlib_module_names
    return SymbolPolicy(_PACKAGES | set(packages) | ({own} if is_usable else set()))


def checked_symbols(graph: Any, policy: SymbolPolicy) -> set[tuple[str, str]]:
    """Returns all (module, name) that the graph refers to, having checked every one."""
    symbols = set()
    for module, symbol in _references(graph):
        if not (isinstance(module, str) and isinstance(symbol, str)):
            raise ConfigError("config.json is damaged: a reference without module and name.")
        if not policy.allows_import(module, symbol):
            raise ConfigError(refused("config.json", module, symbol))
        symbols.add((module, symbol))
    return symbols


def _references(graph: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(graph, list):
        for one in graph:
            yield from _references(one)
    elif isinstance(graph, dict):
        if graph.get("type") == "pyref":
            yield graph.get("module"), graph.get("name")
        for one in graph.values():
            yield from _references(one)


def refused(where: str, module: str, symbol: str) -> str:
    """Returns the paragraph on a name that the policy does not let in."""
    return (
        f"{where} names {module}.{symbol}, and only what praxis_lite, tasks, experiments, jax, "
        "flax, optax, numpy and the experiment's own package define is imported from a config. "
        "Put a function or class of your own, in your package, around it."
    )


def check_exists(module: str, symbol: str) -> None:
    """Imports the module and looks for the name in it.

    Raises:
        ConfigError: one of them is not there. What the module itself raises comes as it is.
    """
    gone = (
        f"config.json names {module}.{symbol}, which is not there: the code has changed since the "
        "job began, or its package is not on sys.path. Restore it, or start a new job."
    )
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # The module is there, and what it imports is not.
        raise ConfigError(gone) from None
    if _get(found, symbol) is None:
        raise ConfigError(gone)
