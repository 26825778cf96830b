"""What XLA's partitioner gets wrong, and how each program goes round it; see docs/upstream.md.

XLA fills an array that its devices do not divide with elements that are no part of it, and must
keep them out of what it computes. Three times it does not. Four kinds of convolutions are wrong
evenly split, too.

- A scatter into an array that is split, too, adds filler at index 0. The gradient of a table of
  embeddings is a scatter: its first row was wrong. Here filler is made neutral before it.
- Of two operations that slide a window over one split array (cumulative sums, poolings,
  convolutions) the second gets the first one's filler, for instance -inf in a sum. Here each has
  the array to itself.
- The gradient of maxima over windows that overlap, where the array is split along a dim in which
  they slide, is wrong, evenly split or not. Here it is taken of the whole dim.
- The gradient of a depthwise or grouped convolution's filter is wrong where the batch is split and
  a mesh axis is left over. Here it is sums of products.
- A convolution of groups is wrong where a split of channels cuts a group. Here channels are whole.
- A convolution whose places are split is summed over devices that hold the same, where a mesh has
  another axis. Here places are whole there.
- A convolution over three axes of a mesh permutes its rows, where the filter's dims are split in
  another order than the batch. Here outputs' channels of a filter are whole, too.
- A matrix product on three axes of a mesh may permute its results. That shows in a whole program
  alone, which a job mends before it compiles (`praxis_lite/core/xla_workarounds`).
"""

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import primitives
from jax.interpreters import mlir

from praxis_lite.core.jaxprs import rewrite_jaxpr
from praxis_lite.core.sharding.devices.axis_types import is_typed, type_spec, untyped

__all__ = ("without_xla_errors",)

PyTree = Any


def without_xla_errors(
    function: Callable[..., PyTree], static_argnums: int | Sequence[int] = (),
    also: Callable[[core.ClosedJaxpr], core.ClosedJaxpr] = lambda jaxpr: jaxpr,
) -> Callable[..., PyTree]:
    """Returns a function of the same numbers, right however its arrays are split.

    To be compiled by `jax.jit`. It is traced, and what is at risk in it replaced, in its loops,
    branches and calls too: so it holds for every layer, and for models of others. What is
    differentiated must be so inside it.

    Args:
      static_argnums: as of `jax.jit`.
      also: returns another program for the traced one, of the same numbers.
    """

    @functools.wraps(function)
    def right(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(function, static_argnums, return_shape=True)(*args)
        closed = rewrite_jaxpr(also(closed), _right_equation)
        arrays = [x for i, x in enumerate(args) if i not in np.atleast_1d(static_argnums)]
        outputs = core.jaxpr_as_fun(closed)(*jax.tree.leaves(arrays))
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return right


def _scatter(
    primitive: core.Primitive, operand: jax.Array, indices: jax.Array, updates: jax.Array,
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


def _whole(x: jax.Array, dims: Collection[int]) -> jax.Array:
    """Returns `x` with each of `dims` whole on every device; the others are split as XLA likes."""
    if not dims:
        return x
    free = jax.sharding.PartitionSpec.UNCONSTRAINED
    spec = (None if dim in dims else free for dim in range(x.ndim))
    return jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(*spec))


def _gradient_of_maxima(
    primitive: core.Primitive, source: jax.Array, operand: jax.Array, **params: Any
) -> jax.Array:
    if is_typed():  # XLA errs as over Auto axes.
        right = functools.partial(_gradient_of_maxima, primitive, **params)
        return untyped(right, source, operand, out=type_spec(operand))
    if not jax.sharding.get_abstract_mesh().empty:
        dims = [dim for dim, size in enumerate(params["window_dimensions"]) if size > 1]
        source, operand = _whole(source, dims), _whole(operand, dims)
        return _whole(_windowed(primitive, source, operand, **params), dims)
    return _windowed(primitive, source, operand, **params)


def _convolution(
    primitive: core.Primitive, lhs: jax.Array, rhs: jax.Array, **params: Any
) -> jax.Array:
    if is_typed():  # XLA errs as over Auto axes.
        stated = params["out_sharding"]
        right = functools.partial(_convolution, primitive, **params | {"out_sharding": None})
        return untyped(right, lhs, rhs, out=stated.spec if stated else type_spec(lhs))
    mesh = jax.sharding.get_abstract_mesh()
    is_auto = [kind == jax.sharding.AxisType.Auto for kind in mesh.axis_types]
    sizes = [n for n, auto in zip(mesh.axis_sizes, is_auto, strict=True) if auto and n > 1]
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    of_lhs, of_rhs, of_out = set(), set(), set()  # The dims that are whole.
    if len(sizes) > 1:
        of_lhs, of_rhs, of_out = {*lhs_spec[2:]}, {*rhs_spec[2:]}, {*out_spec[2:]}
    if sizes and params["batch_group_count"] > 1:
        return _sums_of_products(_whole(lhs, of_lhs), _whole(rhs, of_rhs), params)
    if len(sizes) > 2:  # Beside the axis of the channels there are several, in two orders.
        of_rhs.add(rhs_spec[0])
    groups = params["feature_group_count"]
    if sizes and groups > 1:
        of_rhs.add(rhs_spec[1])
        is_depthwise = lhs.shape[lhs_spec[1]] == rhs.shape[rhs_spec[0]] == groups
        if groups % mesh.size or not is_depthwise:  # A split of channels may cut groups.
            of_lhs.add(lhs_spec[1])
            of_rhs.add(rhs_spec[0])
            of_out.add(out_spec[1])
    return _whole(primitive.bind(_whole(lhs, of_lhs), _whole(rhs, of_rhs), **params), of_out)


def _sums_of_products(lhs: jax.Array, rhs: jax.Array, params: Mapping[str, Any]) -> jax.Array:
    """Returns a convolution of groups of the batch: a product for each place of the outputs.

    Gradients of filters are such convolutions. Their outputs have the few places of a filter.
    """
    dimension_numbers, batch_group_count = params["dimension_numbers"], params["batch_group_count"]
    window_strides, padding = params["window_strides"], params["padding"]
    lhs_dilation, rhs_dilation = params["lhs_dilation"], params["rhs_dilation"]
    lhs = lhs.transpose(dimension_numbers.lhs_spec)  # [batch, features, places ...]
    rhs = rhs.transpose(dimension_numbers.rhs_spec)  # [outputs, features, places ...]
    around = [(*ends, size - 1) for ends, size in zip(padding, lhs_dilation, strict=True)]
    lhs = jax.lax.pad(lhs, jnp.zeros((), lhs.dtype), [(0, 0, 0), (0, 0, 0), *around])
    reach = [(n - 1) * size + 1 for n, size in zip(rhs.shape[2:], rhs_dilation, strict=True)]
    counts = [
        (n - length) // stride + 1
        for n, length, stride in zip(lhs.shape[2:], reach, window_strides, strict=True)
    ]
    rhs = rhs.reshape(batch_group_count, -1, *rhs.shape[1:])
    products = []
    for place in itertools.product(*map(range, counts)):
        starts = [i * stride for i, stride in zip(place, window_strides, strict=True)]
        seen = tuple(
            slice(start, start + length, size)
            for start, length, size in zip(starts, reach, rhs_dilation, strict=True)
        )
        x = lhs[:, :, *seen].reshape(batch_group_count, -1, *rhs.shape[2:])
        summed = tuple(range(2, rhs.ndim))
        product = jax.lax.dot_general(  # [group, batch, outputs]
            x, rhs, ((summed, summed), ((0,), (0,))), precision=params["precision"],
            preferred_element_type=params["preferred_element_type"],
        )
        products.append(product.swapaxes(0, 1).reshape(x.shape[1], -1))
    outputs = jnp.stack(products, -1).reshape(*products[0].shape, *counts)
    return outputs.transpose(np.argsort(dimension_numbers.out_spec))


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
        (_SCATTERS, _scatter), (_WINDOWED, _windowed),
        (("select_and_scatter_add",), _gradient_of_maxima),
        (("conv_general_dilated",), _convolution),
    )
    for primitive in (getattr(primitives, f"{name}_p") for name in names)
}


def _right_equation(eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
    right = _RIGHT.get(eqn.primitive)
    return [eqn if right is None else eqn.replace(primitive=right)]
