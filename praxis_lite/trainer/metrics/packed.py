"""Packs scalars into one array per dtype on the devices, to reduce transfers to the host."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Packed:
    """A tree of scalars that is packed for transfer to the host.

    Attributes:
      arrays: One array [num_scalars] per dtype, or the tree itself if it was not packed.
      leaf_indices: For each array, the indices of its scalars among the tree's leaves.
      structure: The tree's structure, or None if `arrays` is the tree itself.
    """

    arrays: PyTree
    leaf_indices: Sequence[Sequence[int]] = ()
    structure: Any = None

    def to_host(self) -> PyTree:
        """Waits for the scalars and returns the tree with NumPy scalars of the same dtypes."""
        arrays = jax.device_get(self.arrays)
        if self.structure is None:
            return arrays
        scalars = [None] * self.structure.num_leaves
        for array, indices in zip(arrays, self.leaf_indices, strict=True):
            for index, scalar in zip(indices, array, strict=True):
                scalars[index] = scalar
        return jax.tree.unflatten(self.structure, scalars)


def pack_scalars(tree: PyTree) -> Packed:
    """Dispatches the packing of a tree's scalars, without waiting for their values.

    Args:
      tree: Arrays of shape (), replicated over one mesh, such as the metrics of a step. A tree with
        any other leaf is not packed.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not leaves or not all(isinstance(x, jax.Array) and x.shape == () for x in leaves):
        return Packed(tree)
    # Scalars of the same dtype are stacked into one array, which is a single transfer.
    by_dtype: dict[Any, list[int]] = {}
    for index, x in enumerate(leaves):
        by_dtype.setdefault(x.dtype, []).append(index)
    groups = [[leaves[index] for index in indices] for indices in by_dtype.values()]
    return Packed(_packer(leaves[0].sharding)(groups), tuple(by_dtype.values()), structure)


@functools.lru_cache(maxsize=16)
def _packer(sharding: jax.sharding.Sharding) -> Callable[[list], list]:
    def pack_scalars(groups: list[list[jax.Array]]) -> list[jax.Array]:
        return [jnp.stack(scalars) for scalars in groups]

    return jax.jit(pack_scalars, out_shardings=sharding)
