"""Uneven sharding: padded arrays at a program's boundary, their logical shapes inside.

JAX refuses an uneven sharding wherever an array crosses jit or device_put and accepts it inside.
So, as Pax does, arrays are padded with zeros at the boundary, sliced on entry, padded on exit. A
leaf that its axes divide passes through without any operation.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from praxis_lite.core.sharding.devices.axis_types import stated
from praxis_lite.core.sharding.logical_axes import axes_of

PyTree = Any


def is_traced(x: Any) -> bool:
    """Returns True if `x` stands for an array while a program is traced."""
    return isinstance(x, jax.core.Tracer)


def padded_shape(
    shape: Sequence[int], spec: PartitionSpec, axis_sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """Returns `shape` with each dim rounded up to a multiple of the devices it is split over.

    Args:
      shape: without padding.
      spec: at most an entry per dim: None, an axis name, or a tuple of them.
      axis_sizes: devices along each mesh axis.
    """
    padded = list(shape)
    for dim, entry in enumerate(spec):
        parts = math.prod(axis_sizes[axis] for axis in axes_of(entry))
        padded[dim] = math.ceil(shape[dim] / parts) * parts
    return tuple(padded)


@jax.named_scope("pad")
def pad_tree(tree: PyTree, specs: PyTree, axis_sizes: Mapping[str, int]) -> PyTree:
    """Returns `tree` with zeros appended so that each dim divides its axes.

    Args:
      tree: arrays without padding.
      specs: a PartitionSpec per leaf, extended to the leaf's rank.
      axis_sizes: devices along each mesh axis.
    """

    def pad(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        padded = padded_shape(x.shape, spec, axis_sizes)
        if padded == x.shape:
            return x
        # Annotate before padding: a pad op alone does not fix the layout for XLA.
        return jnp.pad(
            _annotate(x, spec), [(0, p - dim) for p, dim in zip(padded, x.shape, strict=True)]
        )

    return jax.tree.map(pad, tree, specs)


def unpad_tree(tree: PyTree, shapes: PyTree, specs: PyTree) -> PyTree:
    """Returns `tree` without its padding: the inverse of `pad_tree`.

    Args:
      tree: arrays of padded shapes.
      shapes: a ShapeDtypeStruct per leaf, of its shape without padding.
      specs: a PartitionSpec per leaf.
    """

    def unpad(
        path: tuple, x: jax.Array, shape: jax.ShapeDtypeStruct, spec: PartitionSpec
    ) -> jax.Array:
        if x.shape == shape.shape:
            return x
        # --mode=explain then tells which leaf the compiler gathers here.
        with jax.named_scope("unpad/" + jax.tree_util.keystr(path, simple=True, separator="/")):
            return _annotate(x[tuple(slice(dim) for dim in shape.shape)], spec)

    return jax.tree_util.tree_map_with_path(unpad, tree, shapes, specs)


def evenly(tree: PyTree) -> PyTree:
    """Returns arrays that XLA splits evenly where they cross a program's boundary.

    XLA chooses the layout of an argument or a result without a stated one, and splits four rows
    over eight devices in a way that JAX cannot represent (IndivisibleError). So a dim that the
    number of devices does not divide is replicated; XLA may split the others.

    Args:
      tree: tracers, of a program on the mesh that is set; other values are returned unchanged.
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
    return stated(x, spec)
