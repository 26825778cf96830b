"""Casts of values that vary over the manual axes of a `jax.shard_map`.

Along a manual axis an array is either equal on all devices or varies. JAX tracks this in types,
because gradients of equal arrays are summed over devices. A loop's carry must vary from the start
if it varies at the end: `jnp.zeros` does not, so loops cast their initial values.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ("varying_over",)

PyTree = Any


def varying_axes(tree: PyTree) -> frozenset[str]:
    """Returns the manual axes along which any array of `tree` varies.

    Empty outside `jax.shard_map`, and inside one whose `check_vma` is False.
    """
    return frozenset().union(*(jax.typeof(x).mat.varying for x in jax.tree.leaves(tree)))


def varying_over(tree: PyTree, axes: Iterable[str]) -> PyTree:
    """Returns `tree`, its arrays varying along all of `axes`; the numbers are the same."""

    def cast(x: Any) -> Any:
        missing = frozenset(axes) - jax.typeof(x).mat.varying
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(cast, tree)


def varying_alike(tree: PyTree, others: PyTree = ()) -> PyTree:
    """Returns `tree`, its arrays varying wherever any of `tree` or of `others` does."""
    return varying_over(tree, varying_axes((tree, others)))


def on_any_device(flag: jax.Array) -> jax.Array:
    """Returns a bool [] that is True where `flag` is on any device.

    The condition of a loop: all devices then take as many turns, and meet in the collectives of
    each, such as the gather of a weight.
    """
    axes = tuple(sorted(varying_axes(flag)))
    return jax.lax.pmax(flag.astype(jnp.int32), axes) > 0 if axes else flag
