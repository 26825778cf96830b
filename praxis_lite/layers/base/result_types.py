"""Types of results that JAX does not infer over Explicit axes: products, lookups, reshapes.

Over Auto axes the functions are those of jax.numpy.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from praxis_lite.core.sharding.devices.axis_types import is_typed, reduce_partial, type_spec
from praxis_lite.core.sharding.logical_axes import axes_of, entry_of


def einsum(equation: str, x: jax.Array, y: jax.Array, **settings: Any) -> jax.Array:
    """Returns `jnp.einsum(equation, x, y, **settings)`, of the type `product_type`.

    Args:
      equation: with "->"; "..." may stand for leading dims of `x` alone.
    """
    if not is_typed():
        return jnp.einsum(equation, x, y, **settings)
    num_leading = x.ndim - len(equation.partition(",")[0].replace("...", ""))
    leading = "".join(chr(ord("A") + i) for i in range(num_leading if "..." in equation else 0))
    equation = equation.replace("...", leading)
    return jnp.einsum(equation, x, y, out_sharding=product_type(equation, x, y), **settings)


def product_type(equation: str, x: jax.Array, y: jax.Array) -> PartitionSpec:
    """Returns the spec of the type of `einsum(equation, x, y)`, from the dims of its factors.

    The product is summed over axes that split a summed dim of both. If two dims of the result have
    the same axis in the factors, the result's first dim, the batch, keeps it: a weight's dim with
    one of its axes is gathered over all its axes (fully sharded). Next come dims of `y`, a weight,
    then other dims of `x`, which is gathered over their axes (sequence parallelism).

    Args:
      equation: "abd,df->abf", without "...".
    """
    factors, results = equation.split("->")
    of_x, of_y = factors.split(",")
    axes = dict(zip(of_x, map(axes_of, type_spec(x)), strict=True))
    axes_in_y = dict(zip(of_y, map(axes_of, type_spec(y)), strict=True))
    for letter, names in axes_in_y.items():
        axes[letter] = axes.get(letter) or names
    first = [letter for letter in results[:1] if letter not in of_y or letter in of_x]
    order = [*first, *(x for x in of_y if x in results), *results]
    used, split = set(), {}
    for letter in dict.fromkeys(order):
        is_whole = letter in of_y and used.intersection(axes[letter])
        split[letter] = () if is_whole else tuple(a for a in axes[letter] if a not in used)
        used.update(split[letter])
    return PartitionSpec(*(entry_of(split[letter]) for letter in results))


def convolved(x: jax.Array, w: jax.Array, **settings: Any) -> jax.Array:
    """Returns `jax.lax.conv_general_dilated(x, w, **settings)` with channels split as the filter's.

    Batch and spatial dims are typed as those of `x`, if the axes divide them.

    Args:
      x: [batch, places ..., channels].
      w: [places ..., channels of a group, channels of the result].
    """
    places = "HWD"[: x.ndim - 2]
    convolve = functools.partial(
        jax.lax.conv_general_dilated,
        dimension_numbers=(f"N{places}C", f"{places}IO", f"N{places}C"), **settings,
    )
    if not is_typed():
        return convolve(x, w)
    shapes = (jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (x, w))
    sizes, mesh = jax.eval_shape(convolve, *shapes).shape, jax.sharding.get_abstract_mesh()
    (batch, *of_places, _), used = type_spec(x), set()
    split = dict.fromkeys(range(x.ndim))
    for dim, entry in ((0, batch), (x.ndim - 1, type_spec(w)[-1]), *enumerate(of_places, 1)):
        axes = axes_of(entry)
        divides = sizes[dim] % math.prod(mesh.shape[axis] for axis in axes) == 0
        if divides and not used.intersection(axes):
            split[dim] = entry
            used.update(axes)
    num_groups, of_w = x.shape[-1] // w.shape[-2], type_spec(w)
    num_parts = math.prod(mesh.shape[axis] for axis in axes_of(of_w[-1]))
    if num_groups > 1 and (of_w[-2] is not None or num_groups % num_parts):
        # In the gradient groups are a separate dim, which JAX cannot type then.
        w = jax.sharding.reshard(w, PartitionSpec())
    return convolve(x, w, out_sharding=PartitionSpec(*split.values()))


def rows_at(table: jax.Array, index: jax.Array, **settings: Any) -> jax.Array:
    """Returns `jnp.take(table, index, axis=0, **settings)`, its rows typed as the index.

    Dims of a row keep the axes of the table's that the index does not have.
    """
    if not is_typed():
        return jnp.take(table, index, axis=0, **settings)
    of_index = type_spec(index)
    used = {axis for entry in of_index for axis in axes_of(entry)}
    of_row = (
        entry_of(tuple(axis for axis in axes_of(entry) if axis not in used))
        for entry in type_spec(table)[1:]
    )
    out = PartitionSpec(*of_index, *of_row)
    settings = {"mode": "fill", **settings}  # As that of jnp.take.
    return table.at[index].get(out_sharding=out, **settings)


def reshaped(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns `x.reshape(shape)` with the first dim, and equal trailing dims, split as before.

    Over Explicit axes the dims between, and a first dim that does not divide, are not split.
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


def beside(weight: jax.Array, like: jax.Array) -> jax.Array:
    """Reshards a weight, whose dims are the last ones of `like` or 1, as `like`."""
    if not is_typed():
        return weight
    first = like.ndim - weight.ndim
    is_one = [size != whole for size, whole in zip(weight.shape, like.shape[first:], strict=True)]
    entries = zip(is_one, type_spec(like)[first:], strict=True)
    own = PartitionSpec(*(None if one else entry for one, entry in entries))
    return jax.sharding.reshard(weight, own)


def broadcast_beside(weight: jax.Array, like: jax.Array) -> jax.Array:
    """Returns `jnp.broadcast_to(weight, like.shape)`, typed as `like`.

    Its gradient is then summed in the sharding of `like`, without gathering such an array.
    """
    if not is_typed():
        return jnp.broadcast_to(weight, like.shape)
    return jnp.broadcast_to(beside(weight, like), like.shape, out_sharding=type_spec(like))


def elementwise(weight: jax.Array) -> jax.Array:
    """Returns a weight for an elementwise product.

    JAX cannot type unreduced gradients there (`axis_types.with_unreduced_gradient`): this weight's
    gradient is summed in each micro-batch.
    """
    return reduce_partial(weight) if is_typed() else weight
