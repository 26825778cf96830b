"""Classifies the variables of an NNX module: weights, other state, or values of one pass."""

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

# A variable, or an array that is a plain attribute of a module.
Leaf = nnx.Variable[Any] | jax.Array | jax.ShapeDtypeStruct
Path = tuple[Any, ...]


def _without_sharding_checks(set_value: Callable[..., None]) -> Callable[..., None]:
    """Returns an `nnx.Variable.set_value` that does not read the shardings of tracers.

    `variable[...] = x` compares the shardings of both values. A tracer has none, and before jax
    0.12 the error message makes JAX walk the entire program traced so far. As every weight
    increments a count of `nnx.Rngs` and every batch norm assigns its statistics, tracing time would
    grow with the square of the number of layers (docs/upstream/tracer_sharding.md).
    """

    @functools.wraps(set_value)
    def set_whole_value(variable: nnx.Variable[Any], value: Any, *, index: Any = MISSING) -> None:
        old = variable.get_raw_value()
        are_traced = index is ... and is_traced(old) and is_traced(value)
        if are_traced and (old.shape, old.dtype) == (value.shape, value.dtype):
            index = MISSING  # Flax's own path for two values of equal shardings.
        set_value(variable, value, index=index)

    return set_whole_value


if jax.__version_info__ < (0, 12):
    # Replaces a method of Flax.
    nnx.Variable.set_value = _without_sharding_checks(  # type: ignore[method-assign]
        nnx.Variable.set_value
    )


def leaves_of(module: nnx.Module) -> list[tuple[Path, Leaf]]:
    """Returns the variables and plain arrays of a module with their paths; shared ones once."""
    return list(nnx.to_flat_state(nnx.compat.split(module)[1]))


def value_of(leaf: Leaf) -> Any:
    """Returns a variable's value, or the plain array itself."""
    # Not `get_value`, which subclasses of Variable may override to transform the value.
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def path_text(path: Path) -> str:
    """Returns a path as text, as in messages and in layout.txt."""
    return "/".join(map(_part_name, path))


def collection(leaf: Leaf) -> str | None:
    """Returns "params", "non_trainable", or None if the state does not contain the leaf.

    The state does not contain recorded values (`nnx.Intermediate`), random streams, which are
    derived from the step's key, and variables without a value.
    """
    value = value_of(leaf)
    if isinstance(leaf, nnx.Intermediate | nnx.RngState) or value is None or _is_key(value):
        return None
    return "params" if isinstance(leaf, nnx.Param) else "non_trainable"


def require_array(path: Path, leaf: Leaf) -> None:
    """Checks that the value of a leaf is an array.

    Raises:
      ConfigError: The value is a container.
    """
    value = value_of(leaf)
    if collection(leaf) is not None and not jax.tree_util.all_leaves([value]):
        raise ConfigError(
            f"{path_text(path)}: the {type(leaf).__name__} contains a {type(value).__name__}; "
            "expected one array. Create a variable per array, in an nnx.Dict or nnx.List."
        )


def nested(leaves: Iterable[tuple[Path, Leaf]], value: Callable[[Path, Leaf], Any]) -> MdlVars:
    """Returns nested dicts with `value(path, leaf)` for each leaf that the state contains."""
    flat = {
        stored_at(path, leaf): value(path, leaf)
        for path, leaf in leaves
        if collection(leaf) is not None
    }
    empty: MdlVars = {"params": {}, "non_trainable": {}}
    return {**empty, **traverse_util.unflatten_dict(flat)}


def stored_at(path: Path, leaf: Leaf) -> tuple[str, ...]:
    """Returns the keys in the nested dicts of `MdlVars` of a leaf that the state contains."""
    name = collection(leaf)
    assert name is not None
    return (name, *map(_part_name, path))


def fresh_value(path: Path, leaf: Leaf, key: jax.Array) -> Any:
    """Returns the initial value, for one pass, of a leaf that the state does not contain.

    The key of a random stream is derived from `key` and the stream's path; in a stack, each layer
    gets its own key. Counts start at 0. So draws depend neither on where a job was interrupted nor
    on the number of devices.

    Args:
      path: Path of the leaf.
      leaf: The leaf, with shapes for arrays.
      key: Key of the pass.
    """

    def fresh(x: Any) -> jax.Array:
        if not _is_key(x):
            return jnp.zeros(x.shape, x.dtype)
        # Derived from its path, so that it does not depend on the model's other streams.
        stream = jax.random.fold_in(key, zlib.crc32(path_text(path).encode()))
        return jax.random.split(stream, x.shape) if x.shape else stream

    return jax.tree.map(fresh, value_of(leaf))


def _part_name(part: Any) -> str:
    # Keys of dicts may be tuples, as in `nnx.WeightNorm`.
    return ".".join(map(str, part)) if isinstance(part, tuple) else str(part)


def _is_key(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
