"""Layers that JAX cannot type over Explicit axes are computed as over Auto axes, and noted."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from praxis_lite.core.sharding.devices.axis_types import (
    has_no_type,
    is_typed,
    note_untyped,
    type_spec,
    untyped,
)
from praxis_lite.layers.base.variables import assign, assigned_values

PyTree = Any


def typed_if_it_can(
    method: Callable[..., Any], layer: Any, args: Sequence[Any], kwargs: Mapping[str, Any],
    path: str,
) -> Any:
    """Returns `method(layer, *args, **kwargs)`; as over Auto axes if JAX has no types of it.

    Results are then typed as the first array among the arguments, dim by dim where sizes agree.

    Args:
      path: of the layer, under which the reason is noted.
    """
    if not is_typed():
        return method(layer, *args, **kwargs)
    try:
        return method(layer, *args, **kwargs)
    except Exception as error:
        if not has_no_type(error):
            raise
        note_untyped(path, str(error).strip().splitlines()[0])
    leaves, structure = jax.tree.flatten((layer, args, dict(kwargs)))
    is_array = [isinstance(x, jax.Array) for x in leaves]
    arrays = [x for x, array in zip(leaves, is_array, strict=True) if array]
    like = next((x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array)), None)

    def function(*arrays: jax.Array) -> Any:
        given = iter(arrays)
        merged = [next(given) if a else x for x, a in zip(leaves, is_array, strict=True)]
        own, args, kwargs = jax.tree.unflatten(structure, merged)
        return method(own, *args, **kwargs), assigned_values(own)

    results, values = untyped(function, *arrays, out=lambda tree: jax.tree.map(
        lambda x: _type_like(x, like), tree
    ))
    assign(layer, values)
    return results


def _type_like(x: jax.Array, like: jax.Array | None) -> PartitionSpec:
    """Returns a spec that splits the leading dims of `x` as those of `like` of the same sizes."""
    entries = [None] * x.ndim
    if like is not None:
        for dim, entry in enumerate(type_spec(like)[: x.ndim]):
            if like.shape[dim] != x.shape[dim]:
                break
            entries[dim] = entry
    return PartitionSpec(*entries)
