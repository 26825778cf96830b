"""Sums and means over the devices of a `jax.shard_map`, and what devices without true rows add.

Args of all: `data_axes`, the axes that the devices lie along.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.collectives.mapped_weights import MappedWeight
from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.task import WeightedScalars

PyTree = Any


def counting(inputs: Mapping[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns a device's inputs, and True if any of its rows has a weight above zero.

    A device without such a row computes on weights of 1, and what it finds is multiplied by 0: a
    mean over nothing may be NaN, and one device's NaN would be in everybody's sums.
    """
    if "weights" not in inputs:
        return dict(inputs), jnp.ones((), bool)
    weights = inputs["weights"]
    counts = jnp.any(weights != 0)
    return {**inputs, "weights": jnp.where(counts, weights, jnp.ones_like(weights))}, counts


def summed(grad: jax.Array, weight: MappedWeight, data_axes: Sequence[str]) -> jax.Array:
    """Returns a gradient summed over devices; over a weight's own axes its gather has summed it."""
    done = {axis for entry in weight.mapped_spec for axis in axes_of(entry)}
    axes = tuple(axis for axis in data_axes if axis not in done)
    return jax.lax.psum(grad, axes) if axes else grad


@jax.named_scope("sum_over_devices")
def weighted_means(metrics: WeightedScalars, data_axes: Sequence[str]) -> WeightedScalars:
    """Returns each metric's mean over devices, weighted by its weights, and their sum."""

    def mean(value: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        weight = jnp.asarray(weight, jnp.float32)
        weighted = jnp.where(weight != 0, value * weight, 0.0)
        weighted_sum, total = jax.lax.psum((weighted, weight), data_axes)
        return weighted_sum / jnp.where(total == 0, 1.0, total), total

    return {name: mean(*pair) for name, pair in metrics.items()}


def mean_change(old: PyTree, new: PyTree, weight: jax.Array, data_axes: Sequence[str]) -> PyTree:
    """Returns variables changed by the weighted mean of what devices changed them by.

    Of integers and keys, which every device has the same, the greatest are taken.
    """

    def mean(old: jax.Array, new: jax.Array) -> jax.Array:
        if jnp.issubdtype(new.dtype, jax.dtypes.prng_key):
            bits = jax.lax.pmax(jax.random.key_data(new), data_axes)
            return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(new))
        if not jnp.issubdtype(new.dtype, jnp.inexact):
            return jax.lax.pmax(new, data_axes)
        # Exactly what it was where nothing changed, an infinity too.
        change = jnp.where(new == old, 0.0, new - old) * weight
        change, total = jax.lax.psum((change, weight), data_axes)
        return (old + change / jnp.where(total == 0, 1.0, total)).astype(new.dtype)

    return jax.tree.map(mean, old, new)
