"""Histograms of weights and gradients, computed where the arrays are stored."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_lite.core.sharding.memory_spaces import to_device

NUM_BINS = 64


def histograms(trees: Mapping[str, Any]) -> dict[str, dict[str, jax.Array]]:
    """Returns the histogram of the finite values of each leaf of nested dicts, by path.

    Only comparisons, reductions and elementwise operations are used, so that the devices of a
    sharded array exchange only the results of reductions.

    Args:
      trees: Nested dicts of arrays of any shape and dtype. A path is a key of this dict and the
        keys of the nested dicts, separated by slashes.

    Returns:
      For each leaf, float32 arrays: "edges" [NUM_BINS + 1], evenly spaced from the smallest to the
      largest value; "counts" [NUM_BINS]; and the scalars "mean", "std" and "num_not_finite". A bin
      includes its left edge, and the last bin also its right edge.
    """
    leaves = {
        path: jnp.atleast_1d(to_device(x)).astype(jnp.float32)
        for path, x in leaves_with_path(trees)
    }
    statistics = {path: _statistics(x) for path, x in leaves.items()}

    # Loop over the edges, because an array with a dim of bins would use too much memory. All leaves
    # are in the same loop, so that XLA combines their collectives.
    def num_above(edges: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {path: _count((x >= edges[path]) & (x < jnp.inf)) for path, x in leaves.items()}

    above = jax.lax.map(num_above, {path: x["edges"][:-1] for path, x in statistics.items()})
    return {
        path: {**x, "counts": above[path] - jnp.append(above[path][1:], 0.0)}
        for path, x in statistics.items()
    }


def _statistics(x: jax.Array) -> dict[str, jax.Array]:
    """Returns the results of `histograms` without "counts"."""
    is_finite = jnp.isfinite(x)
    num_finite = _count(is_finite)
    divisor = jnp.maximum(num_finite, 1.0)
    smallest = jnp.min(jnp.where(is_finite, x, jnp.inf))
    largest = jnp.max(jnp.where(is_finite, x, -jnp.inf))
    # Like NumPy, use a range of 1 around the value if all values are equal.
    margin = jnp.where(smallest == largest, 0.5, 0.0)
    smallest = jnp.where(num_finite > 0, smallest - margin, 0.0)
    largest = jnp.where(num_finite > 0, largest + margin, 1.0)
    fractions = jnp.arange(NUM_BINS + 1, dtype=jnp.float32) / NUM_BINS
    mean = jnp.sum(jnp.where(is_finite, x, 0.0)) / divisor
    variance = jnp.sum(jnp.where(is_finite, jnp.square(x - mean), 0.0)) / divisor
    return {
        "edges": smallest * (1.0 - fractions) + largest * fractions,
        "mean": mean,
        "std": jnp.sqrt(variance),
        "num_not_finite": x.size - num_finite,
    }


def _count(is_true: jax.Array) -> jax.Array:
    """Counts true values, as float32.

    The first dim is summed last and in float32, because a stack of layers may have more than 2^31
    values.
    """
    counts = jnp.sum(is_true, axis=tuple(range(1, is_true.ndim)), dtype=jnp.int32)
    return jnp.sum(counts.astype(jnp.float32))
