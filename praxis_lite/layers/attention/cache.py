"""Keys and values that decoding keeps, as a tree of arrays."""

from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.mesh import compiled_platform
from praxis_lite.layers.base_layer import filled_up

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


def append(cache: Cache, new: Cache, positions: jax.Array) -> Cache:
    """Returns the cache with T new entries [B, ..., T, K] from each row's first position on."""
    return {name: written(cache[name], x, positions[:, 0]) for name, x in new.items()}


def written(old: jax.Array, new: jax.Array, start_B: jax.Array) -> jax.Array:
    """Returns `old` [B, ..., S, K] with `new` [B, ..., T, K] from each row's place `start_B` on.

    Not a scatter of XLA's by hand: for it the compiler for TPUs would lay out the cache anew.
    """
    new = new.astype(old.dtype)
    if start_B.shape[0] == 1:
        return jax.lax.dynamic_update_slice_in_dim(old, new, start_B[0], axis=old.ndim - 2)
    write = jax.vmap(lambda old, new, start: jax.lax.dynamic_update_slice_in_dim(
        old, new, start, axis=old.ndim - 2
    ))
    return write(old, new, start_B)


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
