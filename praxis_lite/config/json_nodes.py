"""Writes and reads a config as nested JSON objects.

Numbers, strings, true, false and null are written unchanged. Every other value is an object whose
first key is the kind of the value, as in `{"tuple": [1, 2]}`, `{"name": "jax.nn:gelu"}` or

    {"Config": "praxis_lite:RunConfig", "arguments": {"num_train_steps": 7}, "id": 3}

A shared object is written with an "id" the first time and as `{"again": 3}` afterwards, so there
are no cycles.
"""

import functools
import json
import math
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import fiddle as fdl

from praxis_lite.config.allowed_names import is_allowed, not_allowed_message
from praxis_lite.config.literals import dtype_name
from praxis_lite.config.names import imported, name_of
from praxis_lite.config.paths import describe, join
from praxis_lite.core.errors import ConfigError, shortened
from praxis_lite.public_names import current_name

FORMAT = 3

_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_BUILDABLES = {"Config": fdl.Config, "Partial": fdl.Partial}


def write(value: Any, packages: Collection[str]) -> Any:
    """Converts a value to JSON, from which `read` rebuilds it.

    Args:
        value: A config, or a value in a config.
        packages: Top-level packages whose functions and classes the value may contain.

    Raises:
        ConfigError: A value, such as a lambda or an array, cannot be serialized, or a name is not
            allowed. The message contains the path.
    """
    return _Writer(packages).write(value, "")


def read(node: Any, packages: Collection[str]) -> Any:
    """Rebuilds a value from the output of `write`.

    Args:
        node: The JSON value.
        packages: Top-level packages whose functions and classes the node may contain.

    Raises:
        ConfigError: The node is invalid, or contains a name that is not allowed or does not exist.
    """
    return _Reader(packages).read(node, "config")


def damaged(path: str, reason: str) -> ConfigError:
    """Returns the error for an invalid config.json."""
    return ConfigError(
        f"config.json is damaged, or was not written by praxis_lite: {shortened(path, 300)}: "
        f"{reason}. Restore the file or start a new job."
    )


class _Writer:
    def __init__(self, packages: Collection[str]):
        self._packages = packages
        self._num_ids = 0
        # Also store the value, because the id of a freed object may be reused.
        self._written: dict[int, tuple[Any, dict[str, Any]]] = {}

    def write(self, value: Any, path: str) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        # Immutable values such as tuples need not be shared in the rebuilt config.
        is_shared = isinstance(value, fdl.Buildable | functools.partial) or type(value) in (
            list,
            dict,
            set,
        )
        if not is_shared:
            return self._new(value, path)
        if id(value) in self._written:
            node = self._written[id(value)][1]
            # Only objects that occur more than once get an id.
            if "id" not in node:
                self._num_ids += 1
                node["id"] = self._num_ids
            return {"again": node["id"]}
        node = self._new(value, path)
        self._written[id(value)] = (value, node)
        return node

    def _new(self, value: Any, path: str) -> dict[str, Any]:
        kind = type(value).__name__
        # Do not import these modules: if one is not loaded, the value cannot have one of its types.
        numpy, sharding = sys.modules.get("numpy"), sys.modules.get("jax.sharding")
        if isinstance(value, fdl.Buildable):
            # Fiddle's other Buildables are for tools that edit configs.
            if _BUILDABLES.get(kind) is not type(value):
                raise ConfigError(
                    f"{path} is {describe(value)}; expected an fdl.Config or fdl.Partial."
                )
            name = self._name(fdl.get_callable(value), path)
            return {kind: name, "arguments": self._arguments(value.__arguments__, path)}
        if isinstance(value, functools.partial):
            node: dict[str, Any] = {"functools.partial": self._name(value.func, path)}
            node["items"] = self._items(value.args, path)
            return {**node, "arguments": self._arguments(value.keywords, path)}
        if numpy is not None and isinstance(value, numpy.dtype):
            return {"dtype": dtype_name(value)}
        if sharding is not None and isinstance(value, sharding.PartitionSpec):
            return {"PartitionSpec": self._items(value, path)}
        if type(value) is bytes:
            return {"bytes": value.hex()}
        if type(value) is slice:
            return {"slice": self._items((value.start, value.stop, value.step), path)}
        if type(value) is dict:
            pairs = [
                [self.write(key, path), self.write(item, join(path, key))]
                for key, item in value.items()
            ]
            return {"dict": pairs}
        if type(value) in (set, frozenset):
            # Sort the items, so that their order is the same in every process.
            return {kind: sorted(self._items(value, path), key=json.dumps)}
        if _SEQUENCES.get(kind) is type(value):
            return {kind: self._items(value, path)}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {"namedtuple": self._name(type(value), path), "items": self._items(value, path)}
        # Other values are written by name, or refused if they have none.
        return {"name": self._name(value, path)}

    def _items(self, values: Collection[Any], path: str) -> list[Any]:
        return [self.write(value, join(path, index)) for index, value in enumerate(values)]

    def _arguments(
        self, arguments: Mapping[str, Any] | Mapping[str | int, Any], path: str
    ) -> dict[str, Any]:
        # Positional arguments have numbers as keys, which cannot be names of parameters.
        return {str(key): self.write(value, join(path, key)) for key, value in arguments.items()}

    def _name(self, value: Any, path: str) -> str:
        symbol = name_of(value)
        if symbol is None:
            is_local = "<" in getattr(value, "__qualname__", "")
            description = (
                f"the function or class {value.__qualname__}, which is not defined at the top "
                "level of a module"
                if is_local
                else f"{describe(value)}, which is not a literal and has no name in a module"
            )
            raise ConfigError(
                f"{path} is {description}, so it cannot be written to config.json. Define it at "
                "the top level of a module, or use fdl.Config(...) of the class or function that "
                "creates it."
            )
        if not is_allowed(*symbol, self._packages):
            raise ConfigError(not_allowed_message(f"{path}: the config", *symbol))
        # Check that the name can be read back. This imports nothing, because the module is loaded.
        imported(*symbol)
        return ":".join(symbol)


class _Reader:
    def __init__(self, packages: Collection[str]):
        self._packages = packages
        self._shared: dict[int, Any] = {}

    def read(self, node: Any, path: str) -> Any:
        if type(node) is not dict:
            return node
        kind = next(iter(node), "")
        try:
            if kind == "again":
                return self._shared[node["again"]]
            value = self._new(node, kind, path)
        except ConfigError:
            raise
        except (
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
            OverflowError,
            RecursionError,
        ) as error:
            raise damaged(path, f"{type(error).__name__}: {shortened(str(error))}") from error
        if "id" in node:
            self._shared[node["id"]] = value
        return value

    def _new(self, node: dict[str, Any], kind: str, path: str) -> Any:
        content = node[kind]
        if kind == "name":
            return self._named(content)
        if kind == "float":
            return float(content)
        if kind == "bytes":
            return bytes.fromhex(content)
        if kind == "dtype":
            import ml_dtypes  # noqa: F401 - registers the name bfloat16 with numpy.
            import numpy as np

            return np.dtype(content)
        # Children are read in the order in which they were written, as "again" requires.
        pairs = [(key, self.read(item, f"{path}.{key}")) for key, item in _children(node, kind)]
        values = [value for _, value in pairs]
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](values)
        if kind == "slice":
            return slice(*values)
        if kind == "PartitionSpec":
            from jax.sharding import PartitionSpec

            return PartitionSpec(*values)
        if kind == "dict":
            # Keys and values alternate.
            return dict(zip(values[::2], values[1::2], strict=True))
        # In the remaining kinds, the content is the name of a class or function.
        function = self._named(content)
        if kind == "namedtuple":
            is_tuple = isinstance(function, type) and issubclass(function, tuple)
            make = getattr(function, "_make", None) if is_tuple else None
            if make is None:
                raise damaged(path, f"{content} is not a named tuple")
            return make(values)
        if not callable(function):
            raise damaged(path, f"{content} is {describe(function)}, which cannot be called")
        # `items` are positional arguments, which `_children` yields before the named arguments.
        num_items = len(node.get("items", ()))
        arguments = dict(pairs[num_items:])
        if kind == "functools.partial":
            return functools.partial(function, *values[:num_items], **arguments)
        return _buildable(_BUILDABLES[kind], function, arguments)

    def _named(self, text: str) -> Any:
        module, _, name = text.partition(":")
        # Without a warning: a recorded config cannot be changed.
        module, name = current_name(module, name)
        if not is_allowed(module, name, self._packages):
            raise ConfigError(not_allowed_message("config.json", module, name))
        return imported(module, name)


def _children(node: dict[str, Any], kind: str) -> Iterator[tuple[str, Any]]:
    """Yields (name for messages, node) for each child of a node."""
    if kind == "dict":
        for key, value in node[kind]:
            yield "key", key
            yield str(key), value
    elif type(node[kind]) is list:
        yield from ((str(index), item) for index, item in enumerate(node[kind]))
    yield from ((str(index), element) for index, element in enumerate(node.get("items", ())))
    yield from node.get("arguments", {}).items()


def _buildable(kind: type[fdl.Buildable], function: Any, arguments: dict[str, Any]) -> Any:
    # Rebuild the config like Fiddle's unflatten, to preserve defaults and positional arguments.
    keys = tuple(int(key) if key.isdecimal() else key for key in arguments)
    metadata = kind(function).__flatten__()[1]._replace(argument_names=keys, argument_tags={})
    return kind.__unflatten__(arguments.values(), metadata)
