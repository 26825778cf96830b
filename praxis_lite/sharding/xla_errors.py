"""What XLA's partitioner gets wrong, and how each program goes round it; see docs/upstream.md.

XLA fills an array that its devices do not divide with elements that are no part of it, and must
keep them out of what it computes. Three times it does not:

- A scatter into an array that is split, too, adds filler at index 0. The gradient of a table of
  embeddings is a scatter: its first row was wrong. Here filler is made neutral before it.
- Of two operations that slide a window over one split array (cumulative sums, poolings,
  convolutions) the second gets the first one's filler, for instance -inf in a sum. Here each has
  the array to itself.
- The gradient of maxima over windows that overlap, where the array is split along a dim in which
  they slide, is wrong, evenly split or not. Here it is taken of the whole dim.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import primitives
from jax.interpreters import mlir

PyTree = Any


def without_xla_errors(
    function: Callable[..., PyTree], static_argnums: int | Sequence[int] = ()
) -> Callable[..., PyTree]:
    """Returns a function of the same numbers, right however its arrays are split.

    To be compiled by `jax.jit`. It is traced, and what is at risk in it replaced, in its loops,
    branches and calls too: so it holds for every layer, and for models of others. What is
    differentiated must be so inside it.

    Args:
      static_argnums: as of `jax.jit`.
    """

    @functools.wraps(function)
    def right(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(function, static_argnums, return_shape=True)(*args)
        closed = closed.replace(jaxpr=_of_jaxpr(closed.jaxpr, {}))
        arrays = [x for i, x in enumerate(args) if i not in np.atleast_1d(static_argnums)]
        outputs = core.jaxpr_as_fun(closed)(*jax.tree.leaves(arrays))
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return right


def _scatter(
    primitive: core.Primitive,
    operand: jax.Array,
    indices: jax.Array,
    updates: jax.Array,
    **params: Any,
) -> jax.Array:
    mesh, is_there = jax.sharding.get_abstract_mesh(), jnp.ones((), bool)
    for dim in range(updates.ndim):
        # What all devices together divide has no filler, however it is split.
        may_be_uneven = mesh.empty or updates.shape[dim] % mesh.size
        if may_be_uneven and dim not in params["dimension_numbers"].update_window_dims:
            # Were the size no secret, XLA would see that the mask is true of all that it knows.
            size = jax.lax.optimization_barrier(jnp.int32(updates.shape[dim]))
            is_there &= jax.lax.broadcasted_iota(jnp.int32, updates.shape, dim) < size
    updates = jnp.where(is_there, updates, _neutral(primitive, updates.dtype))
    return primitive.bind(operand, indices, updates, **params)


def _neutral(primitive: core.Primitive, dtype: Any) -> jax.Array:
    """Returns the number that changes nothing when it is scattered."""
    if primitive is primitives.scatter_add_p or primitive is primitives.scatter_mul_p:
        return jnp.asarray(int(primitive is primitives.scatter_mul_p), dtype)
    is_min = primitive is primitives.scatter_min_p
    if jnp.issubdtype(dtype, jnp.bool):
        return jnp.asarray(is_min)
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(jnp.inf if is_min else -jnp.inf, dtype)
    return jnp.asarray(jnp.iinfo(dtype).max if is_min else jnp.iinfo(dtype).min, dtype)


def _windowed(primitive: core.Primitive, *operands: jax.Array, **params: Any) -> Any:
    # Behind a barrier it is another array, for which XLA has nothing to use again.
    return primitive.bind(*jax.lax.optimization_barrier(operands), **params)


def _gradient_of_maxima(
    primitive: core.Primitive, source: jax.Array, operand: jax.Array, **params: Any
) -> jax.Array:
    if not jax.sharding.get_abstract_mesh().empty:
        free = jax.sharding.PartitionSpec.UNCONSTRAINED
        spec = (None if size > 1 else free for size in params["window_dimensions"])
        spec = jax.sharding.PartitionSpec(*spec)
        source, operand = jax.lax.with_sharding_constraint((source, operand), spec)
        outputs = _windowed(primitive, source, operand, **params)
        return jax.lax.with_sharding_constraint(outputs, spec)
    return _windowed(primitive, source, operand, **params)


def _right(primitive: core.Primitive, compute: Callable[..., Any]) -> core.Primitive:
    """Returns a primitive like `primitive`, of the same name, that `compute` computes."""
    right = core.Primitive(primitive.name)
    right.multiple_results = primitive.multiple_results
    right.def_effectful_abstract_eval(primitive.abstract_eval)
    lowering = mlir.lower_fun(
        functools.partial(compute, primitive), multiple_results=primitive.multiple_results
    )
    mlir.register_lowering(right, lowering)
    return right


# Scatters that overwrite are right.
_SCATTERS = ("scatter_add", "scatter_max", "scatter_min", "scatter_mul")
_WINDOWED = (
    *("cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp"),
    *("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"),
    "select_and_gather_add",
)
_RIGHT = {
    primitive: _right(primitive, compute)
    for names, compute in (
        (_SCATTERS, _scatter),
        (_WINDOWED, _windowed),
        (("select_and_scatter_add",), _gradient_of_maxima),
    )
    for primitive in (getattr(primitives, f"{name}_p") for name in names)
}


def _of_jaxpr(jaxpr: Any, done: dict[int, Any]) -> Any:
    """Returns a program with what is at risk in it replaced; the very same if nothing is.

    Args:
      done: old and new programs, by the id of the old: one that is called twice stays one.
    """
    if id(jaxpr) not in done:
        eqns = [_of_equation(eqn, done) for eqn in jaxpr.eqns]
        is_same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
        done[id(jaxpr)] = (jaxpr, jaxpr if is_same else jaxpr.replace(eqns=eqns))
    return done[id(jaxpr)][1]


def _of_equation(eqn: Any, done: dict[int, Any]) -> Any:
    if eqn.primitive in _RIGHT:
        return eqn.replace(primitive=_RIGHT[eqn.primitive])
    params = {name: _of_param(value, done) for name, value in eqn.params.items()}
    is_same = all(params[name] is value for name, value in eqn.params.items())
    return eqn if is_same else eqn.replace(params=params)


def _of_param(value: Any, done: dict[int, Any]) -> Any:
    if isinstance(value, core.ClosedJaxpr):
        jaxpr = _of_jaxpr(value.jaxpr, done)
        return value if jaxpr is value.jaxpr else value.replace(jaxpr=jaxpr)
    if isinstance(value, core.Jaxpr):
        return _of_jaxpr(value, done)
    if isinstance(value, tuple):  # The branches of a condition.
        new = tuple(_of_param(one, done) for one in value)
        return value if all(a is b for a, b in zip(new, value, strict=True)) else new
    return value
