"""Runs functions in float64, so that rounding errors do not hide differences."""

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
from praxis_tools.interpreter import bind

PyTree = Any
# Primitives that only work with the types they were traced with: callbacks, kernels, random bits.
_KEEPS_TYPES = {
    "bitcast_convert_type",
    "random_gamma",
    "pure_callback",
    "io_callback",
    "debug_callback",
    "pallas_call",
    "ffi_call",
    "custom_partitioning",
    "custom_linear_solve",
}
_WIDE = {
    np.dtype(narrow): np.dtype(wide)
    for narrow, wide in (
        (jnp.float16, np.float64),
        (jnp.bfloat16, np.float64),
        (np.float32, np.float64),
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


class Float64Function:
    """A function that computes in float64, returned by `in_float64`.

    Attributes:
      draws: Whether the function draws random numbers.
    """

    def __init__(self, function: Callable[..., PyTree], draws: bool):
        functools.update_wrapper(self, function)
        self._function, self.draws = function, draws

    def __call__(self, *args: PyTree) -> PyTree:
        return self._function(*args)


def in_float64(
    function: Callable[..., PyTree],
    *args: PyTree,
    without_randomness: bool = False,
    by_layer: bool = False,
) -> Float64Function:
    """Returns a version of `function` that computes in float64 instead of narrower float types.

    The function is traced once with its original dtypes. All operations in the jaxpr, including
    operations in loops, branches and calls, are then executed in float64. This works for any model
    and any optimizer. Random numbers are derived from the same bits.

    Compile and call the result with 64-bit types enabled (`jax.enable_x64(True)`).

    Args:
      function: The function to convert.
      *args: Arrays or ShapeDtypeStructs, with the types that `function` expects.
      without_randomness: Whether to set all random bits to 0, so that dropout keeps all elements.
      by_layer: Whether to return (outputs, `LayerRecorder.records`), where each recorded array is
        summarized by its `fingerprint`.
    """
    with jax.enable_x64(False):
        closed_jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    treedef = jax.tree.structure(shapes)

    @functools.wraps(function)
    def run_in_float64(*args: PyTree) -> PyTree:
        run = Float64Run(fingerprint if by_layer else None, without_randomness)
        outputs = jax.tree.unflatten(treedef, run.call(closed_jaxpr, jax.tree.leaves(args)))
        return (outputs, run.records) if by_layer else outputs

    draws = any(eqn.primitive.name == "random_bits" for eqn in all_eqns(closed_jaxpr.eqns))
    return Float64Function(run_in_float64, draws)


def fingerprint(x: jax.Array) -> jax.Array:
    """Returns the sum and an order-dependent weighted sum of an array, as float64 [2]."""
    x = jnp.where(jnp.isfinite(x), x, 0.0).astype(np.float64)
    weights = jnp.ones((), np.float64)
    for dim in range(x.ndim):
        index = lax.broadcasted_iota(np.int32, x.shape, dim).astype(np.float64)
        weights = weights * jnp.cos(index * (1.0 + dim / 7) + 0.5)
    return jnp.stack([jnp.sum(x), jnp.sum(x * weights)])


class Float64Run(LayerRecorder):
    """An interpreter that runs a jaxpr in float64 and records the values of its layers."""

    def __init__(
        self,
        summary: Callable[[jax.Array], jax.Array] | None = fingerprint,
        without_randomness: bool = False,
    ):
        super().__init__(summary)
        self._without_randomness = without_randomness

    def constant(self, value: Any, aval: Any) -> Any:
        if isinstance(value, jax.Array):
            return widen(value)
        return np.asarray(value, wide_dtype(aval.dtype))  # Python floats are float64.

    def results(self, eqn: Any, operands: list[Any]) -> list[Any]:
        with jax.enable_x64(True):
            return super().results(eqn, operands)

    def operation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name == "reduce_precision":  # Skip this operation, because it rounds to a narrower type.
            return operands
        if eqn.primitive in _SCATTERS:
            return [_scatter(eqn, operands)]
        if name in _KEEPS_TYPES:
            narrow = [
                _as_dtype(x, atom.aval.dtype) for x, atom in zip(operands, eqn.invars, strict=True)
            ]
            return [widen(x) for x in bind(eqn, narrow)]
        params = {key: _wide_param(x) for key, x in eqn.params.items()}
        results = bind(eqn, operands, params)
        if name == "random_bits" and self._without_randomness:
            results = [lax.bitwise_and(x, lax.full_like(x, 0)) for x in results]
        # Some operations return float32 regardless of their operands.
        return [widen(x) for x in results]


def wide_dtype(dtype: Any) -> Any:
    """Returns float64 for narrower floats, complex128 for complex64, and `dtype` otherwise."""
    is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
    return dtype if is_key else _WIDE.get(np.dtype(dtype), np.dtype(dtype))


def wide_structs(tree: PyTree) -> PyTree:
    """Returns ShapeDtypeStructs in which all floats are float64, with unchanged shardings."""

    def widen_struct(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        return jax.ShapeDtypeStruct(x.shape, wide_dtype(x.dtype), sharding=sharding)

    return jax.tree.map(widen_struct, tree)


def _wide_param(value: Any) -> Any:
    """Widens a dtype parameter of an operation, and removes low-precision algorithms."""
    if isinstance(value, lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return None
    is_dtype = isinstance(value, np.dtype) or (
        isinstance(value, type) and issubclass(value, np.generic)
    )
    return wide_dtype(value) if is_dtype else value


def widen(x: Any) -> Any:
    """Converts an array to its `wide_dtype`. Other values are returned unchanged."""
    return _as_dtype(x, wide_dtype(x.dtype)) if hasattr(x, "dtype") else x


def _as_dtype(x: Any, dtype: Any) -> Any:
    """Converts an array to a dtype. Random keys are returned unchanged."""
    is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
    return x if is_key or x.dtype == dtype else lax.convert_element_type(x, dtype)


def _scatter(eqn: Any, args: list[Any]) -> Any:
    """Runs a scatter on wide arrays.

    The primitive cannot be bound again, because its parameters contain a jaxpr with narrow types.
    """
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    return _SCATTERS[eqn.primitive](*args, **{name: eqn.params[name] for name in names})
