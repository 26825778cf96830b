"""Keys and values that decoding keeps, as a tree of arrays."""

from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.errors import ConfigError

# B batch, T new tokens, S places, G heads of keys and values, K dims per head.
Cache = dict[str, jax.Array]


def empty_cache(shape_BSGK: tuple[int, ...], dtype: Any, *, is_cross_attention: bool) -> Cache:
    """Returns keys and values of zeros, for cross-attention with a mark that none is visible."""
    cache = {name: jnp.zeros(shape_BSGK, dtype) for name in ("key", "value")}
    if is_cross_attention:
        cache["encoded_visible"] = jnp.zeros(shape_BSGK[:2], bool)
    return cache


def append(cache: Cache, new: Cache, start_B: jax.Array) -> Cache:
    """Returns the cache with each row's T new keys and values [B, T, G, K] at the row's start."""

    def write_row(old: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(old, new.astype(old.dtype), (start, 0, 0))

    return {name: jax.vmap(write_row)(cache[name], new[name], start_B) for name in ("key", "value")}


def keep_encoded(cache: Cache, new: Cache, visible_BS: jax.Array | None) -> Cache:
    """Returns the cache with the keys and values of `encoded` in its first places.

    Raises:
      ConfigError: `encoded` is longer than the cache.
    """
    length, room = new["key"].shape[1], cache["key"].shape[1]
    if length > room:
        raise ConfigError(
            f"encoded has {length} positions, but the cache was made for {room}. Call init_cache "
            f"with encoded_length of {length} or more."
        )
    if visible_BS is None:
        visible_BS = jnp.ones(new["key"].shape[:2], bool)
    kept = {
        name: jax.lax.dynamic_update_slice(
            cache[name], new[name].astype(cache[name].dtype), (0, 0, 0, 0)
        )
        for name in ("key", "value")
    }
    return kept | {"encoded_visible": jnp.pad(visible_BS, ((0, 0), (0, room - length)))}
