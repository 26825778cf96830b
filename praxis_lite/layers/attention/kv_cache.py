"""The key/value cache for decoding: stores all tokens, or the last tokens in a ring buffer."""

import math
from typing import Any, NamedTuple

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
from praxis_lite.layers.attention.masks import AttentionMask
from praxis_lite.layers.base.base_layer import pad_to

# B batch, T new tokens, S cached tokens, G key/value heads, K dims per head.
Cache = dict[str, jax.Array]

# The ring buffer of a layer with a window is larger than the window by this number of tokens. In
# speculative decoding, this number of a row's latest tokens can therefore be discarded and
# overwritten without losing a token inside the window.
SPARE_PLACES = 16


def empty_cache(
    layer: Any, batch_size: int, max_seq_length: int, dtype: Any, encoded_length: int | None
) -> Cache:
    """Returns an attention layer's empty cache: zeros for keys and values, [B, G, S, K].

    The heads dim precedes time, so that matmuls read the entries of a head in place, without a
    copy. A cache for cross-attention also contains `encoded_visible`, bool [B, S], and S is
    `encoded_length`. A layer with a window stores the last tokens in a ring buffer: S is at most
    window + SPARE_PLACES.

    Args:
      layer: An attention layer.
      batch_size: B.
      max_seq_length: Maximum number of tokens per sequence.
      dtype: Dtype of the activations.
      encoded_length: Maximum length of `encoded`, for cross-attention.

    Raises:
      ConfigError: encoded_length is missing in cross-attention, or attention is bidirectional, so
        that later tokens would change the outputs of earlier tokens.
    """
    name, is_cross = type(layer).__name__, layer.is_cross_attention
    if is_cross and encoded_length is None:
        raise ConfigError(
            f"{name}.init_cache requires encoded_length in cross-attention. Pass the length of the "
            "longest `encoded` that will be stored."
        )
    if not layer.is_causal and not is_cross:
        raise ConfigError(
            f"{name} with is_causal=False does not support a cache, because later tokens change "
            "the outputs of earlier tokens. Process the complete sequence, or set is_causal=True."
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
    """Returns the cache's dtype for activations in `dtype`: at least float32 on CPU.

    XLA's CPU backend cannot update arrays of 16-bit floats in place: for each token, it would
    convert the array to float32 and back. `round_to_cache` still rounds values to the precision of
    `dtype`.
    """
    return jnp.promote_types(dtype, jnp.float32 if compiled_platform() == "cpu" else dtype)


def round_to_cache(new: Cache, dtype: Any) -> Cache:
    """Rounds new cache entries to the activations' dtype, and casts them to the cache's dtype.

    Uses `reduce_precision`, because XLA sometimes removes pairs of casts.
    """
    if stored_dtype(dtype) == dtype:
        return new
    info = jnp.finfo(dtype)
    return {
        name: jax.lax.reduce_precision(x.astype(stored_dtype(dtype)), info.nexp, info.nmant)
        for name, x in new.items()
    }


def by_heads(kv: Cache) -> Cache:
    """Converts keys and values [B, S, G, K] to the cache's layout [B, G, S, K], and vice versa."""
    return {name: jnp.swapaxes(x, 1, 2) if x.ndim == 4 else x for name, x in kv.items()}


def constrain_cache(cache: Cache, split: SplitDims) -> Cache:
    """Constrains a cache's sharding; `split` applies to keys and values [B, ..., S, K]."""
    if split is None:
        return cache
    splits = {"encoded_visible": (split[0], split[-2])}
    return {name: constrain(x, splits.get(name, split)) for name, x in cache.items()}


def append(cache: Cache, new: Cache, positions: jax.Array, split: SplitDims = None) -> Cache:
    """Writes T new entries [B, ..., T, K] to the cache, starting at each row's first position.

    Args:
      cache: The cache.
      new: New entries, keyed by name.
      positions: Int [B or 1, T], consecutive.
      split: Sharding of the cache, or None if unknown.
    """
    return {name: write_entries(cache[name], x, positions[:, 0], split) for name, x in new.items()}


def write_entries(
    old: jax.Array, new: jax.Array, start_B: jax.Array, split: SplitDims = None
) -> jax.Array:
    """Returns `old` [B, ..., S, K] with `new` [B, ..., T, K] written at each row's `start_B`.

    Args:
      old: Cached entries.
      new: New entries.
      start_B: Index of the first new entry in each row, [B or 1].
      split: Sharding of `old`, or None if unknown.
    """
    new = new.astype(old.dtype)
    # All rows are at the same position.
    if start_B.shape[0] == 1:
        return jax.lax.dynamic_update_slice_in_dim(old, new, start_B[0], axis=old.ndim - 2)
    if new.shape[-2] == 1 and compiled_platform() == "tpu":
        return _scatter_entries(old, new[..., 0, :], start_B, split)
    write = jax.vmap(
        lambda old, new, start: jax.lax.dynamic_update_slice_in_dim(
            old, new, start, axis=old.ndim - 2
        )
    )
    return write(old, new, start_B)


def _scatter_entries(
    old: jax.Array, new: jax.Array, place_B: jax.Array, split: SplitDims
) -> jax.Array:
    """Returns `old` [B, ..., S, K] with an entry `new` [B, ..., K] written at each row's index.

    On TPU, slice updates at different indices compile to a loop over the batch, which makes
    decoding 32 sequences 3.5 times slower. A scatter works in place, but preserves the array's
    memory layout only if it writes rows of a matrix. Therefore each device reshapes its shard to a
    matrix.
    """

    def scatter(old: jax.Array, new: jax.Array, place_B: jax.Array) -> jax.Array:
        *rows, length, dims = old.shape
        num_rows = math.prod(rows)
        place = place_B.reshape(-1, *[1] * (len(rows) - 1))
        # An index beyond a row's end must not write to the next row: move it beyond the last row,
        # so that it is dropped.
        place = jnp.where(place < length, place, num_rows * length)
        index = jnp.arange(num_rows).reshape(rows) * length + place
        # Put heads first, as in the outputs of the preceding matmuls; other orders add a copy.
        index, new = jnp.moveaxis(index, 0, -1).reshape(-1), jnp.moveaxis(new, 0, -2)
        flat = (
            old.reshape(-1, dims)
            .at[index]
            .set(new.reshape(-1, dims), mode="drop", unique_indices=True)
        )
        return flat.reshape(old.shape)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or set(mesh.manual_axes) == set(mesh.axis_names):
        return scatter(old, new, place_B)
    spec = to_partition_spec(split or (), mesh.axis_names, rank=old.ndim)
    parts = [num_shards_of(axes) for axes in spec]
    divides = all(size % num == 0 for size, num in zip(old.shape, parts, strict=True))
    if split is None or mesh.manual_axes or not divides or parts[-2] > 1:
        put = jax.vmap(lambda old, new, place: old.at[..., place, :].set(new, mode="drop"))
        return put(old, new, place_B)
    specs = spec, PartitionSpec(*spec[:-2], spec[-1]), PartitionSpec(spec[0])
    return jax.shard_map(scatter, in_specs=specs, out_specs=spec)(old, new, place_B)


def keep_encoded(cache: Cache, new: Cache, visible_BS: jax.Array | None) -> Cache:
    """Writes the keys and values [B, G, S, K] of `encoded` to the beginning of the cache.

    Raises:
      ConfigError: `encoded` is longer than the cache.
    """
    length, room = new["key"].shape[2], cache["key"].shape[2]
    if length > room:
        raise ConfigError(
            f"encoded has length {length}, but the cache has room for {room} positions. Call "
            f"init_cache with an encoded_length of at least {length}."
        )
    if visible_BS is None:
        visible_BS = jnp.ones((new["key"].shape[0], length), bool)
    updated = {
        name: jax.lax.dynamic_update_slice(
            cache[name], new[name].astype(cache[name].dtype), (0, 0, 0, 0)
        )
        for name in ("key", "value")
    }
    return updated | {"encoded_visible": pad_to(visible_BS, room, 1)}


class CacheUpdate(NamedTuple):
    """An updated cache, and the keys that the new tokens attend to.

    Attributes:
      cache: The cache with the new tokens.
      kv: Keys and values, [B, S, G, K].
      positions: Positions of the keys, int [B or 1, S]; negative for missing keys.
      mask: Mask of the new tokens and these keys.
    """

    cache: Cache
    kv: Cache
    positions: jax.Array
    mask: AttentionMask


def update_cache(
    cache: Cache,
    kv: Cache | None,
    positions: jax.Array,
    mask: AttentionMask,
    split: SplitDims,
    *,
    is_cross: bool,
) -> CacheUpdate:
    """Writes T new tokens to a cache or, in cross-attention, `encoded` if it is passed.

    Args:
      cache: The cache.
      kv: New keys and values, [B, T or S, G, K]; None if `encoded` is already in the cache.
      positions: Int [B or 1, T], consecutive.
      mask: The mask for a call without a cache; only its window and padding are used.
      split: Sharding of the cache, [B, G, S, K].
      is_cross: Whether the keys belong to `encoded`.

    Raises:
      ConfigError: `encoded` is longer than the cache.
    """
    new, window = None if kv is None else by_heads(kv), mask.left_context
    length = cache["key"].shape[2]
    # Cross-attention attends to all of `encoded`, regardless of positions.
    if is_cross:
        cache = cache if new is None else keep_encoded(cache, new, mask.kv_visible_BS)
        mask = AttentionMask(kv_visible_BS=cache["encoded_visible"])
        cache = constrain_cache(cache, split)
        return CacheUpdate(cache, by_heads(cache), jnp.arange(length, dtype=jnp.int32)[None], mask)
    assert new is not None, "Only cross-attention can be called without new keys."
    # A cache that is too short for a ring buffer stores all tokens.
    if window is not None and length >= window + SPARE_PLACES:
        is_short = positions.shape[1] <= SPARE_PLACES + 1
        update = _update_ring if is_short else _update_ring_by_block
        return update(cache, new, positions, mask, split)
    cache = append(cache, new, positions, split)
    mask = AttentionMask(window, 0, q_index_BT=positions)
    cache = constrain_cache(cache, split)
    return CacheUpdate(cache, by_heads(cache), jnp.arange(length, dtype=jnp.int32)[None], mask)


def _update_ring(
    cache: Cache, new: Cache, positions: jax.Array, mask: AttentionMask, split: SplitDims
) -> CacheUpdate:
    """Implements `update_cache` for so few tokens that they overwrite no token inside the window.

    A token is stored at its position modulo the ring's length S. Positions are not stored: an
    entry's position is the latest position, up to that of the newest token, that equals the entry's
    index modulo S. For a discarded token, this position is S too early, and therefore outside the
    window.
    """
    length = cache["key"].shape[2]
    updated = cache
    # At most SPARE_PLACES + 1 tokens, each of which may be at a different position in each row.
    for t in range(positions.shape[1]):
        index_B = positions[:, t] % length
        row = {name: x[..., t : t + 1, :] for name, x in new.items()}
        if mask.kv_visible_BS is not None:  # Padding does not overwrite entries.
            is_real = mask.kv_visible_BS[:, t, None, None, None]
            row = {
                name: jnp.where(is_real, x, _entry_at(updated[name], index_B))
                for name, x in row.items()
            }
        updated = {name: write_entries(updated[name], x, index_B, split) for name, x in row.items()}
    updated = constrain_cache(updated, split)
    newest = positions[:, -1:]
    kv_positions = newest - (newest - jnp.arange(length, dtype=jnp.int32)[None]) % length
    mask = AttentionMask(
        mask.left_context,
        0,
        q_index_BT=positions,
        kv_index_BS=kv_positions,
        kv_visible_BS=kv_positions >= 0,
    )
    return CacheUpdate(updated, by_heads(updated), kv_positions, mask)


def _entry_at(x: jax.Array, index_B: jax.Array) -> jax.Array:
    """Returns the entries [B, G, 1, K] of x [B, G, S, K] at indices [B or 1]."""
    index_B = jnp.broadcast_to(index_B, x.shape[:1])
    return jax.vmap(lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, 1, axis=-2))(x, index_B)


def _update_ring_by_block(
    cache: Cache, new: Cache, positions: jax.Array, mask: AttentionMask, split: SplitDims
) -> CacheUpdate:
    """Implements `update_cache` for any number of tokens, padded on the right.

    The new tokens attend to the old entries, which are put in the order of their positions, and to
    each other. Afterwards the ring contains the last S tokens of each row that are not padding.
    """
    (num_rows, _, length, _), num_new = cache["key"].shape, positions.shape[1]
    start_B = jnp.broadcast_to(positions[:, 0], (num_rows,))
    # The number of new tokens per row without the padding on the right.
    if mask.kv_visible_BS is None:
        num_real_B = jnp.full((num_rows,), num_new, jnp.int32)
    else:
        ends_BT = jnp.where(mask.kv_visible_BS, 1 + jnp.arange(num_new, dtype=jnp.int32)[None], 0)
        num_real_B = jnp.broadcast_to(jnp.max(ends_BT, axis=1), (num_rows,))

    def unroll_ring(old: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
        # Position p is in slot p % S, so the oldest entry is in the slot of the first new token.
        # The roll moves it to index 0.
        old = jnp.roll(old, -(start % length), axis=-2)
        return jnp.concatenate([old, new.astype(old.dtype)], axis=-2)

    def to_ring(x: jax.Array, start: jax.Array, num_real: jax.Array) -> jax.Array:
        last = jax.lax.dynamic_slice_in_dim(x, num_real, length, axis=-2)
        return jnp.roll(last, (start + num_real) % length, axis=-2)

    both = {name: jax.vmap(unroll_ring)(cache[name], x, start_B) for name, x in new.items()}
    updated = {name: jax.vmap(to_ring)(x, start_B, num_real_B) for name, x in both.items()}
    # The mask compares indices in the unrolled array, where a row's tokens are in order. Entries
    # with negative positions have not been written yet.
    index = jnp.arange(length + num_new, dtype=jnp.int32)[None, :]
    kv_positions = positions[:, :1] - length + index
    mask = AttentionMask(
        mask.left_context, 0, q_index_BT=index[:, length:], kv_visible_BS=kv_positions >= 0
    )
    return CacheUpdate(constrain_cache(updated, split), by_heads(both), kv_positions, mask)
