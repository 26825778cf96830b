"""Pads arrays at the boundary of jitted functions, so that any dim can be split over mesh axes.

JAX rejects uneven shardings of arrays that cross a jit or device_put boundary, but accepts them
inside a jitted function. As in Pax, arrays outside jitted functions are therefore padded with
zeros: compiled steps slice them on entry and pad them again on exit. Evenly sharded arrays pass
through unchanged.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from praxis_lite.core.sharding.devices.axis_types import constrain_to_spec
from praxis_lite.core.sharding.logical_axes import axes_of

PyTree = Any


def is_traced(x: Any) -> bool:
    """Returns whether `x` is a tracer."""
    return isinstance(x, jax.core.Tracer)


def padded_shape(
    shape: Sequence[int], spec: PartitionSpec, axis_sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """Returns `shape` with each dim rounded up to a multiple of its number of shards.

    Args:
      shape: Logical shape.
      spec: PartitionSpec with at most one entry per dim.
      axis_sizes: Number of devices along each mesh axis.
    """
    padded = list(shape)
    for dim, entry in enumerate(spec):
        num_shards = math.prod(axis_sizes[axis] for axis in axes_of(entry))
        padded[dim] = math.ceil(shape[dim] / num_shards) * num_shards
    return tuple(padded)


@jax.named_scope("pad")
def pad_tree(tree: PyTree, specs: PyTree, axis_sizes: Mapping[str, int]) -> PyTree:
    """Pads every leaf with zeros until each dim is a multiple of its number of shards.

    Args:
      tree: Arrays with logical shapes.
      specs: A PartitionSpec per leaf, extended to the leaf's rank.
      axis_sizes: Number of devices along each mesh axis.

    Returns:
      The padded tree. Leaves that need no padding are returned unchanged.
    """

    def pad(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        padded = padded_shape(x.shape, spec, axis_sizes)
        if padded == x.shape:
            return x
        # Constrain before padding, because XLA does not infer a sharding from a pad op alone.
        return jnp.pad(
            _annotate(x, spec), [(0, p - dim) for p, dim in zip(padded, x.shape, strict=True)]
        )

    return jax.tree.map(pad, tree, specs)


def unpad_tree(tree: PyTree, shapes: PyTree, specs: PyTree) -> PyTree:
    """Slices the padding off every leaf: the inverse of `pad_tree`.

    Args:
      tree: Arrays with padded shapes.
      shapes: A ShapeDtypeStruct per leaf with its logical shape.
      specs: A PartitionSpec per leaf.
    """

    def unpad(
        path: tuple[Any, ...], x: jax.Array, shape: jax.ShapeDtypeStruct, spec: PartitionSpec
    ) -> jax.Array:
        if x.shape == shape.shape:
            return x
        # `praxis explain` uses this name scope to find the leaf that the compiler gathers.
        with jax.named_scope("unpad/" + jax.tree_util.keystr(path, simple=True, separator="/")):
            return _annotate(x[tuple(slice(dim) for dim in shape.shape)], spec)

    return jax.tree_util.tree_map_with_path(unpad, tree, shapes, specs)


def evenly(tree: PyTree) -> PyTree:
    """Constrains arrays so that XLA shards them evenly at the boundary of a jitted function.

    XLA chooses the sharding of unannotated arguments and results. For four rows on eight devices,
    it chooses a sharding that JAX cannot represent (IndivisibleError). This function replicates
    each dim that is not divisible by the number of devices, and leaves the other dims to XLA.

    Args:
      tree: Tracers on the current mesh. Other values are returned unchanged.
    """
    size = jax.sharding.get_abstract_mesh().size

    def even(x: Any) -> Any:
        is_array = is_traced(x) and x.ndim > 0
        if not is_array or not any(dim % size for dim in x.shape):
            return x
        spec = [None if dim % size else PartitionSpec.UNCONSTRAINED for dim in x.shape]
        return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))

    return jax.tree.map(even, tree)


def _annotate(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return constrain_to_spec(x, spec)
