"""Keys and values that decoding keeps, as a tree of arrays."""

from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError
from praxis_lite.layers.attention.masks import AttentionMask
from praxis_lite.layers.base_layer import filled_up

# B batch, T new tokens, S places, G heads of keys and values, K dims per head.
Cache = dict[str, jax.Array]


def empty_cache(
    layer: Any, batch_size: int, max_seq_length: int, dtype: Any, encoded_length: int | None
) -> Cache:
    """Returns the empty cache of an attention layer: keys and values of zeros, [B, G, S, K].

    Heads come before time, so that the products of each token read a head's rows where they lie:
    after time, they would be copied for each token. That of cross-attention has
    `encoded_visible`, bool [B, S], too, and S is `encoded_length`.

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
    shape_BGSK = (batch_size, layer.num_kv_heads, length, layer.dim_per_head)
    cache = {name: jnp.zeros(shape_BGSK, dtype) for name in ("key", "value")}
    if is_cross:
        cache["encoded_visible"] = jnp.zeros((batch_size, length), bool)
    return cache


def by_heads(kv: Cache) -> Cache:
    """Returns keys and values [B, S, G, K] as a cache has them, [B, G, S, K]; and back again."""
    return {name: jnp.swapaxes(x, 1, 2) if x.ndim == 4 else x for name, x in kv.items()}


def with_new(
    cache: Cache, kv: Cache | None, positions: jax.Array, mask: AttentionMask, *, is_cross: bool
) -> Cache:
    """Returns the cache with new keys and values [B, S, G, K]; as it is, if there are none.

    Args:
      positions: of the tokens.
      mask: of a call without a cache: it says what of `encoded` is seen.
      is_cross: the keys are those of `encoded`, and stay.

    Raises:
      ConfigError: `encoded` is longer than the cache.
    """
    if kv is None:
        return cache
    if is_cross:
        return keep_encoded(cache, by_heads(kv), mask.kv_visible_BS)
    return append(cache, by_heads(kv), positions)


def append(cache: Cache, new: Cache, positions: jax.Array) -> Cache:
    """Returns the cache with T new entries [B, ..., T, K] from each row's first position on."""
    start_B = jnp.broadcast_to(positions, (new["key"].shape[0], positions.shape[1]))[:, 0]

    def write_row(old: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), start, axis=-2)

    return {name: jax.vmap(write_row)(cache[name], x, start_B) for name, x in new.items()}


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
