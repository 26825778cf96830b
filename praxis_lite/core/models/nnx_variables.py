"""Classifies the variables of an NNX module as weights, other state, or temporary values."""

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
    """Wraps `nnx.Variable.set_value` so that it does not read the shardings of tracers.

    `variable[...] = x` compares the shardings of both values. A tracer has no sharding, and before
    jax 0.12, JAX walks the entire program traced so far to build the error message. Initializing a
    weight increments a count in `nnx.Rngs`, and every batch norm layer assigns its statistics, so
    tracing time would be quadratic in the number of layers (docs/upstream/tracer_sharding.md).
    """

    @functools.wraps(set_value)
    def set_value_unchecked(
        variable: nnx.Variable[Any], value: Any, *, index: Any = MISSING
    ) -> None:
        old = variable.get_raw_value()
        are_traced = index is ... and is_traced(old) and is_traced(value)
        if are_traced and (old.shape, old.dtype) == (value.shape, value.dtype):
            index = MISSING  # Makes Flax skip the comparison.
        set_value(variable, value, index=index)

    return set_value_unchecked


if jax.__version_info__ < (0, 12):
    # Patch the method in Flax.
    nnx.Variable.set_value = _without_sharding_checks(  # type: ignore[method-assign]
        nnx.Variable.set_value
    )


def leaves_of(module: nnx.Module) -> list[tuple[Path, Leaf]]:
    """Returns (path, leaf) for each variable and plain array in a module, without duplicates."""
    return list(nnx.to_flat_state(nnx.compat.split(module)[1]))


def value_of(leaf: Leaf) -> Any:
    """Returns a variable's value, or the plain array itself."""
    # Do not use `get_value`, because subclasses of Variable may override it to transform the value.
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def path_text(path: Path) -> str:
    """Formats a path for messages and for layout.txt."""
    return "/".join(map(_part_name, path))


def collection(leaf: Leaf) -> str | None:
    """Returns "params", "non_trainable", or None if the leaf is not part of the state.

    The state does not include recorded values (`nnx.Intermediate`), variables without a value, or
    random streams, which are derived from the step's key.
    """
    value = value_of(leaf)
    if isinstance(leaf, nnx.Intermediate | nnx.RngState) or value is None or _is_key(value):
        return None
    return "params" if isinstance(leaf, nnx.Param) else "non_trainable"


def require_array(path: Path, leaf: Leaf) -> None:
    """Raises ConfigError if the value of a leaf is a container instead of an array."""
    value = value_of(leaf)
    if collection(leaf) is not None and not jax.tree_util.all_leaves([value]):
        raise ConfigError(
            f"{path_text(path)}: the {type(leaf).__name__} contains a {type(value).__name__}; "
            "expected one array. Create one variable per array, in an nnx.Dict or nnx.List."
        )


def nested(leaves: Iterable[tuple[Path, Leaf]], value: Callable[[Path, Leaf], Any]) -> MdlVars:
    """Returns nested dicts with `value(path, leaf)` for each leaf that is part of the state."""
    flat = {
        stored_at(path, leaf): value(path, leaf)
        for path, leaf in leaves
        if collection(leaf) is not None
    }
    empty: MdlVars = {"params": {}, "non_trainable": {}}
    return {**empty, **traverse_util.unflatten_dict(flat)}


def stored_at(path: Path, leaf: Leaf) -> tuple[str, ...]:
    """Returns the dict keys in `MdlVars` for a leaf that is part of the state."""
    name = collection(leaf)
    assert name is not None
    return (name, *map(_part_name, path))


def fresh_value(path: Path, leaf: Leaf, key: jax.Array) -> Any:
    """Returns the initial value, in a forward pass, of a leaf that is not part of the state.

    The key of a random stream is derived from `key` and the path of the stream, separately for each
    layer of a stack. Counts start at 0. Random draws therefore depend neither on job interruptions
    nor on the number of devices.

    Args:
      path: Path of the leaf.
      leaf: The leaf, with shapes in place of arrays.
      key: Key of the forward pass.
    """

    def fresh(x: Any) -> jax.Array:
        if not _is_key(x):
            return jnp.zeros(x.shape, x.dtype)
        # Derive the stream from its path, so that it is independent of the model's other streams.
        stream = jax.random.fold_in(key, zlib.crc32(path_text(path).encode()))
        return jax.random.split(stream, x.shape) if x.shape else stream

    return jax.tree.map(fresh, value_of(leaf))


def _part_name(part: Any) -> str:
    # Keys of dicts may be tuples, as in `nnx.WeightNorm`.
    return ".".join(map(str, part)) if isinstance(part, tuple) else str(part)


def _is_key(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
