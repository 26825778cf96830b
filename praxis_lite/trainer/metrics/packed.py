"""Packs scalars on the devices into one array per dtype, because each transfer has a cost."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Packed:
    """The scalars of a tree, on their way to the host.

    Attributes:
      arrays: one for each dtype, [scalars]; or the tree itself if it has other leaves.
      places: for each array the indices of its scalars among the tree's leaves.
      structure: of the tree; None: `arrays` is the tree.
    """

    arrays: PyTree
    places: Sequence[Sequence[int]] = ()
    structure: Any = None

    def on_host(self) -> PyTree:
        """Waits for the scalars; returns the tree of NumPy scalars, each with its dtype."""
        arrays = jax.device_get(self.arrays)
        if self.structure is None:
            return arrays
        scalars = [None] * self.structure.num_leaves
        for array, indices in zip(arrays, self.places, strict=True):
            for index, scalar in zip(indices, array, strict=True):
                scalars[index] = scalar
        return jax.tree.unflatten(self.structure, scalars)


def packed(tree: PyTree) -> Packed:
    """Starts to pack the scalars of a tree, behind the program that computes them.

    Args:
      tree: of arrays of shape () that lie on every device of one mesh, as a step returns its
        metrics. A tree with any other leaf is left as it is.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not leaves or not all(isinstance(x, jax.Array) and x.shape == () for x in leaves):
        return Packed(tree)
    places: dict[Any, list[int]] = {}
    for index, x in enumerate(leaves):
        places.setdefault(x.dtype, []).append(index)
    groups = [[leaves[index] for index in indices] for indices in places.values()]
    return Packed(_stacks(leaves[0].sharding)(groups), tuple(places.values()), structure)


@functools.lru_cache(maxsize=16)
def _stacks(sharding: jax.sharding.Sharding) -> Callable[[list], list]:
    def pack_scalars(groups: list[list[jax.Array]]) -> list[jax.Array]:
        return [jnp.stack(scalars) for scalars in groups]

    return jax.jit(pack_scalars, out_shardings=sharding)
