"""Matmuls, lookups and reshapes whose result types JAX cannot infer over Explicit axes.

Over Auto axes, these functions are equivalent to those in jax.numpy.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from praxis_lite.core.sharding.devices.axis_types import is_typed, reduce_partial, type_spec
from praxis_lite.core.sharding.logical_axes import axes_of, entry_of


def einsum(equation: str, x: jax.Array, y: jax.Array, **settings: Any) -> jax.Array:
    """Returns `jnp.einsum(equation, x, y, **settings)` with the type from `product_type`.

    Args:
      equation: Einsum equation with "->"; "..." may stand for leading dims of `x` only.
      x: First operand.
      y: Second operand, usually a weight.
      settings: Arguments of `jnp.einsum`.
    """
    if not is_typed():
        return jnp.einsum(equation, x, y, **settings)
    num_leading = x.ndim - len(equation.partition(",")[0].replace("...", ""))
    leading = "".join(chr(ord("A") + i) for i in range(num_leading if "..." in equation else 0))
    equation = equation.replace("...", leading)
    return jnp.einsum(equation, x, y, out_sharding=product_type(equation, x, y), **settings)


def product_type(equation: str, x: jax.Array, y: jax.Array) -> PartitionSpec:
    """Returns the spec for the type of `einsum(equation, x, y)`, given the operands' types.

    Contracted dims that are sharded over the same axes in both operands are summed over these axes.
    If two dims of the result share an axis, only one of these dims keeps the axis. The first dim,
    the batch, has the highest priority: a weight's dim that shares an axis with the batch is
    gathered over all of the dim's axes (fully sharded data parallelism). The dims of `y`, the
    weight, come second. The other dims of `x` come last: x is gathered over their shared axes
    (sequence parallelism).

    Args:
      equation: Einsum equation without "...", such as "abd,df->abf".
      x: First operand.
      y: Second operand.
    """
    factors, results = equation.split("->")
    x_letters, y_letters = factors.split(",")
    # The mesh axes of each subscript, according to x or, if they are not sharded there, to y.
    axes = dict(zip(x_letters, map(axes_of, type_spec(x)), strict=True))
    axes_in_y = dict(zip(y_letters, map(axes_of, type_spec(y)), strict=True))
    for letter, names in axes_in_y.items():
        axes[letter] = axes.get(letter) or names
    first = [letter for letter in results[:1] if letter not in y_letters or letter in x_letters]
    # The order in which dims may claim mesh axes.
    order = [*first, *(letter for letter in y_letters if letter in results), *results]
    used: set[str] = set()
    split: dict[str, tuple[str, ...]] = {}
    for letter in dict.fromkeys(order):
        is_gathered = letter in y_letters and used.intersection(axes[letter])
        split[letter] = () if is_gathered else tuple(a for a in axes[letter] if a not in used)
        used.update(split[letter])
    return PartitionSpec(*(entry_of(split[letter]) for letter in results))


def convolved(x: jax.Array, w: jax.Array, **settings: Any) -> jax.Array:
    """Calls `jax.lax.conv_general_dilated`, with output channels sharded like the filter's.

    Batch and spatial dims are sharded like those of `x` if they are evenly divisible.

    Args:
      x: Inputs [batch, spatial ..., channels].
      w: Filter [spatial ..., channels per group, output channels].
      settings: Arguments of `jax.lax.conv_general_dilated`.
    """
    spatial = "HWD"[: x.ndim - 2]
    settings = {"dimension_numbers": (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"), **settings}
    convolve: Callable[..., jax.Array] = functools.partial(jax.lax.conv_general_dilated, **settings)
    if not is_typed():
        return convolve(x, w)
    shapes = (jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (x, w))
    sizes, mesh = jax.eval_shape(convolve, *shapes).shape, jax.sharding.get_abstract_mesh()
    # Shard each dim of the result where its size allows it. A mesh axis can shard only one dim.
    used: set[str] = set()
    batch, *spatial_entries, _ = type_spec(x)
    split = dict.fromkeys(range(x.ndim))
    for dim, entry in ((0, batch), (x.ndim - 1, type_spec(w)[-1]), *enumerate(spatial_entries, 1)):
        axes = axes_of(entry)
        divides = sizes[dim] % math.prod(mesh.shape[axis] for axis in axes) == 0
        if divides and not used.intersection(axes):
            split[dim] = entry
            used.update(axes)
    num_groups, w_spec = x.shape[-1] // w.shape[-2], type_spec(w)
    num_parts = math.prod(mesh.shape[axis] for axis in axes_of(w_spec[-1]))
    if num_groups > 1 and (w_spec[-2] is not None or num_groups % num_parts):
        # In the gradient, groups form a separate dim, which JAX cannot type.
        w = jax.sharding.reshard(w, PartitionSpec())
    return convolve(x, w, out_sharding=PartitionSpec(*split.values()))


def rows_at(table: jax.Array, index: jax.Array, **settings: Any) -> jax.Array:
    """Returns `jnp.take(table, index, axis=0, **settings)`, with rows typed like the index.

    The dims of a row keep the table's axes that the index does not use.
    """
    if not is_typed():
        return jnp.take(table, index, axis=0, **settings)
    index_spec = type_spec(index)
    used = {axis for entry in index_spec for axis in axes_of(entry)}
    row_spec = (
        entry_of(tuple(axis for axis in axes_of(entry) if axis not in used))
        for entry in type_spec(table)[1:]
    )
    out = PartitionSpec(*index_spec, *row_spec)
    settings = {"mode": "fill", **settings}  # The default of jnp.take.
    return table.at[index].get(out_sharding=out, **settings)


def reshaped(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns `x.reshape(shape)` with the first dim and equal trailing dims sharded as before.

    Over Explicit axes, the dims in between are replicated, as is a first dim that is not evenly
    divisible.
    """
    if not is_typed() or shape == x.shape:
        return x.reshape(shape)
    mesh, (rows, *rest) = jax.sharding.get_abstract_mesh(), type_spec(x)
    divides = shape[0] % math.prod(mesh.shape[axis] for axis in axes_of(rows)) == 0
    split: list[Any] = [rows if divides else None, *[None] * (len(shape) - 1)]
    for dim in range(1, min(len(shape), x.ndim)):
        if shape[-dim] != x.shape[-dim]:
            break
        split[-dim] = rest[-dim]
    return jnp.reshape(x, shape, out_sharding=PartitionSpec(*split))


def reshard_like(weight: jax.Array, like: jax.Array) -> jax.Array:
    """Reshards a weight like the last dims of `like`; dims of size 1 are replicated."""
    if not is_typed():
        return weight
    first = like.ndim - weight.ndim
    pairs = zip(weight.shape, like.shape[first:], strict=True)
    is_broadcast = [size != full_size for size, full_size in pairs]
    entries = zip(is_broadcast, type_spec(like)[first:], strict=True)
    spec = PartitionSpec(*(None if broadcast else entry for broadcast, entry in entries))
    return jax.sharding.reshard(weight, spec)


def broadcast_typed_like(weight: jax.Array, like: jax.Array) -> jax.Array:
    """Returns `jnp.broadcast_to(weight, like.shape)`, typed like `like`.

    The gradient is then summed with the sharding of `like`, without gathering a large array.
    """
    if not is_typed():
        return jnp.broadcast_to(weight, like.shape)
    return jnp.broadcast_to(reshard_like(weight, like), like.shape, out_sharding=type_spec(like))


def elementwise(weight: jax.Array) -> jax.Array:
    """Returns a weight for use in elementwise operations.

    JAX does not support unreduced gradients of elementwise operations
    (`axis_types.with_unreduced_gradient`), so the gradient of this weight is reduced in each
    microbatch.
    """
    return reduce_partial(weight) if is_typed() else weight
