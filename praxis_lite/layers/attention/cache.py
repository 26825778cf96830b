"""Keys and values that decoding keeps, as a tree of arrays."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.mesh import compiled_platform
from praxis_lite.core.sharding.split_dims import (
    SplitDims,
    constrain,
    num_shards_of,
    to_partition_spec,
)
from praxis_lite.layers.base.base_layer import filled_up

# B batch, T new tokens, S places, G heads of keys and values, K dims per head.
Cache = dict[str, jax.Array]

# The cache of a layer with a window has this many places beyond it: that many of a row's newest
# tokens may be taken back, and others written in their places, before a token that is seen is lost.
SPARE_PLACES = 16


def empty_cache(
    layer: Any, batch_size: int, max_seq_length: int, dtype: Any, encoded_length: int | None
) -> Cache:
    """Returns the empty cache of an attention layer: keys and values of zeros, [B, G, S, K].

    Heads come before time, so that the products of each token read a head's rows where they lie:
    after time, they would be copied for each token. That of cross-attention has
    `encoded_visible`, bool [B, S], too, and S is `encoded_length`. A layer with a window keeps a
    ring of the last tokens: S is at most window + SPARE_PLACES.

    Raises:
      ConfigError: cross-attention without encoded_length, or bidirectional attention, where a later
        token would change what earlier ones gave.
    """
    name, is_cross = type(layer).__name__, layer.is_cross_attention
    if is_cross and encoded_length is None:
        raise ConfigError(
            f"{name}.init_cache of cross-attention needs encoded_length, the length of the "
            "longest `encoded` that it will keep."
        )
    if not layer.is_causal and not is_cross:
        raise ConfigError(
            f"{name} with is_causal=False has no cache: a later token changes what earlier "
            "ones see. Run the whole sequence, or set is_causal=True."
        )
    length = encoded_length if is_cross else max_seq_length
    if layer.left_context is not None:
        length = min(length, layer.left_context + SPARE_PLACES)
    shape_BGSK = (batch_size, layer.num_kv_heads, length, layer.dim_per_head)
    cache = {name: jnp.zeros(shape_BGSK, stored_dtype(dtype)) for name in ("key", "value")}
    if is_cross:
        cache["encoded_visible"] = jnp.zeros((batch_size, length), bool)
    return cache


def stored_dtype(dtype: Any) -> jnp.dtype:
    """Returns the dtype of a cache for activations of `dtype`: on a CPU float32 or wider.

    XLA's CPU backend cannot write into an array of 16-bit floats: it converts all of it to float32
    and back, for each token. What is stored has the precision of `dtype` nevertheless, by `stored`.
    """
    return jnp.promote_types(dtype, jnp.float32 if compiled_platform() == "cpu" else dtype)


def stored(new: Cache, dtype: Any) -> Cache:
    """Returns new entries of a cache in its dtype, rounded to that of the activations.

    Not by casts, which XLA leaves out in pairs in some programs and not in others.
    """
    if stored_dtype(dtype) == dtype:
        return new
    info = jnp.finfo(dtype)
    return {
        name: jax.lax.reduce_precision(x.astype(stored_dtype(dtype)), info.nexp, info.nmant)
        for name, x in new.items()
    }


def by_heads(kv: Cache) -> Cache:
    """Returns keys and values [B, S, G, K] as a cache has them, [B, G, S, K]; and back again."""
    return {name: jnp.swapaxes(x, 1, 2) if x.ndim == 4 else x for name, x in kv.items()}


def laid_out(cache: Cache, split: SplitDims) -> Cache:
    """Returns the cache with its layout stated: `split` is of keys and values, [B, ..., S, K]."""
    if split is None:
        return cache
    splits = {"encoded_visible": (split[0], split[-2])}
    return {name: constrain(x, splits.get(name, split)) for name, x in cache.items()}


def append(
    cache: Cache, new: Cache, positions: jax.Array, split: SplitDims = None
) -> Cache:
    """Returns the cache with T new entries [B, ..., T, K] from each row's first position on.

    Args:
      split: of the cache, as of `written`.
    """
    return {name: written(cache[name], x, positions[:, 0], split) for name, x in new.items()}


def written(
    old: jax.Array, new: jax.Array, start_B: jax.Array, split: SplitDims = None
) -> jax.Array:
    """Returns `old` [B, ..., S, K] with `new` [B, ..., T, K] from each row's place `start_B` on.

    Args:
      split: how `old` splits over the devices; None: that is not known.
    """
    new = new.astype(old.dtype)
    if start_B.shape[0] == 1:
        return jax.lax.dynamic_update_slice_in_dim(old, new, start_B[0], axis=old.ndim - 2)
    if new.shape[-2] == 1 and compiled_platform() == "tpu":
        return _scattered(old, new[..., 0, :], start_B, split)
    write = jax.vmap(lambda old, new, start: jax.lax.dynamic_update_slice_in_dim(
        old, new, start, axis=old.ndim - 2
    ))
    return write(old, new, start_B)


def _scattered(
    old: jax.Array, new: jax.Array, place_B: jax.Array, split: SplitDims
) -> jax.Array:
    """Returns `old` [B, ..., S, K] with an entry `new` [B, ..., K] in each row's place.

    A TPU writes slices at places of their own in a loop over the rows, at five instructions each:
    a token of 32 rows then takes 3.5 times as long. A scatter it makes in place, but lays out all
    of the array anew for it unless what is scattered are rows of a matrix. So each device scatters
    into its part, seen as one.
    """

    def of_part(old: jax.Array, new: jax.Array, place_B: jax.Array) -> jax.Array:
        *rows, num_places, dims = old.shape
        num_rows = math.prod(rows)
        place = place_B.reshape(-1, *[1] * (len(rows) - 1))
        # A place past the end is past that of all rows, and is dropped.
        place = jnp.where(place < num_places, place, num_rows * num_places)
        index = jnp.arange(num_rows).reshape(rows) * num_places + place
        # Heads first, as the products before leave them: else they would be copied into this order.
        index, new = jnp.moveaxis(index, 0, -1).reshape(-1), jnp.moveaxis(new, 0, -2)
        flat = old.reshape(-1, dims).at[index].set(
            new.reshape(-1, dims), mode="drop", unique_indices=True
        )
        return flat.reshape(old.shape)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or set(mesh.manual_axes) == set(mesh.axis_names):
        return of_part(old, new, place_B)
    spec = to_partition_spec(split or (), mesh.axis_names, rank=old.ndim)
    parts = [num_shards_of(axes) for axes in spec]
    divides = all(size % num == 0 for size, num in zip(old.shape, parts, strict=True))
    if split is None or mesh.manual_axes or not divides or parts[-2] > 1:
        put = jax.vmap(lambda old, new, place: old.at[..., place, :].set(new, mode="drop"))
        return put(old, new, place_B)
    specs = spec, PartitionSpec(*spec[:-2], spec[-1]), PartitionSpec(spec[0])
    return jax.shard_map(of_part, in_specs=specs, out_specs=spec)(old, new, place_B)


def keep_encoded(cache: Cache, new: Cache, visible_BS: jax.Array | None) -> Cache:
    """Returns the cache with the keys and values [B, G, S, K] of `encoded` in its first places.

    Raises:
      ConfigError: `encoded` is longer than the cache.
    """
    length, room = new["key"].shape[2], cache["key"].shape[2]
    if length > room:
        raise ConfigError(
            f"encoded has {length} positions, but the cache was made for {room}. Call init_cache "
            f"with encoded_length of {length} or more."
        )
    if visible_BS is None:
        visible_BS = jnp.ones((new["key"].shape[0], length), bool)
    kept = {
        name: jax.lax.dynamic_update_slice(
            cache[name], new[name].astype(cache[name].dtype), (0, 0, 0, 0)
        )
        for name in ("key", "value")
    }
    return kept | {"encoded_visible": filled_up(visible_BS, room, 1)}
