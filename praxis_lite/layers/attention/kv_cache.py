"""The cache of keys and values in decoding: all tokens, or a ring of the last ones."""

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

# B batch, T new tokens, S places, G heads of keys and values, K dims per head.
Cache = dict[str, jax.Array]

# The cache of a layer with a window has this many places beyond it: that many of a row's newest
# tokens may be taken back, and others written in their places, before a token that is seen is lost.
SPARE_PLACES = 16


def empty_cache(
    layer: Any, batch_size: int, max_seq_length: int, dtype: Any, encoded_length: int | None
) -> Cache:
    """Returns the empty cache of an attention layer: keys and values of zeros, [B, G, S, K].

    Heads come before time, so that each token's products read a head's rows in place, without a
    copy. A cross-attention cache also has `encoded_visible`, bool [B, S], and S is
    `encoded_length`. A layer with a window stores a ring of the last tokens: S is at most window +
    SPARE_PLACES.

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

    XLA's CPU backend cannot write into an array of 16-bit floats: for each token it converts the
    array to float32 and back. `stored` still rounds the values to the precision of `dtype`.
    """
    return jnp.promote_types(dtype, jnp.float32 if compiled_platform() == "cpu" else dtype)


def stored(new: Cache, dtype: Any) -> Cache:
    """Returns new cache entries in the cache's dtype, rounded to that of the activations.

    `reduce_precision` rounds them, because XLA removes pairs of casts in some programs.
    """
    if stored_dtype(dtype) == dtype:
        return new
    info = jnp.finfo(dtype)
    return {
        name: jax.lax.reduce_precision(x.astype(stored_dtype(dtype)), info.nexp, info.nmant)
        for name, x in new.items()
    }


def by_heads(kv: Cache) -> Cache:
    """Swaps [B, S, G, K], the layout of keys and values, and [B, G, S, K], that of the cache."""
    return {name: jnp.swapaxes(x, 1, 2) if x.ndim == 4 else x for name, x in kv.items()}


def laid_out(cache: Cache, split: SplitDims) -> Cache:
    """Constrains the sharding of a cache; `split` is of keys and values, [B, ..., S, K]."""
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
      split: how `old` splits over the devices; None: unknown.
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

    On TPU slices at different places become a loop over the rows, which makes a token of 32 rows
    3.5 times slower. A scatter is in place, but only into the rows of a matrix does it keep the
    array's layout. So each device scatters into its part, reshaped to a matrix.
    """

    def of_part(old: jax.Array, new: jax.Array, place_B: jax.Array) -> jax.Array:
        *rows, num_places, dims = old.shape
        num_rows = math.prod(rows)
        place = place_B.reshape(-1, *[1] * (len(rows) - 1))
        # A place past the end is past that of all rows, and is dropped.
        place = jnp.where(place < num_places, place, num_rows * num_places)
        index = jnp.arange(num_rows).reshape(rows) * num_places + place
        # Heads first, the order in which the products before leave them: other orders add a copy.
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
    return kept | {"encoded_visible": pad_to(visible_BS, room, 1)}


class CacheUpdate(NamedTuple):
    """A cache with new tokens in it, and the keys to which these attend."""

    cache: Cache
    kv: Cache  # [B, S, G, K].
    positions: jax.Array  # int [B or 1, S], of the keys; negative where there is none.
    mask: AttentionMask


def update_cache(
    cache: Cache, kv: Cache | None, positions: jax.Array, mask: AttentionMask,
    split: SplitDims, *, is_cross: bool,
) -> CacheUpdate:
    """Appends T new tokens to a cache, or `encoded` in cross-attention, if it is given.

    Args:
      kv: new keys and values, [B, T or S, G, K]; None: `encoded` is in the cache already.
      positions: int [B or 1, T], consecutive.
      mask: of a call without a cache; has the window and the padding.
      split: of the cache, [B, G, S, K].
      is_cross: whether the keys belong to `encoded`.

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
    return CacheUpdate(cache, by_heads(cache), jnp.arange(num_places, dtype=jnp.int32)[None], mask)


def _few_in_ring(
    cache: Cache, new: Cache, positions: jax.Array, mask: AttentionMask, split: SplitDims
) -> CacheUpdate:
    """Returns the result of `update_cache` for few tokens, which overwrite no visible ones.

    A token is stored at its position modulo the ring's length S. So the position of an entry is the
    latest one, up to the newest token's, that is equal to its index modulo S. Tokens that were
    taken back count as S positions earlier, which is outside of the window.
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
    return CacheUpdate(kept, by_heads(kept), kv_positions, mask)


def _place(x: jax.Array, place_B: jax.Array) -> jax.Array:
    """Returns the entries [B, G, 1, K] of x [B, G, S, K] in the places [B or 1]."""
    place_B = jnp.broadcast_to(place_B, x.shape[:1])
    return jax.vmap(lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, 1, axis=-2))(x, place_B)


def _many_in_ring(
    cache: Cache, new: Cache, positions: jax.Array, mask: AttentionMask, split: SplitDims
) -> CacheUpdate:
    """Returns the result of `update_cache` for any number of tokens, padded on the right.

    They attend to the old entries, in the order of their positions, and to each other. The ring
    then contains the last S real tokens of the row.
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
    return CacheUpdate(laid_out(kept, split), by_heads(both), kv_positions, mask)
