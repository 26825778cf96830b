"""Casts arrays to vary over the manual axes of a `jax.shard_map`.

Along a manual axis, an array is either replicated or varying. JAX tracks this in array types
because it sums the gradients of replicated arrays over devices. A loop's carry must have the same
type before and after each iteration. `jnp.zeros` is replicated, so the initial values of loops must
be cast.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ("varying_over",)

PyTree = Any


def varying_axes(tree: PyTree) -> frozenset[str]:
    """Returns the manual axes over which any array in `tree` varies.

    The result is empty outside `jax.shard_map` and under `check_vma=False`.
    """
    return frozenset().union(*(jax.typeof(x).mat.varying for x in jax.tree.leaves(tree)))


def varying_over(tree: PyTree, axes: Iterable[str]) -> PyTree:
    """Casts arrays to vary over all of `axes`; their values do not change."""

    def cast(x: Any) -> Any:
        missing = frozenset(axes) - jax.typeof(x).mat.varying
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(cast, tree)


def varying_alike(tree: PyTree, others: PyTree = ()) -> PyTree:
    """Casts the arrays in `tree` to vary over all axes over which `tree` or `others` vary."""
    return varying_over(tree, varying_axes((tree, others)))


def on_any_device(flag: jax.Array) -> jax.Array:
    """Returns a bool scalar that is True if `flag` is True on any device.

    Used as a loop condition, the result makes all devices run the same number of iterations, so
    that every device takes part in the collectives in each iteration, such as the all-gather of a
    weight.
    """
    axes = tuple(sorted(varying_axes(flag)))
    return jax.lax.pmax(flag.astype(jnp.int32), axes) > 0 if axes else flag
