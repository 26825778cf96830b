"""Attention masks: a structured mask, which all kernels accept, and Pax's additive masks."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

# B batch, T queries, S keys.

# The logit of a masked key, as in Pax. It is finite, so that a fully masked query outputs the mean
# of all values instead of NaN.
LARGE_NEGATIVE = -0.7 * float(jnp.finfo("float32").max)
# Advice for error messages about a mask that is passed to a causal layer.
HIDE_LATER = (
    "if later tokens must be hidden, pass jnp.minimum(atten_mask, causal_mask(T)), with "
    "causal_mask from praxis_lite.layers.attention.masks"
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """A structured attention mask: query t attends to key s if all fields that are set allow it.

    Attributes:
      left_context: Requires t - s < left_context: a query attends to its own index and the
        `left_context - 1` preceding indices.
      right_context: Requires s - t <= right_context. If 0, the mask is causal.
      q_index_BT: Indices of the queries among the keys, int [B or 1, T]. If None, 0 to T - 1.
      q_segments_BT: Segments of the queries, int. A query attends only to keys in its segment.
      kv_segments_BS: Segments of the keys, int.
      kv_visible_BS: Bool [B, S]. False masks a key for all queries.
      kv_index_BS: Indices of the keys, int [B or 1, S]. If None, 0 to S - 1. Only the chunked and
        einsum kernels support it.
      is_to_itself: Whether queries and keys belong to the same tokens in the same order. Each query
        that is not padding then attends at least to its own key.
    """

    left_context: int | None = dataclasses.field(default=None, metadata={"static": True})
    right_context: int | None = dataclasses.field(default=None, metadata={"static": True})
    q_index_BT: jax.Array | None = None
    q_segments_BT: jax.Array | None = None
    kv_segments_BS: jax.Array | None = None
    kv_visible_BS: jax.Array | None = None
    kv_index_BS: jax.Array | None = None
    is_to_itself: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def may_hide_all(self) -> bool:
        """Whether segments, padding or indices may mask all keys for a query."""
        if self.is_to_itself:
            return self.kv_visible_BS is not None
        arrays = (self.q_segments_BT, self.kv_visible_BS, self.q_index_BT, self.kv_index_BS)
        return any(x is not None for x in arrays)

    def visible(self, num_queries: int, num_keys: int) -> jax.Array | None:
        """Returns the mask, bool [B or 1, T, S], or None if every query attends to every key."""
        index_BS = self.kv_index_BS
        if index_BS is None:
            index_BS = jnp.arange(num_keys, dtype=jnp.int32)[None, :]
        return self.visible_at(self.q_index(num_queries), index_BS)

    def q_index(self, num_queries: int) -> jax.Array:
        """Returns the indices of the queries among the keys, int [B or 1, T]."""
        if self.q_index_BT is None:
            return jnp.arange(num_queries, dtype=jnp.int32)[None, :]
        return self.q_index_BT

    def visible_at(self, q_index_BT: jax.Array, kv_index_BS: jax.Array) -> jax.Array | None:
        """Returns the mask for a block: the queries and keys at these indices."""
        distance_BTS = q_index_BT[:, :, None] - kv_index_BS[:, None, :]
        conditions = []
        if self.left_context is not None:
            conditions.append(distance_BTS < self.left_context)
        if self.right_context is not None:
            conditions.append(distance_BTS >= -self.right_context)
        if self.q_segments_BT is not None:
            assert self.kv_segments_BS is not None
            conditions.append(self.q_segments_BT[:, :, None] == self.kv_segments_BS[:, None, :])
        if self.kv_visible_BS is not None:
            conditions.append(self.kv_visible_BS[:, None, :])
        if not conditions:
            return None
        return functools.reduce(jnp.logical_and, jnp.broadcast_arrays(*conditions))

    def mapped(
        self,
        of_queries: Callable[[jax.Array], jax.Array],
        of_keys: Callable[[jax.Array], jax.Array],
    ) -> "AttentionMask":
        """Applies functions to all arrays of queries, [..., T], and of keys, [..., S]."""
        # `jax.tree.map` returns None for None.
        return dataclasses.replace(
            self,
            q_index_BT=jax.tree.map(of_queries, self.q_index_BT),
            q_segments_BT=jax.tree.map(of_queries, self.q_segments_BT),
            kv_segments_BS=jax.tree.map(of_keys, self.kv_segments_BS),
            kv_visible_BS=jax.tree.map(of_keys, self.kv_visible_BS),
            kv_index_BS=jax.tree.map(of_keys, self.kv_index_BS),
        )

    def segments(
        self, num_rows: int, num_queries: int, num_keys: int
    ) -> tuple[jax.Array, jax.Array]:
        """Returns int32 segments of queries [B, T] and of keys [B, S]; -1 for masked keys."""
        q_segments_BT, kv_segments_BS = self.q_segments_BT, self.kv_segments_BS
        if q_segments_BT is None:
            q_segments_BT = jnp.zeros((num_rows, num_queries), jnp.int32)
            kv_segments_BS = jnp.zeros((num_rows, num_keys), jnp.int32)
        assert kv_segments_BS is not None, "Queries and keys both have segments, or neither."
        if self.kv_visible_BS is not None:
            kv_segments_BS = jnp.where(self.kv_visible_BS, kv_segments_BS, -1)
        return q_segments_BT.astype(jnp.int32), kv_segments_BS.astype(jnp.int32)

    def zero_fully_masked(self, attended_BTNK: jax.Array, num_keys: int) -> jax.Array:
        """Replaces the outputs of fully masked queries with zeros.

        For such queries, kernels return the mean of all values, including those in other segments.
        As in Pax, queries in segment 0 (padding) keep this mean.
        """
        visible_BTS = self.visible(attended_BTNK.shape[1], num_keys)
        if visible_BTS is None:
            return attended_BTNK
        keeps_BT = jnp.any(visible_BTS, axis=-1)
        if self.q_segments_BT is not None:
            keeps_BT |= self.q_segments_BT == 0
        return jnp.where(keeps_BT[:, :, None, None], attended_BTNK, 0)


def cross_attention_mask(
    segment_ids: jax.Array | None,
    encoded_paddings: jax.Array | None,
    encoded_segment_ids: jax.Array | None,
) -> AttentionMask:
    """Returns a mask that restricts each query to the keys of `encoded` in its segment.

    Args:
      segment_ids: Segments of the queries, int [B, T]. If None, queries attend to all segments
        except 0.
      encoded_paddings: [B, S]; 1.0 for padding, which is masked.
      encoded_segment_ids: Segments of the keys, int [B, S].
    """
    visible_BS = not_padding(encoded_paddings)
    if encoded_segment_ids is not None and segment_ids is None:
        is_token_BS = encoded_segment_ids != 0
        visible_BS = is_token_BS if visible_BS is None else visible_BS & is_token_BS
        encoded_segment_ids = None
    return AttentionMask(
        q_segments_BT=None if encoded_segment_ids is None else segment_ids,
        kv_segments_BS=encoded_segment_ids,
        kv_visible_BS=visible_BS,
    )


def not_padding(paddings: jax.Array | None) -> jax.Array | None:
    """Converts paddings to bools that are False for padding; returns None for None."""
    return None if paddings is None else paddings < 0.5


def mask_of_keys(atten_mask: jax.Array | None, index_BS: jax.Array) -> jax.Array | None:
    """Selects the columns of an atten_mask for the cached keys; returns None for None.

    Args:
      atten_mask: [B or 1, 1 or N, 1 or T, number of positions], or None.
      index_BS: Positions of the keys, int [B or 1, S]; negative for missing keys.
    """
    if atten_mask is None:
        return None
    return jnp.take_along_axis(atten_mask, jnp.maximum(index_BS, 0)[:, None, None], axis=3)


def _additive(hidden: jax.Array) -> jax.Array:
    return jnp.where(hidden, jnp.float32(LARGE_NEGATIVE), jnp.float32(0.0))


def causal_mask(length: int) -> jax.Array:
    """Returns an additive causal mask, float [1, 1, T, T]: large negative above the diagonal."""
    index_T = jnp.arange(length)
    return _additive(index_T[:, None] < index_T[None, :])[None, None]


def segment_mask(segment_ids: jax.Array) -> jax.Array:
    """Returns an additive segment mask, float [B, 1, T, T]: large negative across segments."""
    return _additive(segment_ids[:, :, None] != segment_ids[:, None, :])[:, None]


def convert_paddings_to_mask(paddings: jax.Array) -> jax.Array:
    """Converts paddings [B, S], 1.0 for padding, to an additive mask, float [B, 1, 1, S]."""
    return _additive(paddings > 0.5)[:, None, None, :]
