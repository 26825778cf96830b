"""The form of a config's JSON objects (see nodes.py), checked before anything is imported."""

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.run.config.configurable import is_allowed, refused

SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_CALLS = ("Config", "Partial", "functools.partial")
_TEXTS = {
    "float": re.compile(r"-?inf|nan"),
    "dtype": re.compile(r"[a-z]+[0-9]*(_?[a-z0-9]+)*"),
    "bytes": re.compile(r"([0-9a-f]{2})*"),
}
# A language model's config has 200 nodes, 9 deep. A shared node counts once per place: 30 lists
# that each hold the one before twice are 2**30 lists to a function that walks through them.
_MOST_NODES = 100_000
_DEEPEST = 60

FORMAT = 3


def check(node: Any, packages: Collection[str]) -> dict[str, tuple[str, str]]:
    """Returns the (module, name) that each name in the JSON value means; all of it is checked.

    Nothing is imported.

    Args:
        node: of a config.json.
        packages: top-level packages whose functions and classes it may name.

    Raises:
        ConfigError: it is not what `write` writes, holds a name that is not allowed, or is larger
            than any config.
    """
    checker = _Checker(packages)
    checker.check(node, "config", 1)
    return checker.names


def children(node: dict[str, Any], kind: str) -> Iterator[tuple[str, Any]]:
    """Yields the nodes directly below a node, each with a name for messages."""
    if kind == "dict":
        for key, value in node[kind]:
            yield "key", key
            yield str(key), value
    elif type(node[kind]) is list:
        yield from ((str(index), item) for index, item in enumerate(node[kind]))
    yield from ((str(index), element) for index, element in enumerate(node.get("items", ())))
    yield from node.get("arguments", {}).items()


def damaged(path: str, reason: str) -> ConfigError:
    """Returns the message of a config.json that praxis_lite does not write."""
    return ConfigError(
        f"config.json is damaged, or praxis_lite did not write it: {shown(path, 300)}: {reason}. "
        "Restore the file or start a new job."
    )


def _text(node: Any) -> str:
    return shown(json.dumps(node) if not isinstance(node, dict | list) else _kind_of(node))


def _kind_of(node: dict | list) -> str:
    return f"an object with {', '.join(map(str, node))[:200]}" if node else "an empty object"


class _Checker:
    def __init__(self, packages: Collection[str]):
        self.names: dict[str, tuple[str, str]] = {}
        self._packages = packages
        self._sizes: dict[int, tuple[int, int]] = {}

    def check(self, node: Any, path: str, depth: int) -> tuple[int, int]:
        """Returns how many nodes there are, counted once per place, and how deep they lie."""
        if node is None or type(node) in (bool, int, float, str):
            return 1, 1
        if type(node) is not dict or not node:
            raise damaged(path, f"found {_text(node)}, wanted a value or an object with its kind")
        kind = next(iter(node))
        if kind == "again":
            number = node[kind]
            if len(node) > 1 or type(number) is not int or number not in self._sizes:
                raise damaged(path, f"{_text(node)} points to nothing that is written before it")
            return self._sizes[number]
        self._check_form(node, kind, path)
        num_nodes, height = 1, 1
        for key, child in children(node, kind):
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
        elif kind in SEQUENCES or kind in ("slice", "PartitionSpec"):
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
            raise damaged(path, f"found an object that begins with {shown(kind)!r}, no known kind")
        number = node.get("id", 0)
        if not is_right or not keys >= set(node) or type(number) is not int:
            raise damaged(path, f"found {_text(node)}, no {kind} as praxis_lite writes it")
        if "id" in node and number in self._sizes:
            raise damaged(path, f"the id {number} stands twice")

    def _checks_name(self, text: Any, path: str) -> bool:
        module, colon, name = text.partition(":") if type(text) is str else ("", "", "")
        if not colon:
            raise damaged(path, f"found {_text(text)}, wanted a name such as jax.nn:gelu")
        if not is_allowed(module, name, self._packages):
            raise ConfigError(refused("config.json", module, name))
        self.names[text] = (module, name)
        return True
