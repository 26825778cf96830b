"""A config as nested JSON objects: written, checked without an import, and read again.

A number, a text, true, false and null stand for themselves; everything else is an object with the
kind as its first key, as in `{"tuple": [1, 2]}`, `{"name": "jax.nn:gelu"}` or

    {"Config": "praxis_lite.experiment:RunConfig", "arguments": {"num_train_steps": 7}, "id": 3}

What stands in several places is written at the first one, with an "id", and is `{"again": 3}` at
the others: so the text has no cycles.
"""

import functools
import json
import math
import re
import sys
from collections.abc import Collection, Iterator
from typing import Any

import fiddle as fdl

from praxis_lite.config.names import imported, is_allowed, name_of, refused
from praxis_lite.config.paths import describe, join
from praxis_lite.config.values import dtype_name
from praxis_lite.errors import ConfigError, shown

_BUILDABLES = {"Config": fdl.Config, "Partial": fdl.Partial}
_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_CALLS = ("Config", "Partial", "functools.partial")
_TEXTS = {
    "float": re.compile(r"-?inf|nan"),
    "dtype": re.compile(r"[a-z]+[0-9]*(_?[a-z0-9]+)*"),
    "bytes": re.compile(r"([0-9a-f]{2})*"),
}
# Beyond any config by far: a language model's has 200 nodes, 9 deep. Of shared nodes every place
# counts: 30 lists that each hold the one before twice are 2**30 lists to whoever walks through it.
_MOST_NODES = 100_000
_DEEPEST = 60


def write(value: Any, packages: Collection[str]) -> Any:
    """Returns the JSON value from which `read` makes `value` again.

    Args:
        value: a config, or what may stand in one.
        packages: top-level packages whose functions and classes it may name.

    Raises:
        ConfigError: it holds what text cannot, such as a lambda or an array, or a name that `check`
            would refuse; names the path.
    """
    node = _Writer(packages).write(value, "")
    check(node, packages)
    return node


def check(node: Any, packages: Collection[str]) -> set[tuple[str, str]]:
    """Returns every (module, name) that the JSON value names, having checked all of it.

    Nothing is imported.

    Raises:
        ConfigError: it is nothing that `write` writes, or holds a name that is not allowed, or is
            larger than any config.
    """
    checker = _Checker(packages)
    checker.check(node, "config", 1)
    return checker.names


def read(node: Any) -> Any:
    """Returns what a JSON value that has been checked means; imports what it names."""
    return _Reader().read(node, "config")


class _Writer:
    def __init__(self, packages: Collection[str]):
        self._packages = packages
        self._num_ids = 0
        # The value is kept too: a freed one's id could come again.
        self._written: dict[int, tuple[Any, dict[str, Any] | None]] = {}

    def write(self, value: Any, path: str) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        # A tuple is what it holds, wherever it stands.
        is_shared = isinstance(value, fdl.Buildable | functools.partial) or type(value) in (
            list, dict, set,
        )
        if not is_shared:
            return self._new(value, path)
        if id(value) in self._written:
            node = self._written[id(value)][1]
            if node is None:
                raise ConfigError(f"{path}: the config holds itself. Take it out of there.")
            if "id" not in node:
                self._num_ids += 1
                node["id"] = self._num_ids
            return {"again": node["id"]}
        self._written[id(value)] = (value, None)
        node = self._new(value, path)
        self._written[id(value)] = (value, node)
        return node

    def _new(self, value: Any, path: str) -> dict[str, Any]:
        kind = type(value).__name__
        numpy, sharding = sys.modules.get("numpy"), sys.modules.get("jax.sharding")
        if isinstance(value, fdl.Buildable):
            # What else fiddle has is for tools that edit configs.
            if _BUILDABLES.get(kind) is not type(value):
                raise ConfigError(f"{path}: is {describe(value)}: write an fdl.Config.")
            name = self._name(fdl.get_callable(value), path)
            return {kind: name, "arguments": self._arguments(value.__arguments__, path)}
        if isinstance(value, functools.partial):
            node = {"functools.partial": self._name(value.func, path)}
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
            # A key's own path says more than its value's.
            pairs = [[self.write(key, path), self.write(one, join(path, key))]
                     for key, one in value.items()]
            return {"dict": pairs}
        if type(value) in (set, frozenset):
            # In an order that does not change from process to process.
            return {kind: sorted(self._items(value, path), key=json.dumps)}
        if _SEQUENCES.get(kind) is type(value):
            return {kind: self._items(value, path)}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {"namedtuple": self._name(type(value), path), "items": self._items(value, path)}
        return {"name": self._name(value, path)}

    def _items(self, values: Collection[Any], path: str) -> list[Any]:
        return [self.write(one, join(path, index)) for index, one in enumerate(values)]

    def _arguments(self, arguments: dict[str | int, Any], path: str) -> dict[str, Any]:
        # Positional ones have numbers, which no name of a parameter looks like.
        return {str(key): self.write(one, join(path, key)) for key, one in arguments.items()}

    def _name(self, value: Any, path: str) -> str:
        symbol = name_of(value)
        if symbol is None:
            is_local = "<" in getattr(value, "__qualname__", "")
            what = (
                f"the function or class {value.__qualname__}, which has no name at the top of a "
                "module"
                if is_local
                else f"{describe(value)}, which has no literal and no name in a module"
            )
            raise ConfigError(
                f"{path}: is {what}, so the job's config.json could not hold it. Define it at the "
                "top of a module, or write fdl.Config(...) of the class or function that makes it."
            )
        if not is_allowed(*symbol, self._packages):
            raise ConfigError(refused(f"{path}: the config", *symbol))
        # What is written can be read: this is in sys.modules, and nothing is imported by it.
        imported(*symbol)
        return ":".join(symbol)


class _Checker:
    def __init__(self, packages: Collection[str]):
        self.names: set[tuple[str, str]] = set()
        self._packages = packages
        self._sizes: dict[int, tuple[int, int]] = {}

    def check(self, node: Any, path: str, depth: int) -> tuple[int, int]:
        """Returns how many nodes it is, every place counted, and how deep they stand."""
        if node is None or type(node) in (bool, int, float, str):
            return 1, 1
        if type(node) is not dict or not node:
            raise _damaged(path, f"found {_text(node)}, wanted a value or an object with its kind")
        kind = next(iter(node))
        if kind == "again":
            number = node[kind]
            if len(node) > 1 or type(number) is not int or number not in self._sizes:
                raise _damaged(path, f"{_text(node)} points to nothing that is written before it")
            return self._sizes[number]
        self._check_form(node, kind, path)
        num_nodes, height = 1, 1
        for key, child in _children(node, kind):
            below = f"{path}.{shown(key, 40)}"
            child_nodes, child_height = self.check(child, below, depth + 1)
            num_nodes, height = num_nodes + child_nodes, max(height, child_height + 1)
            if num_nodes > _MOST_NODES or max(height, depth) > _DEEPEST:
                raise ConfigError(
                    f"{shown(below)}: a config has at most {_MOST_NODES} parts, each counted "
                    f"wherever it stands, and {_DEEPEST} within each other; here are more."
                )
        if "id" in node:
            self._sizes[node["id"]] = (num_nodes, height)
        return num_nodes, height

    def _check_form(self, node: dict[str, Any], kind: str, path: str) -> None:
        keys = {kind, "id"}
        if kind in _TEXTS:
            is_right = type(node[kind]) is str and _TEXTS[kind].fullmatch(node[kind]) is not None
        elif kind in _SEQUENCES or kind in ("slice", "PartitionSpec"):
            is_right = type(node[kind]) is list
            is_right = is_right and (kind != "slice" or len(node[kind]) == 3)
        elif kind == "dict":
            is_right = type(node[kind]) is list and all(
                type(pair) is list and len(pair) == 2 for pair in node[kind]
            )
        elif kind in ("name", "namedtuple", *_CALLS):
            is_right = self._checks_name(node[kind], path)
            if kind in _CALLS:
                keys |= {"arguments"}
                is_right = is_right and type(node.get("arguments")) is dict
            if kind in ("namedtuple", "functools.partial"):
                keys |= {"items"}
                is_right = is_right and type(node.get("items")) is list
        else:
            raise _damaged(path, f"found an object that begins with {shown(kind)!r}, no known kind")
        number = node.get("id", 0)
        if not is_right or not keys >= set(node) or type(number) is not int:
            raise _damaged(path, f"found {_text(node)}, no {kind} as praxis_lite writes it")
        if "id" in node and number in self._sizes:
            raise _damaged(path, f"the id {number} stands twice")

    def _checks_name(self, text: Any, path: str) -> bool:
        module, colon, name = text.partition(":") if type(text) is str else ("", "", "")
        if not colon:
            raise _damaged(path, f"found {_text(text)}, wanted a name such as jax.nn:gelu")
        if not is_allowed(module, name, self._packages):
            raise ConfigError(refused("config.json", module, name))
        self.names.add((module, name))
        return True


class _Reader:
    def __init__(self) -> None:
        self._shared: dict[int, Any] = {}

    def read(self, node: Any, path: str) -> Any:
        if type(node) is not dict:
            return node
        kind = next(iter(node))
        if kind == "again":
            return self._shared[node["again"]]
        try:
            value = self._new(node, kind, path)
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, ConfigError):
                raise
            raise _damaged(path, f"{type(error).__name__}: {error}") from error
        if "id" in node:
            self._shared[node["id"]] = value
        return value

    def _new(self, node: dict[str, Any], kind: str, path: str) -> Any:
        content = node[kind]
        if kind == "name":
            return imported(*content.split(":"))
        if kind == "float":
            return float(content)
        if kind == "bytes":
            return bytes.fromhex(content)
        if kind == "dtype":
            import ml_dtypes  # noqa: F401 - numpy learns the name bfloat16 from it.
            import numpy as np

            return np.dtype(content)
        children = [(key, self.read(one, f"{path}.{key}")) for key, one in _children(node, kind)]
        values = [value for _, value in children]
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](values)
        if kind == "slice":
            return slice(*values)
        if kind == "PartitionSpec":
            from jax.sharding import PartitionSpec

            return PartitionSpec(*values)
        if kind == "dict":
            return dict(zip(values[::2], values[1::2], strict=True))
        function = imported(*content.split(":"))
        if kind == "namedtuple":
            if not (isinstance(function, type) and issubclass(function, tuple)):
                raise _damaged(path, f"{content} is no named tuple")
            return function._make(values)
        if not callable(function):
            raise _damaged(path, f"{content} is {describe(function)}, which cannot be called")
        num_items = len(node.get("items", ()))
        arguments = dict(children[num_items:])
        if kind == "functools.partial":
            return functools.partial(function, *values[:num_items], **arguments)
        return _buildable(_BUILDABLES[kind], function, arguments)


def _children(node: dict[str, Any], kind: str) -> Iterator[tuple[str, Any]]:
    """Yields the nodes directly below one, with what to call each."""
    if kind == "dict":
        for key, value in node[kind]:
            yield "key", key
            yield str(key), value
    elif type(node[kind]) is list:
        yield from ((str(index), one) for index, one in enumerate(node[kind]))
    yield from ((str(index), one) for index, one in enumerate(node.get("items", ())))
    yield from node.get("arguments", {}).items()


def _buildable(kind: type[fdl.Buildable], function: Any, arguments: dict[str, Any]) -> Any:
    # As fiddle unflattens one: neither defaults nor positional arguments become something else.
    keys = tuple(int(key) if key.isdecimal() else key for key in arguments)
    metadata = kind(function).__flatten__()[1]._replace(argument_names=keys, argument_tags={})
    return kind.__unflatten__(arguments.values(), metadata)


def _damaged(path: str, reason: str) -> ConfigError:
    return ConfigError(
        f"config.json is damaged, or praxis_lite did not write it: {shown(path, 300)}: {reason}. "
        "Restore the file or start a new job."
    )


def _text(node: Any) -> str:
    return shown(json.dumps(node) if not isinstance(node, dict | list) else _kind_of(node))


def _kind_of(node: dict | list) -> str:
    return f"an object with {', '.join(map(str, node))[:200]}" if node else "an empty object"
