"""A program run in float64: what rounding hides in float32 differs by 1e-9 or not at all."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

from praxis_lite.core.jaxprs import all_eqns
from praxis_tools.check.runs.layer_recorder import LayerRecorder
from praxis_tools.interpreter import bound

PyTree = Any
# What computes in the types it was written for: callbacks, kernels, draws by their bits.
_KEEPS_TYPES = {
    "bitcast_convert_type", "random_gamma", "pure_callback", "io_callback", "debug_callback",
    "pallas_call", "ffi_call", "custom_partitioning", "custom_linear_solve",
}
_WIDE = {
    np.dtype(narrow): np.dtype(wide)
    for narrow, wide in (
        (jnp.float16, np.float64), (jnp.bfloat16, np.float64), (np.float32, np.float64),
        (np.complex64, np.complex128),
    )
}
_SCATTERS = {
    primitives.scatter_p: lax.scatter,
    primitives.scatter_add_p: lax.scatter_add,
    primitives.scatter_mul_p: lax.scatter_mul,
    primitives.scatter_min_p: lax.scatter_min,
    primitives.scatter_max_p: lax.scatter_max,
}


def in_float64(
    function: Callable[..., PyTree], *args: PyTree, without_randomness: bool = False,
    by_layer: bool = False,
) -> Callable[..., PyTree]:
    """Returns `function` with each float of up to 32 bits that it computes with in float64.

    It is traced once, as written, for arguments like `args`, and its operations are then done in
    float64, in its loops, branches and calls too; so it holds for models of others and for every
    optimizer. Random numbers are drawn from the same bits. To be compiled and called where 64-bit
    types are on (`jax.enable_x64(True)`). Its attribute `draws` says whether it draws any.

    Args:
      args: arrays or ShapeDtypeStructs in the types that `function` is written for.
      without_randomness: all random bits are 0, so that dropout keeps everything.
      by_layer: the function also returns `LayerRecorder.records`, the `fingerprint` of arrays.
    """
    with jax.enable_x64(False):
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    treedef = jax.tree.structure(shapes)

    @functools.wraps(function)
    def wide(*args: PyTree) -> PyTree:
        run = Float64Run(fingerprint if by_layer else None, without_randomness)
        outputs = jax.tree.unflatten(treedef, run.call(closed, jax.tree.leaves(args)))
        return (outputs, run.records) if by_layer else outputs

    wide.draws = any(eqn.primitive.name == "random_bits" for eqn in all_eqns(closed.eqns))
    return wide


def fingerprint(x: jax.Array) -> jax.Array:
    """Returns two sums [2] over an array, the second with weights that differ by element."""
    x = jnp.where(jnp.isfinite(x), x, 0.0).astype(np.float64)
    weights = jnp.ones((), np.float64)
    for dim in range(x.ndim):
        index = lax.broadcasted_iota(np.int32, x.shape, dim).astype(np.float64)
        weights = weights * jnp.cos(index * (1.0 + dim / 7) + 0.5)
    return jnp.stack([jnp.sum(x), jnp.sum(x * weights)])


class Float64Run(LayerRecorder):
    """A run in float64."""

    def __init__(
        self, summary: Callable[[jax.Array], jax.Array] | None = fingerprint,
        without_randomness: bool = False,
    ):
        super().__init__(summary)
        self._without_randomness = without_randomness

    def constant(self, value: Any, aval: Any) -> Any:
        if isinstance(value, jax.Array):
            return widened(value)
        return np.asarray(value, wide_dtype(aval.dtype))  # A Python float has all of its digits.

    def results(self, eqn: Any, operands: list[Any]) -> list[Any]:
        with jax.enable_x64(True):
            return super().results(eqn, operands)

    def operation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name == "reduce_precision":  # It rounds to what float32 holds.
            return operands
        if eqn.primitive in _SCATTERS:
            return [_scattered(eqn, operands)]
        if name in _KEEPS_TYPES:
            narrow = [
                _as_dtype(x, atom.aval.dtype) for x, atom in zip(operands, eqn.invars, strict=True)
            ]
            return [widened(x) for x in bound(eqn, narrow)]
        params = {key: _wide_param(x) for key, x in eqn.params.items()}
        results = bound(eqn, operands, params)
        if name == "random_bits" and self._without_randomness:
            results = [lax.bitwise_and(x, lax.full_like(x, 0)) for x in results]
        # What an operation returns in float32 whatever it is given is widened.
        return [widened(x) for x in results]


def wide_dtype(dtype: Any) -> Any:
    """Returns float64 for a float of up to 32 bits, complex128 for complex64, else `dtype`."""
    is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
    return dtype if is_key else _WIDE.get(np.dtype(dtype), np.dtype(dtype))


def wide_structs(tree: PyTree) -> PyTree:
    """Returns a tree of ShapeDtypeStructs with floats in float64; shardings stay."""

    def one(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        return jax.ShapeDtypeStruct(x.shape, wide_dtype(x.dtype), sharding=sharding)

    return jax.tree.map(one, tree)


def _wide_param(value: Any) -> Any:
    """Returns an operation's parameter for float64: a dtype widened, no algorithm of few bits."""
    if isinstance(value, lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return None
    is_dtype = isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(
        value, np.generic))
    return wide_dtype(value) if is_dtype else value


def widened(x: Any) -> Any:
    """Returns an array in its wide dtype; other values as they are."""
    return _as_dtype(x, wide_dtype(x.dtype)) if hasattr(x, "dtype") else x


def _as_dtype(x: Any, dtype: Any) -> Any:
    """Returns an array in a dtype; a key as it is."""
    is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
    return x if is_key or x.dtype == dtype else lax.convert_element_type(x, dtype)


def _scattered(eqn: Any, args: list[Any]) -> Any:
    """Returns the result of a scatter of wide arrays; its parameters hold a narrow program."""
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    return _SCATTERS[eqn.primitive](*args, **{name: eqn.params[name] for name in names})
