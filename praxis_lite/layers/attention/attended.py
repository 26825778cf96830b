"""What new tokens attend to where there is a cache: all of it, or a ring of the last tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.core.sharding.split_dims import SplitDims
from praxis_lite.layers.attention.cache import (
    SPARE_PLACES,
    Cache,
    append,
    by_heads,
    keep_encoded,
    laid_out,
    written,
)
from praxis_lite.layers.attention.masks import AttentionMask

# B batch, T new tokens, S places, G heads of keys and values, K dims per head.


class Attended(NamedTuple):
    """A cache with new tokens in it, and what these attend to."""

    cache: Cache
    kv: Cache  # [B, S, G, K].
    positions: jax.Array  # int [B or 1, S], of the keys; negative where there is none.
    mask: AttentionMask


def attended(
    cache: Cache, kv: Cache | None, positions: jax.Array, mask: AttentionMask,
    split: SplitDims, *, is_cross: bool,
) -> Attended:
    """Returns the cache with T new tokens in it; of cross-attention with `encoded`, if it is given.

    Args:
      kv: new keys and values, [B, T or S, G, K]; None: `encoded` is in the cache.
      positions: int [B or 1, T], consecutive.
      mask: of a call without a cache: it has the window, and which tokens are no padding.
      split: of the cache, [B, G, S, K].
      is_cross: the keys are those of `encoded`, and stay.

    Raises:
      ConfigError: `encoded` is longer than the cache.
    """
    new, window = None if kv is None else by_heads(kv), mask.left_context
    num_places = cache["key"].shape[2]
    if is_cross:
        cache = cache if new is None else keep_encoded(cache, new, mask.kv_visible_BS)
        mask = AttentionMask(kv_visible_BS=cache["encoded_visible"])
    elif window is not None and num_places >= window + SPARE_PLACES:
        in_ring = _few_in_ring if positions.shape[1] <= SPARE_PLACES + 1 else _many_in_ring
        return in_ring(cache, new, positions, mask, split)
    else:
        cache = append(cache, new, positions, split)
        mask = AttentionMask(window, 0, q_index_BT=positions)
    cache = laid_out(cache, split)
    return Attended(cache, by_heads(cache), jnp.arange(num_places, dtype=jnp.int32)[None], mask)


def _few_in_ring(
    cache: Cache, new: Cache, positions: jax.Array, mask: AttentionMask, split: SplitDims
) -> Attended:
    """Returns the result of `attended` for tokens that take the place of none that is seen.

    A token lies in the place of its position modulo the ring's length S. So a place's position is
    the latest up to the newest token's that is equal to it modulo S. Tokens that were taken back
    count as S earlier than they were, which is outside of the window.
    """
    num_places = cache["key"].shape[2]
    kept = cache
    for t in range(positions.shape[1]):
        place_B = positions[:, t] % num_places
        row = {name: x[..., t : t + 1, :] for name, x in new.items()}
        if mask.kv_visible_BS is not None:  # Padding leaves what is there.
            is_true = mask.kv_visible_BS[:, t, None, None, None]
            row = {
                name: jnp.where(is_true, x, _place(kept[name], place_B)) for name, x in row.items()
            }
        kept = {name: written(kept[name], x, place_B, split) for name, x in row.items()}
    kept = laid_out(kept, split)
    newest = positions[:, -1:]
    kv_positions = newest - (newest - jnp.arange(num_places, dtype=jnp.int32)[None]) % num_places
    mask = AttentionMask(
        mask.left_context, 0, q_index_BT=positions, kv_index_BS=kv_positions,
        kv_visible_BS=kv_positions >= 0,
    )
    return Attended(kept, by_heads(kept), kv_positions, mask)


def _place(x: jax.Array, place_B: jax.Array) -> jax.Array:
    """Returns the entries [B, G, 1, K] of x [B, G, S, K] in the places [B or 1]."""
    place_B = jnp.broadcast_to(place_B, x.shape[:1])
    return jax.vmap(lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, 1, axis=-2))(x, place_B)


def _many_in_ring(
    cache: Cache, new: Cache, positions: jax.Array, mask: AttentionMask, split: SplitDims
) -> Attended:
    """Returns the result of `attended` for any number of tokens, padded on the right.

    They attend to the old entries, in the order of their positions, and to each other. The ring
    then has the last S of the row's true tokens.
    """
    (num_rows, _, num_places, _), num_new = cache["key"].shape, positions.shape[1]
    start_B = jnp.broadcast_to(positions[:, 0], (num_rows,))
    if mask.kv_visible_BS is None:
        num_true_B = jnp.full((num_rows,), num_new, jnp.int32)
    else:
        ends_BT = jnp.where(mask.kv_visible_BS, 1 + jnp.arange(num_new, dtype=jnp.int32)[None], 0)
        num_true_B = jnp.broadcast_to(jnp.max(ends_BT, axis=1), (num_rows,))

    def in_order(old: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
        old = jnp.roll(old, -(start % num_places), axis=-2)
        return jnp.concatenate([old, new.astype(old.dtype)], axis=-2)

    def in_places(x: jax.Array, start: jax.Array, num_true: jax.Array) -> jax.Array:
        last = jax.lax.dynamic_slice_in_dim(x, num_true, num_places, axis=-2)
        return jnp.roll(last, (start + num_true) % num_places, axis=-2)

    both = {name: jax.vmap(in_order)(cache[name], x, start_B) for name, x in new.items()}
    kept = {name: jax.vmap(in_places)(x, start_B, num_true_B) for name, x in both.items()}
    index = jnp.arange(num_places + num_new, dtype=jnp.int32)[None, :]
    kv_positions = positions[:, :1] - num_places + index
    mask = AttentionMask(
        mask.left_context, 0, q_index_BT=index[:, num_places:], kv_visible_BS=kv_positions >= 0
    )
    return Attended(laid_out(kept, split), by_heads(both), kv_positions, mask)
