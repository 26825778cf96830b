"""Casts arrays to vary over the manual axes of a `jax.shard_map`.

Along a manual axis an array is either replicated or varying. JAX tracks this in types, because it
sums the gradients of replicated arrays over devices. The carry of a loop must be varying from the
start if it is at the end. `jnp.zeros` is not, so loops cast their initial values.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ("varying_over",)

PyTree = Any


def varying_axes(tree: PyTree) -> frozenset[str]:
    """Returns the manual axes over which any array of `tree` varies.

    Empty outside `jax.shard_map`, and inside one with `check_vma=False`.
    """
    return frozenset().union(*(jax.typeof(x).mat.varying for x in jax.tree.leaves(tree)))


def varying_over(tree: PyTree, axes: Iterable[str]) -> PyTree:
    """Casts arrays to vary over all of `axes`; their values do not change."""

    def cast(x: Any) -> Any:
        missing = frozenset(axes) - jax.typeof(x).mat.varying
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(cast, tree)


def varying_alike(tree: PyTree, others: PyTree = ()) -> PyTree:
    """Casts arrays to vary over every axis over which any array of `tree` or `others` varies."""
    return varying_over(tree, varying_axes((tree, others)))


def on_any_device(flag: jax.Array) -> jax.Array:
    """Returns a bool scalar that is True if `flag` is True on any device.

    As the condition of a loop it makes all devices run the same number of iterations, so that each
    collective of an iteration, such as the gather of a weight, has all of its participants.
    """
    axes = tuple(sorted(varying_axes(flag)))
    return jax.lax.pmax(flag.astype(jnp.int32), axes) > 0 if axes else flag
