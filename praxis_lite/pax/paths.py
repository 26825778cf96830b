"""Splits the paths of variables, in Pax models and in our models, at stacks of layers.

Layers are stored in one of these ways:
- unrolled: `x_layers_0`, `x_layers_1`, ...
- scanned: `repeat/sub/x_layers_0`, with arrays [repeats, ...]
- pipelined: `pipeline/body/x_layers_0`, with arrays [stages, ...] or [circular repeats, stages,
  ...]
- only in our models: `blocks`, a list or a stack.
In all cases, layers are ordered by the leading dims in row-major order, then by the index in the
block.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flax import nnx

from praxis_lite.pax.checkpoints import PaxCheckpoint

# Maps class names to attributes that have different names in Pax. {name} is replaced by the length
# of the list with that name.
RENAMES: dict[str, dict[str, str]] = {
    "Mlp": {"hidden": "mlp_layers", "logits": "mlp_layers_{hidden}"},  # MLPBlock
}

# Prefixes of the variables in a Pax train state.
STATE = "mdl_vars"
COLLECTIONS = ("params", "non_trainable")

# Path components between the layer that owns a stack and the layers of the stack.
_LEVELS = (("pipeline", "body"), ("repeat", "sub"), ("blocks",))
_UNROLLED = re.compile(r"x_layers_(\d+)")


@dataclasses.dataclass(frozen=True)
class StackPath:
    """The path of a variable, split at the stack of layers that contains the variable.

    Attributes:
      stack: Path of the layer that owns the stack, or of the variable if it is not in a stack.
      rest: Path relative to a layer of the stack; "" if the variable is not in a stack.
      is_stacked: Whether the array may have leading dims that index layers.
      block: Index of the block in a list of blocks, else 0.
      inner: Index of the layer within its block.
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
    """Splits the path of a Pax variable, or a path from `names_in_pax`."""
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
    """Translates our paths to Pax's attribute names, but does not change the paths of stacks."""
    nodes = {path: node for path, node in nnx.compat.iter_graph(module)}
    pax_paths = {}
    for path in paths:
        tokens: list[str] = []
        for i, token in enumerate(path):
            node = nodes.get(tuple(path[:i]))
            if isinstance(token, int) or str(token).isdigit():
                # Pax appends the index in a list to the name of the attribute. Do not change
                # lists of blocks, because `stack_path` parses them.
                if tokens[-1] == "blocks":
                    tokens.append(str(token))
                else:
                    tokens[-1] += f"_{token}"
            else:
                tokens += _renamed(node, str(token)).split("/")
        pax_paths[path] = "/".join(tokens)
    return pax_paths


def _renamed(node: Any, name: str) -> str:
    """Returns Pax's name for an attribute of a layer."""
    for cls in type(node).__mro__:
        if name in RENAMES.get(cls.__name__, {}):
            lengths = {n: len(x) for n, x in vars(node).items() if isinstance(x, nnx.List)}
            return RENAMES[cls.__name__][name].format(**lengths)
    return name


@dataclasses.dataclass(frozen=True)
class LazyArray:
    """An array in a checkpoint, whose shape is known before the values are read."""

    checkpoint: PaxCheckpoint
    path: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.checkpoint.shape_of(self.path)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.checkpoint[self.path], dtype)


def flat_pax_vars(pax_vars: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens variables to a dict keyed by path "a/b/c", without the collection.

    Args:
      pax_vars: Nested mappings, or a mapping with keys "a/b/c" or "a.b.c". Paths may start with
        `mdl_vars` and the collection. Optimizer slots and the step of a train state are ignored.
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
    # Of a train state, only the variables are kept.
    if any(path.startswith(f"{STATE}/") for path in flat):
        flat = {p.removeprefix(f"{STATE}/"): x for p, x in flat.items() if p.startswith(STATE)}
    return {_below_collection(path): value for path, value in flat.items()}


def _tokens(path: str) -> list[str]:
    return path.split("/" if "/" in path else ".")


def _below_collection(path: str) -> str:
    first, _, rest = path.partition("/")
    return rest if first in COLLECTIONS and rest else path
