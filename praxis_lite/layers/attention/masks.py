"""Which keys a query sees: a description that every kernel reads, and Pax's additive masks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

# B batch, T queries, S keys.

# The logit of a hidden key. It is Pax's, and finite, so that a query without visible keys gets the
# mean of all values and not NaN.
LARGE_NEGATIVE = -0.7 * float(jnp.finfo("float32").max)
# The advice of errors where a caller's mask meets a causal layer.
HIDE_LATER = (
    "let the mask hide later tokens if they are to be hidden (jnp.minimum(atten_mask, "
    "causal_mask(T)) of praxis_lite.layers.attention.masks)"
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """A query at index t sees the key at index s where all of the set fields allow it.

    Attributes:
      left_context: t - s < left_context: its own index and the `left_context - 1` before it.
      right_context: s - t <= right_context; 0: causal.
      q_index_BT: int [B or 1, T], the queries' indices among the keys; None: 0 to T - 1.
      q_segments_BT, kv_segments_BS: int; equal ones see each other.
      kv_visible_BS: bool [B, S]; False hides a key from every query.
      kv_index_BS: int [B or 1, S], the keys' indices; None: 0 to S - 1.
        Supported by the chunked kernel, dot_product and the einsum.
      is_to_itself: whether queries and keys belong to the same tokens in the same order. Each query
        that is not padding then sees at least its own key.
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
        """Whether segments, padding or indices may hide all keys from a query."""
        if self.is_to_itself:
            return self.kv_visible_BS is not None
        arrays = (self.q_segments_BT, self.kv_visible_BS, self.q_index_BT, self.kv_index_BS)
        return any(x is not None for x in arrays)

    def visible(self, num_queries: int, num_keys: int) -> jax.Array | None:
        """Returns bool [B or 1, T, S], or None if every query sees every key."""
        index_BS = self.kv_index_BS
        if index_BS is None:
            index_BS = jnp.arange(num_keys, dtype=jnp.int32)[None, :]
        return self.visible_at(self.q_index(num_queries), index_BS)

    def q_index(self, num_queries: int) -> jax.Array:
        """Returns int [B or 1, T], the queries' indices among the keys."""
        if self.q_index_BT is None:
            return jnp.arange(num_queries, dtype=jnp.int32)[None, :]
        return self.q_index_BT

    def visible_at(self, q_index_BT: jax.Array, kv_index_BS: jax.Array) -> jax.Array | None:
        """Returns `visible` of a mask whose arrays are of the queries and keys of these indices."""
        distance_BTS = q_index_BT[:, :, None] - kv_index_BS[:, None, :]
        conditions = []
        if self.left_context is not None:
            conditions.append(distance_BTS < self.left_context)
        if self.right_context is not None:
            conditions.append(distance_BTS >= -self.right_context)
        if self.q_segments_BT is not None:
            conditions.append(self.q_segments_BT[:, :, None] == self.kv_segments_BS[:, None, :])
        if self.kv_visible_BS is not None:
            conditions.append(self.kv_visible_BS[:, None, :])
        if not conditions:
            return None
        return functools.reduce(jnp.logical_and, jnp.broadcast_arrays(*conditions))

    def zeros_where_none_is_seen(self, attended_BTNK: jax.Array, num_keys: int) -> jax.Array:
        """Returns the queries' outputs, or zeros for queries that see no key.

        A kernel gives them the mean of all values, also of other segments. Queries of segment 0,
        which is padding, keep that mean, as in Pax.
        """
        visible_BTS = self.visible(attended_BTNK.shape[1], num_keys)
        if visible_BTS is None:
            return attended_BTNK
        keeps_BT = jnp.any(visible_BTS, axis=-1)
        if self.q_segments_BT is not None:
            keeps_BT |= self.q_segments_BT == 0
        return jnp.where(keeps_BT[:, :, None, None], attended_BTNK, 0)


def cross_attention_mask(
    segment_ids: jax.Array | None, encoded_paddings: jax.Array | None,
    encoded_segment_ids: jax.Array | None,
) -> AttentionMask:
    """Returns the mask by which queries see the keys of `encoded` in their segment, except padding.

    Args:
      segment_ids: int [B, T] of the queries; None: they see the keys of every segment but 0.
      encoded_paddings: [B, S], 1.0 is padding.
      encoded_segment_ids: int [B, S].
    """
    visible_BS = not_padding(encoded_paddings)
    if encoded_segment_ids is not None and segment_ids is None:
        there_BS = encoded_segment_ids != 0
        visible_BS = there_BS if visible_BS is None else visible_BS & there_BS
        encoded_segment_ids = None
    return AttentionMask(
        q_segments_BT=None if encoded_segment_ids is None else segment_ids,
        kv_segments_BS=encoded_segment_ids, kv_visible_BS=visible_BS,
    )


def not_padding(paddings: jax.Array | None) -> jax.Array | None:
    """Returns bool, False where paddings are 1.0; None if there are none."""
    return None if paddings is None else paddings < 0.5


def mask_of_keys(atten_mask: jax.Array | None, index_BS: jax.Array) -> jax.Array | None:
    """Returns the part of a caller's mask [B or 1, 1 or N, 1 or T, keys] that is of these keys.

    Args:
      index_BS: int [B or 1, S], of the keys; a negative one stands for no key.
    """
    if atten_mask is None:
        return None
    return jnp.take_along_axis(atten_mask, jnp.maximum(index_BS, 0)[:, None, None], axis=3)


def _additive(hidden: jax.Array) -> jax.Array:
    return jnp.where(hidden, jnp.float32(LARGE_NEGATIVE), jnp.float32(0.0))


def causal_mask(length: int) -> jax.Array:
    """Returns float [1, 1, T, T] to add to logits: a large negative number above the diagonal."""
    index_T = jnp.arange(length)
    return _additive(index_T[:, None] < index_T[None, :])[None, None]


def segment_mask(segment_ids: jax.Array) -> jax.Array:
    """Returns float [B, 1, T, T] to add to logits: large negative between different segments."""
    return _additive(segment_ids[:, :, None] != segment_ids[:, None, :])[:, None]


def convert_paddings_to_mask(paddings: jax.Array) -> jax.Array:
    """Returns float [B, 1, 1, S] of paddings [B, S] (1.0 is padding): no token sees padding."""
    return _additive(paddings > 0.5)[:, None, None, :]
