"""Repeats, restores, reorders and inserts rows of a cache, along the batch dim of each leaf."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.leaf_paths import path_of

# B batch, K hypotheses per row.
PyTree = Any


def batch_dims(init_cache: Callable[[int, int], PyTree]) -> PyTree:
    """Returns the batch dim of each cache leaf, or -1 for a leaf without a batch dim.

    Layers do not declare the batch dim: it is the dim whose size differs between caches for two
    batch sizes. It is not always dim 0, because scanned layers are stacked in front of it.
    """
    two, three = (jax.eval_shape(lambda num=num: init_cache(num, 1)) for num in (2, 3))

    def batch_dim(a: jax.ShapeDtypeStruct, b: jax.ShapeDtypeStruct) -> int:
        differing = [dim for dim in range(a.ndim) if a.shape[dim] != b.shape[dim]]
        assert len(differing) <= 1, f"a cache leaf {a.shape} has several batch dims"
        return differing[0] if differing else -1

    return jax.tree.map(batch_dim, two, three)


def repeat_rows(cache: PyTree, dims: PyTree, repeats: int) -> PyTree:
    """Repeats each row of the cache: a, a, b, b, ..."""
    if repeats == 1:
        return cache
    return jax.tree.map(
        lambda x, dim: x if dim < 0 else jnp.repeat(x, repeats, axis=dim), cache, dims
    )


def keep_rows(old: PyTree, new: PyTree, dims: PyTree, is_kept_B: jax.Array) -> PyTree:
    """Returns the cache `new`, but with the rows of `old` where `is_kept_B` is True.

    Raises:
      ConfigError: A leaf has no batch dim. The message contains the path of the leaf.
    """

    def keep(path: tuple, before: jax.Array, after: jax.Array, dim: int) -> jax.Array:
        if dim < 0:
            raise ConfigError(
                f"{path_of(path)} in the cache has the shape {after.shape} for any batch size; "
                "expected a batch dim, because prompts differ in length. Add one in init_cache, "
                "for example jnp.zeros((batch_size,), jnp.int32)."
            )
        shape = [-1 if d == dim else 1 for d in range(after.ndim)]
        return jnp.where(is_kept_B.reshape(shape), before, after)

    return jax.tree.map_with_path(keep, old, new, dims)


def take_hyps(cache: PyTree, dims: PyTree, hyps_BK: jax.Array) -> PyTree:
    """Selects the hypotheses `hyps_BK` of each batch element in a cache with B x K rows.

    The gather is local to each batch element, so it requires no communication if the batch is
    sharded.
    """
    num_rows, num_hyps = hyps_BK.shape

    def take(x: jax.Array, dim: int) -> jax.Array:
        if dim < 0:
            return x
        split = x.reshape(*x.shape[:dim], num_rows, num_hyps, *x.shape[dim + 1 :])
        taken = jax.vmap(
            lambda row, hyps: jnp.take(row, hyps, axis=dim), in_axes=(dim, 0), out_axes=dim
        )(split, hyps_BK)
        return taken.reshape(x.shape)

    return jax.tree.map(take, cache, dims)


def put_rows(cache: PyTree, dims: PyTree, new: PyTree, rows: jax.Array) -> PyTree:
    """Overwrites rows of the cache with the rows of `new`, and replaces leaves without rows."""

    def put_row(i: jax.Array, cache: PyTree) -> PyTree:
        def put(x: jax.Array, array: jax.Array, dim: int) -> jax.Array:
            if dim < 0:
                return array
            row = jax.lax.dynamic_slice_in_dim(array, i, 1, axis=dim)
            return jax.lax.dynamic_update_slice_in_dim(x, row, rows[i], axis=dim)

        return jax.tree.map(put, cache, new, dims)

    return jax.lax.fori_loop(0, rows.shape[0], put_row, cache)
