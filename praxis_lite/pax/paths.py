"""Finds the layer and the stack of a variable from its path, in Pax's models and in ours.

A stack of layers has several forms: unrolled (`x_layers_0`, `x_layers_1`, ...), scanned
(`repeat/sub/x_layers_0`, arrays [repeats, ...]), pipelined (`pipeline/body/x_layers_0`, [stages,
...] or [circular repeats, stages, ...]) and, in our models, `blocks` in a list or stacked. In all
of them layers are numbered by the leading dims in row-major order, then within the block.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flax import nnx

from praxis_lite.pax.checkpoints import PaxCheckpoint

# Pax's names of attributes that are named differently here, by class. {name} is the number of
# layers in the list of that name.
RENAMES: dict[str, dict[str, str]] = {
    "Mlp": {"hidden": "mlp_layers", "logits": "mlp_layers_{hidden}"},  # MLPBlock
}

# The prefixes of variables in a train state of Pax.
STATE = "mdl_vars"
COLLECTIONS = ("params", "non_trainable")

# Levels between the layer that has a stack and the layers of the stack.
_LEVELS = (("pipeline", "body"), ("repeat", "sub"), ("blocks",))
_UNROLLED = re.compile(r"x_layers_(\d+)")


@dataclasses.dataclass(frozen=True)
class StackPath:
    """A variable's path, split at the stack of layers that it is in.

    Attributes:
      stack: path of the layer that has the stack; of the variable itself if there is no stack.
      rest: path below a layer of the stack; "" without a stack.
      is_stacked: whether the arrays may have leading dims that number layers.
      block: index of the block in a list of blocks; 0 otherwise.
      inner: index of the layer within its block.
    """

    stack: str
    rest: str = ""
    is_stacked: bool = False
    block: int = 0
    inner: int = 0

    @property
    def name(self) -> tuple[str, str]:
        return self.stack, self.rest


def stack_path(path: str) -> StackPath:
    """Splits a path of Pax, or a path of ours in Pax's names."""
    tokens = path.split("/")
    for start in range(len(tokens)):
        end, is_stacked, block, inner = start, False, 0, 0
        while level := next((x for x in _LEVELS if tuple(tokens[end : end + len(x)]) == x), None):
            end, is_stacked = end + len(level), True
            if end < len(tokens) and tokens[end].isdigit():  # A list of blocks.
                end, is_stacked, block = end + 1, False, int(tokens[end])
        if end < len(tokens) and (match := _UNROLLED.fullmatch(tokens[end])):
            end, inner = end + 1, int(match[1])
        if end > start:
            stack, rest = "/".join(tokens[:start]), "/".join(tokens[end:])
            return StackPath(stack, rest, is_stacked, block, inner)
    return StackPath(path)


def names_in_pax(module: nnx.Module, paths: Iterable[tuple]) -> dict[tuple, str]:
    """Returns each of our variables' paths in Pax's names; stacks keep our form."""
    nodes = {path: node for path, node in nnx.compat.iter_graph(module)}
    named = {}
    for path in paths:
        tokens: list[str] = []
        for i, token in enumerate(path):
            node = nodes.get(tuple(path[:i]))
            if isinstance(token, int) or str(token).isdigit():
                # Pax numbers the layers of a list in their names. `stack_path` handles blocks.
                if tokens[-1] == "blocks":
                    tokens.append(str(token))
                else:
                    tokens[-1] += f"_{token}"
            else:
                tokens += _renamed(node, str(token)).split("/")
        named[path] = "/".join(tokens)
    return named


def _renamed(node: Any, name: str) -> str:
    for kind in type(node).__mro__:
        if name in RENAMES.get(kind.__name__, {}):
            lists = {n: len(x) for n, x in vars(node).items() if isinstance(x, nnx.List)}
            return RENAMES[kind.__name__][name].format(**lists)
    return name


@dataclasses.dataclass(frozen=True)
class LazyArray:
    """An array of a checkpoint that has a shape before it is read."""

    checkpoint: PaxCheckpoint
    path: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.checkpoint.shape_of(self.path)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.checkpoint[self.path], dtype)


def flat_pax_vars(pax_vars: Mapping[str, Any]) -> dict[str, Any]:
    """Returns variables by path "a/b/c" below their collection.

    Args:
      pax_vars: nested mappings, or paths "a/b/c" or "a.b.c", with or without a leading
        `mdl_vars` and collection. Slots and the step of a train state are left out.
    """
    flat: dict[str, Any] = {}

    def add(tokens: list[str], value: Any) -> None:
        if isinstance(value, Mapping):
            for name in value:
                inner = LazyArray(value, name) if isinstance(value, PaxCheckpoint) else value[name]
                add(tokens + _tokens(str(name)), inner)
        else:
            flat["/".join(tokens)] = value

    add([], pax_vars)
    if any(path.startswith(f"{STATE}/") for path in flat):
        flat = {p.removeprefix(f"{STATE}/"): x for p, x in flat.items() if p.startswith(STATE)}
    return {_below_collection(path): value for path, value in flat.items()}


def _tokens(path: str) -> list[str]:
    return path.split("/" if "/" in path else ".")


def _below_collection(path: str) -> str:
    first, _, rest = path.partition("/")
    return rest if first in COLLECTIONS and rest else path
