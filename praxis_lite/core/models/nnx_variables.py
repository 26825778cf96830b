"""The role of each variable of an NNX module in a step: a weight, state to keep, or neither."""

import functools
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from flax.typing import MISSING

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.models.model import MdlVars
from praxis_lite.core.sharding.padding import is_traced

# A variable, or an array that a module has as a plain attribute; with its path.
Leaf = nnx.Variable | jax.Array | jax.ShapeDtypeStruct
Path = tuple[Any, ...]


def _assigning_quickly(set_value: Callable[..., None]) -> Callable[..., None]:
    """Returns `nnx.Variable.set_value`, whose cost under a trace does not grow with the program.

    `variable[...] = x` asks both values for their shardings. A tracer has none, and before jax 0.12
    it says so in a message for which JAX walks the whole program: the counts of `nnx.Rngs`, drawn
    from once per weight, and batch statistics cost the square of the number of layers
    (docs/upstream/tracer_sharding.md).
    """

    @functools.wraps(set_value)
    def set_whole_value(variable: nnx.Variable, value: Any, *, index: Any = MISSING) -> None:
        old = variable.get_raw_value()
        are_traced = index is ... and is_traced(old) and is_traced(value)
        if are_traced and (old.shape, old.dtype) == (value.shape, value.dtype):
            index = MISSING  # What Flax does with two values of equal shardings.
        set_value(variable, value, index=index)

    return set_whole_value


if jax.__version_info__ < (0, 12):
    nnx.Variable.set_value = _assigning_quickly(nnx.Variable.set_value)


def leaves_of(module: nnx.Module) -> list[tuple[Path, Leaf]]:
    """Returns each variable and each plain array of a module once, by the first path to it."""
    return list(nnx.to_flat_state(nnx.compat.split(module)[1]))


def value_of(leaf: Leaf) -> Any:
    """Returns a variable's value, or the plain array itself."""
    # Not `get_value`, in which a kind of variable may make something else of what it stores.
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def path_text(path: Path) -> str:
    """Returns a path as messages and the layout print it."""
    return "/".join(map(_part_name, path))


def collection(leaf: Leaf) -> str | None:
    """Returns "params", "non_trainable", or None for what each pass makes anew.

    That is what a pass records (`nnx.Intermediate`), the state of random streams, which comes of
    the step's key, and variables without a value.
    """
    value = value_of(leaf)
    if isinstance(leaf, nnx.Intermediate | nnx.RngState) or value is None or _is_key(value):
        return None
    return "params" if isinstance(leaf, nnx.Param) else "non_trainable"


def require_array(path: Path, leaf: Leaf) -> None:
    """Checks that a leaf can be a leaf of the state.

    Raises:
      ConfigError: its value is a container; names the path.
    """
    value = value_of(leaf)
    if collection(leaf) is not None and not jax.tree_util.all_leaves([value]):
        raise ConfigError(
            f"{path_text(path)}: the {type(leaf).__name__} holds a {type(value).__name__}; "
            "wanted is one array. Give each array a variable of its own, in an nnx.Dict or List."
        )


def nested(leaves: Iterable[tuple[Path, Leaf]], value: Callable[[Path, Leaf], Any]) -> MdlVars:
    """Returns `value(path, leaf)` of the leaves that a state keeps, as plain nested dicts."""
    flat = {
        stored_at(path, leaf): value(path, leaf)
        for path, leaf in leaves
        if collection(leaf) is not None
    }
    return {"params": {}, "non_trainable": {}} | traverse_util.unflatten_dict(flat)


def stored_at(path: Path, leaf: Leaf) -> tuple[str, ...]:
    """Returns the keys of a leaf that a state keeps, from `MdlVars` down."""
    return (collection(leaf), *map(_part_name, path))


def fresh_value(path: Path, leaf: Leaf, key: jax.Array) -> Any:
    """Returns the value at the start of a pass of a leaf that no state keeps.

    A random stream's key comes of `key` and the stream's path, in a stack another for each layer;
    its count is 0. So where a job stopped, and on how many devices it runs, does not matter.
    """

    def fresh(x: Any) -> jax.Array:
        if not _is_key(x):
            return jnp.zeros(x.shape, x.dtype)
        # By its path, so that it does not depend on the model's other streams.
        stream = jax.random.fold_in(key, zlib.crc32(path_text(path).encode()))
        return jax.random.split(stream, x.shape) if x.shape else stream

    return jax.tree.map(fresh, value_of(leaf))


def _part_name(part: Any) -> str:
    # A dict's keys may be tuples, as in `nnx.WeightNorm`.
    return ".".join(map(str, part)) if isinstance(part, tuple) else str(part)


def _is_key(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
