"""Works around bugs in XLA's partitioner by rewriting traced functions; see docs/upstream.md.

XLA pads unevenly split arrays and must exclude the padding from computations. In three cases it
does not. In addition, four kinds of convolutions are wrong even without padding.

- A scatter into an array that is itself split adds padding at index 0. The gradient of an embedding
  table is such a scatter, and its first row was wrong. Workaround: replace padding with the neutral
  element before scattering.
- If two operations slide a window over the same split array (cumulative sums, pooling,
  convolutions), the second operation reads padding from the first, such as -inf in a sum.
  Workaround: give each operation a separate copy of the array.
- The gradient of max pooling with overlapping windows is wrong if the array is split along a
  window dim, evenly or not. Workaround: replicate these dims.
- The filter gradient of a depthwise or grouped convolution is wrong if the batch is split and
  another mesh axis is unused. Workaround: compute it as sums of products.
- A grouped convolution is wrong if its channels are split within a group. Workaround: replicate the
  channels.
- A convolution with split spatial dims is summed over replicas if the mesh has another axis.
  Workaround: replicate spatial dims on such meshes.
- A convolution over three mesh axes permutes its rows if the filter is split in a different axis
  order than the batch. Workaround: also replicate the output channels of the filter.
- A matmul over three mesh axes may permute its results. This depends on the complete computation,
  so jobs patch the lowered function before compiling it (`patched_matmuls.py`).
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
    function: Callable[..., PyTree],
    static_argnums: int | Sequence[int] = (),
    also: Callable[[core.ClosedJaxpr], core.ClosedJaxpr] = lambda jaxpr: jaxpr,
) -> Callable[..., PyTree]:
    """Wraps a function so that its results are correct regardless of how its arrays are sharded.

    Compile the result with `jax.jit`. The wrapper traces the function and replaces operations that
    trigger XLA bugs, including operations in loops, branches and calls, so it also works for
    third-party layers and models. Derivatives must be taken inside the function.

    Args:
      function: A function of trees of arrays.
      static_argnums: Same as for `jax.jit`.
      also: Additional transformation of the traced jaxpr, which must preserve the results.
    """

    @functools.wraps(function)
    def corrected(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(function, static_argnums, return_shape=True)(*args)
        closed = rewrite_jaxpr(also(closed), _corrected_equation)
        # Static arguments are constants in the jaxpr.
        arrays = [x for i, x in enumerate(args) if i not in np.atleast_1d(static_argnums)]
        outputs = core.jaxpr_as_fun(closed)(*jax.tree.leaves(arrays))
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return corrected


def _scatter(
    primitive: core.Primitive,
    operand: jax.Array,
    indices: jax.Array,
    updates: jax.Array,
    **params: Any,
) -> jax.Array:
    mesh, is_real = jax.sharding.get_abstract_mesh(), jnp.ones((), bool)
    for dim in range(updates.ndim):
        # A dim that is divisible by the total number of devices is never padded.
        may_be_uneven = mesh.empty or updates.shape[dim] % mesh.size
        if may_be_uneven and dim not in params["dimension_numbers"].update_window_dims:
            # Hide the size behind a barrier, because XLA removes the mask if it knows the size.
            size = jax.lax.optimization_barrier(jnp.int32(updates.shape[dim]))
            is_real &= jax.lax.broadcasted_iota(jnp.int32, updates.shape, dim) < size
    updates = jnp.where(is_real, updates, _neutral(primitive, updates.dtype))
    result: jax.Array = primitive.bind(operand, indices, updates, **params)
    return result


def _neutral(primitive: core.Primitive, dtype: Any) -> jax.Array:
    """Returns the neutral element of a scatter's reduction."""
    if primitive is primitives.scatter_add_p or primitive is primitives.scatter_mul_p:
        return jnp.asarray(int(primitive is primitives.scatter_mul_p), dtype)
    is_min = primitive is primitives.scatter_min_p
    if jnp.issubdtype(dtype, jnp.bool):
        return jnp.asarray(is_min)
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(jnp.inf if is_min else -jnp.inf, dtype)
    return jnp.asarray(jnp.iinfo(dtype).max if is_min else jnp.iinfo(dtype).min, dtype)


def _windowed(primitive: core.Primitive, *operands: jax.Array, **params: Any) -> jax.Array:
    # A barrier returns a separate array, whose padding XLA does not reuse.
    result: jax.Array = primitive.bind(*jax.lax.optimization_barrier(operands), **params)
    return result


def _replicate_dims(x: jax.Array, dims: Collection[int]) -> jax.Array:
    """Constrains `dims` of an array to be replicated; XLA chooses how the others are sharded."""
    if not dims:
        return x
    free = jax.sharding.PartitionSpec.UNCONSTRAINED
    spec = (None if dim in dims else free for dim in range(x.ndim))
    x = jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(*spec))
    return x


def _gradient_of_maxima(
    primitive: core.Primitive, source: jax.Array, operand: jax.Array, **params: Any
) -> jax.Array:
    if is_typed():  # The bug exists over both Auto and Explicit axes.
        compute = functools.partial(_gradient_of_maxima, primitive, **params)
        gradient: jax.Array = untyped(compute, source, operand, out=type_spec(operand))
        return gradient
    if not jax.sharding.get_abstract_mesh().empty:
        dims = [dim for dim, size in enumerate(params["window_dimensions"]) if size > 1]
        source, operand = _replicate_dims(source, dims), _replicate_dims(operand, dims)
        return _replicate_dims(_windowed(primitive, source, operand, **params), dims)
    return _windowed(primitive, source, operand, **params)


def _convolution(
    primitive: core.Primitive, lhs: jax.Array, rhs: jax.Array, **params: Any
) -> jax.Array:
    if is_typed():  # The bugs exist over both Auto and Explicit axes.
        out_sharding = params["out_sharding"]
        compute = functools.partial(_convolution, primitive, **params | {"out_sharding": None})
        out = out_sharding.spec if out_sharding else type_spec(lhs)
        result: jax.Array = untyped(compute, lhs, rhs, out=out)
        return result
    mesh = jax.sharding.get_abstract_mesh()
    is_auto = [kind == jax.sharding.AxisType.Auto for kind in mesh.axis_types]
    sizes = [n for n, auto in zip(mesh.axis_sizes, is_auto, strict=True) if auto and n > 1]
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    # Each condition below belongs to one of the bugs in the module docstring, and adds the dims
    # whose replication avoids the bug.
    lhs_dims, rhs_dims, out_dims = set(), set(), set()
    if len(sizes) > 1:
        lhs_dims, rhs_dims, out_dims = {*lhs_spec[2:]}, {*rhs_spec[2:]}, {*out_spec[2:]}
    if sizes and params["batch_group_count"] > 1:
        lhs, rhs = _replicate_dims(lhs, lhs_dims), _replicate_dims(rhs, rhs_dims)
        return _sums_of_products(lhs, rhs, params)
    if len(sizes) > 2:  # Two axes remain besides the channel axis, and their order may differ.
        rhs_dims.add(rhs_spec[0])
    groups = params["feature_group_count"]
    if sizes and groups > 1:
        rhs_dims.add(rhs_spec[1])
        is_depthwise = lhs.shape[lhs_spec[1]] == rhs.shape[rhs_spec[0]] == groups
        if groups % mesh.size or not is_depthwise:  # Channels may be split within a group.
            lhs_dims.add(lhs_spec[1])
            rhs_dims.add(rhs_spec[0])
            out_dims.add(out_spec[1])
    lhs, rhs = _replicate_dims(lhs, lhs_dims), _replicate_dims(rhs, rhs_dims)
    return _replicate_dims(primitive.bind(lhs, rhs, **params), out_dims)


def _sums_of_products(lhs: jax.Array, rhs: jax.Array, params: Mapping[str, Any]) -> jax.Array:
    """Computes a convolution with batch groups as one matmul per spatial output position.

    The gradient of a filter is such a convolution, and a filter has few spatial positions.
    """
    dimension_numbers, batch_group_count = params["dimension_numbers"], params["batch_group_count"]
    window_strides, padding = params["window_strides"], params["padding"]
    lhs_dilation, rhs_dilation = params["lhs_dilation"], params["rhs_dilation"]
    lhs = lhs.transpose(dimension_numbers.lhs_spec)  # [batch, features, spatial ...]
    rhs = rhs.transpose(dimension_numbers.rhs_spec)  # [outputs, features, spatial ...]
    pads = [(*ends, size - 1) for ends, size in zip(padding, lhs_dilation, strict=True)]
    lhs = jax.lax.pad(lhs, jnp.zeros((), lhs.dtype), [(0, 0, 0), (0, 0, 0), *pads])
    lengths = [(n - 1) * size + 1 for n, size in zip(rhs.shape[2:], rhs_dilation, strict=True)]
    counts = [
        (n - length) // stride + 1
        for n, length, stride in zip(lhs.shape[2:], lengths, window_strides, strict=True)
    ]
    rhs = rhs.reshape(batch_group_count, -1, *rhs.shape[1:])
    products = []
    for position in itertools.product(*map(range, counts)):
        starts = [i * stride for i, stride in zip(position, window_strides, strict=True)]
        window = tuple(
            slice(start, start + length, size)
            for start, length, size in zip(starts, lengths, rhs_dilation, strict=True)
        )
        x = lhs[:, :, *window].reshape(batch_group_count, -1, *rhs.shape[2:])
        summed = tuple(range(2, rhs.ndim))
        product = jax.lax.dot_general(  # [group, batch, outputs]
            x,
            rhs,
            ((summed, summed), ((0,), (0,))),
            precision=params["precision"],
            preferred_element_type=params["preferred_element_type"],
        )
        products.append(product.swapaxes(0, 1).reshape(x.shape[1], -1))
    outputs = jnp.stack(products, -1).reshape(*products[0].shape, *counts)
    return outputs.transpose(np.argsort(dimension_numbers.out_spec))


def _corrected(primitive: core.Primitive, compute: Callable[..., Any]) -> core.Primitive:
    """Returns a primitive with the same name as `primitive`, but lowered by `compute`."""
    corrected = core.Primitive(primitive.name)
    corrected.multiple_results = primitive.multiple_results
    corrected.def_effectful_abstract_eval(primitive.abstract_eval)
    lowering = mlir.lower_fun(
        functools.partial(compute, primitive), multiple_results=primitive.multiple_results
    )
    mlir.register_lowering(corrected, lowering)
    return corrected


# Scatters that overwrite elements are computed correctly.
_SCATTERS = ("scatter_add", "scatter_max", "scatter_min", "scatter_mul")
_WINDOWED = (
    *("cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp"),
    *("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"),
    "select_and_gather_add",
)
_CORRECTED = {
    primitive: _corrected(primitive, compute)
    for names, compute in (
        (_SCATTERS, _scatter),
        (_WINDOWED, _windowed),
        (("select_and_scatter_add",), _gradient_of_maxima),
        (("conv_general_dilated",), _convolution),
    )
    for primitive in (getattr(primitives, f"{name}_p") for name in names)
}


def _corrected_equation(eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
    corrected = _CORRECTED.get(eqn.primitive)
    return [eqn if corrected is None else eqn.replace(primitive=corrected)]
