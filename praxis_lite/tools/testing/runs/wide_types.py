"""Floats of up to 32 bits as float64: types, arrays, and the parameters of operations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

PyTree = Any
WIDE = {
    np.dtype(narrow): np.dtype(wide)
    for narrow, wide in (
        (jnp.float16, np.float64), (jnp.bfloat16, np.float64), (np.float32, np.float64),
        (np.complex64, np.complex128),
    )
}


def wide_dtype(dtype: Any) -> Any:
    """Returns float64 for a float of up to 32 bits, complex128 for complex64, else `dtype`."""
    is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
    return dtype if is_key else WIDE.get(np.dtype(dtype), np.dtype(dtype))


def wide_structs(tree: PyTree) -> PyTree:
    """Returns a tree of ShapeDtypeStructs with floats in float64; shardings stay."""

    def one(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        return jax.ShapeDtypeStruct(x.shape, wide_dtype(x.dtype), sharding=sharding)

    return jax.tree.map(one, tree)


def wide_param(value: Any) -> Any:
    """Returns an operation's parameter for float64: a dtype widened, no algorithm of few bits."""
    if isinstance(value, lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return None
    is_dtype = isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(
        value, np.generic))
    return wide_dtype(value) if is_dtype else value


def widened(x: Any) -> Any:
    """Returns an array in its wide dtype; other values as they are."""
    return as_dtype(x, wide_dtype(x.dtype)) if hasattr(x, "dtype") else x


def as_dtype(x: Any, dtype: Any) -> Any:
    """Returns an array in a dtype; a key as it is."""
    is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
    return x if is_key or x.dtype == dtype else lax.convert_element_type(x, dtype)


SCATTERS = {
    primitives.scatter_p: lax.scatter,
    primitives.scatter_add_p: lax.scatter_add,
    primitives.scatter_mul_p: lax.scatter_mul,
    primitives.scatter_min_p: lax.scatter_min,
    primitives.scatter_max_p: lax.scatter_max,
}


def scattered(eqn: Any, args: list[Any]) -> Any:
    """Returns the result of a scatter of wide arrays; its parameters hold a narrow program."""
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    return SCATTERS[eqn.primitive](*args, **{name: eqn.params[name] for name in names})
