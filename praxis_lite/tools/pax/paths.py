"""The layer and the stack that a variable's path means, in Pax's model and in ours.

A stack of layers has many forms: unrolled (`x_layers_0`, `x_layers_1`, ...), scanned
(`repeat/sub/x_layers_0`, arrays [repeats, ...]), pipelined (`pipeline/body/x_layers_0`, [stages,
...] or [circular repeats, stages, ...]) and, here, `blocks` in a list or stacked. In each of them
the layers are counted alike: leading dims first, in row-major order, then the block's own layers.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flax import nnx

from praxis_lite.tools.pax.checkpoints import PaxCheckpoint

# What our attributes are called in Pax, by the class that has them. All other names are Pax's.
# {name} stands for the number of layers in the list of that name.
RENAMES: dict[str, dict[str, str]] = {
    "Mlp": {"hidden": "mlp_layers", "logits": "mlp_layers_{hidden}"},  # MLPBlock
}

# Paths of Pax's models that do not begin with a layer of the model: where the weights lie in a
# train state, by kind.
STATE = "mdl_vars"
COLLECTIONS = ("params", "non_trainable")

# Levels between the layer that holds a stack and a layer of the stack.
_LEVELS = (("pipeline", "body"), ("repeat", "sub"), ("blocks",))
_UNROLLED = re.compile(r"x_layers_(\d+)")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a variable belongs.

    Attributes:
      stack: path of the layer that holds the stack; of the variable itself if it is in none.
      rest: path below a layer of the stack; "" of what is in no stack.
      has_dims: whether the arrays may have leading dims that count layers.
      block: index of the block, of a list of blocks; 0 otherwise.
      inner: index of the layer within its block.
    """

    stack: str
    rest: str = ""
    has_dims: bool = False
    block: int = 0
    inner: int = 0

    @property
    def name(self) -> tuple[str, str]:
        return self.stack, self.rest


def place_of(path: str) -> Place:
    """Returns the place of a variable of Pax's path, or of ours in Pax's names."""
    tokens = path.split("/")
    for start in range(len(tokens)):
        end, has_dims, block, inner = start, False, 0, 0
        while level := next((v for v in _LEVELS if tuple(tokens[end : end + len(v)]) == v), None):
            end, has_dims = end + len(level), True
            if end < len(tokens) and tokens[end].isdigit():  # A list of blocks.
                end, has_dims, block = end + 1, False, int(tokens[end])
        if end < len(tokens) and (result := _UNROLLED.fullmatch(tokens[end])):
            end, inner = end + 1, int(result[1])
        if end > start:
            stack, rest = "/".join(tokens[:start]), "/".join(tokens[end:])
            return Place(stack, rest, has_dims, block, inner)
    return Place(path)


def names_in_pax(module: nnx.Module, paths: Iterable[tuple]) -> dict[tuple, str]:
    """Returns each of our variables' paths in Pax's names; stacks are left in our form."""
    nodes = {path: node for path, node in nnx.compat.iter_graph(module)}
    named = {}
    for path in paths:
        tokens: list[str] = []
        for i, token in enumerate(path):
            node = nodes.get(tuple(path[:i]))
            if isinstance(token, int) or str(token).isdigit():
                # Pax numbers the layers of a list in their names; but see `place_of` for blocks.
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
class Unread:
    """An array of a checkpoint that knows its shapes before it reads."""

    mapping: PaxCheckpoint
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.mapping.shape_of(self.name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.mapping[self.name], dtype)


def flat_pax_vars(pax_vars: Mapping[str, Any]) -> dict[str, Any]:
    """Returns variables by path "a/b/c" below their collection.

    Args:
      pax_vars: nested mappings, or paths "a/b/c" or "a.b.c", with or without a leading
        `mdl_vars` and collection. Slots and the step of a whole train state are left out.
    """
    flat: dict[str, Any] = {}

    def add(tokens: list[str], value: Any) -> None:
        if isinstance(value, Mapping):
            for name in value:
                inner = Unread(value, name) if isinstance(value, PaxCheckpoint) else value[name]
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
