"""The types of results that JAX does not infer over Explicit axes: of products, and rows read.

Over Auto axes each function is jax.numpy's own.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from praxis_lite.core.sharding.axis_types import explicit_axes_of, type_spec
from praxis_lite.core.sharding.logical_axes import axes_of, entry_of


def einsum(equation: str, x: jax.Array, y: jax.Array, **settings: Any) -> jax.Array:
    """Returns `jnp.einsum(equation, x, y, **settings)`, its type that of its factors' dims.

    Over axes that split a summed dim of both it is summed. Where two dims of the result have one
    axis in the factors, the result's first dim keeps it, the batch; then those of `y`, a weight,
    and then the others of `x`, which is gathered over it.

    Args:
      equation: with "->"; "..." may stand for leading dims of `x` alone.
    """
    if not explicit_axes_of(jax.sharding.get_abstract_mesh()):
        return jnp.einsum(equation, x, y, **settings)
    factors, results = equation.split("->")
    of_x, of_y = factors.split(",")
    num_leading = x.ndim - len(of_x.replace("...", ""))
    leading = "".join(chr(ord("A") + i) for i in range(num_leading if "..." in of_x else 0))
    of_x, results = of_x.replace("...", leading), results.replace("...", leading)
    axes = dict(zip(of_x, map(axes_of, type_spec(x)), strict=True))
    axes_in_y = dict(zip(of_y, map(axes_of, type_spec(y)), strict=True))
    for letter, names in axes_in_y.items():
        axes[letter] = axes.get(letter) or names
    first = [letter for letter in results[:1] if letter not in of_y or letter in of_x]
    order = [*first, *(x for x in of_y if x in results), *results]
    used, split = set(), {}
    for letter in dict.fromkeys(order):
        split[letter] = tuple(axis for axis in axes[letter] if axis not in used)
        used.update(split[letter])
    spec = PartitionSpec(*(entry_of(split[letter]) for letter in results))
    return jnp.einsum(f"{of_x},{of_y}->{results}", x, y, out_sharding=spec, **settings)


def rows_at(table: jax.Array, index: jax.Array, **settings: Any) -> jax.Array:
    """Returns `jnp.take(table, index, axis=0, **settings)`, its rows typed as the index.

    Dims of a row keep the axes of the table's that the index does not have.
    """
    if not explicit_axes_of(jax.sharding.get_abstract_mesh()):
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


def typed_as_dims_of(weight: jax.Array, like: jax.Array) -> jax.Array:
    """Returns a weight typed as the last dims of `like`, beside which it is broadcast."""
    if not explicit_axes_of(jax.sharding.get_abstract_mesh()) or weight.ndim > like.ndim:
        return weight
    of_like = type_spec(like)[like.ndim - weight.ndim :]
    own = (
        entry if size == whole else None
        for entry, size, whole in zip(
            of_like, weight.shape, like.shape[like.ndim - weight.ndim :], strict=True
        )
    )
    return jax.sharding.reshard(weight, PartitionSpec(*own))
