"""Ring attention: keys and values circulate, and each group attends to one group's keys at a time.

See Liu et al. 2023, arXiv:2310.01889. The functions are called inside `jax.shard_map`, and have a
custom gradient.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from praxis_lite.layers.attention.kernels.chunks import (
    Chunks,
    OutputGradients,
    attend_in_chunks,
    gradients_in_chunks,
    inner_products,
    to_output_layout,
)
from praxis_lite.layers.attention.kernels.einsum import LogitOptions
from praxis_lite.layers.attention.kernels.ring_groups import Ring
from praxis_lite.layers.attention.masks import AttentionMask
from praxis_lite.layers.base.activation_names import name_residuals

# B batch, T queries, S keys, G key/value heads, R query heads per key/value head, K dims per head.


class RingStep(NamedTuple):
    """A step in which each group attends to the keys of the group `offset` positions earlier.

    Attributes:
      mask: Mask for the complete sequence.
      ring: The ring.
      offset: Distance to the group that owns the keys; 0 for this group.
    """

    mask: AttentionMask
    ring: Ring
    offset: int | jax.Array

    def key_group(self) -> jax.Array:
        """Returns the index of the group that owns the keys."""
        return (self.ring.group_index() - self.offset) % self.ring.num_groups


class BlockAttention(Protocol):
    """Attention from this group's queries to one group's keys; all arrays belong to one group."""

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, step: RingStep
    ) -> tuple[jax.Array, jax.Array]:
        """Returns outputs [B, T, G, R, K] and logsumexp [B, G, R, T], both float32."""
        ...

    def gradients(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        step: RingStep,
        d_outputs: OutputGradients,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns float32 gradients of q, k and v, like `gradients_in_chunks`."""
        ...


def _num_steps(ring: Ring, mask: AttentionMask, num_keys: int) -> int:
    """Returns the number of groups whose keys a group's queries may attend to, including itself."""
    if mask.right_context != 0 or mask.left_context is None:
        return ring.num_groups
    return min(ring.num_groups, 1 + -(-(mask.left_context - 1) // num_keys))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def ring_attention(q, k, v, mask, ring, block_attention, residual_name):
    """Returns attention outputs for this group's queries [B, T, G, R, K] and their logsumexp.

    Like `attention_with_log_sums`, but with the keys from all groups. In step i, a group attends to
    the keys of the group i positions earlier in the ring, and merges the result by its logsumexp.
    The backward pass sends keys and values around the ring again, together with their gradients.
    Only this group's arrays are saved as residuals.
    """
    num_steps = _num_steps(ring, mask, k.shape[1])

    def attend(offset: Any, kv: Any) -> tuple[jax.Array, jax.Array]:
        return block_attention.attend(q, *kv, RingStep(mask, ring, offset))

    def ring_step(offset: Any, carry: Any) -> Any:
        kv, result = carry
        next_kv = ring.shift(kv, 1)  # Overlaps with the attention.
        return next_kv, merge_by_logsumexp(result, attend(offset, kv))

    # The loop excludes the first step, which uses this group's keys, and the last step, which sends
    # nothing.
    next_kv = ring.shift((k, v), 1) if num_steps > 1 else (k, v)
    result = attend(0, (k, v))
    if num_steps > 1:
        next_kv, result = jax.lax.fori_loop(1, num_steps - 1, ring_step, (next_kv, result))
        result = merge_by_logsumexp(result, attend(num_steps - 1, next_kv))
    return name_residuals((result[0].astype(q.dtype), result[1]), residual_name)


def merge_by_logsumexp(*parts: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Merges partial attention outputs by their logsumexp."""
    log_sums = functools.reduce(jnp.logaddexp, (log_sum for _, log_sum in parts))
    encoded = sum(to_output_layout(jnp.exp(log_sum - log_sums)) * x for x, log_sum in parts)
    assert not isinstance(encoded, int), "There is at least one part."
    return encoded, log_sums


def _forward(q, k, v, mask, ring, block_attention, residual_name):
    encoded, log_sums = ring_attention(q, k, v, mask, ring, block_attention, None)
    encoded, log_sums = name_residuals((encoded, log_sums), residual_name)
    return (encoded, log_sums), (q, k, v, mask, encoded, log_sums)


def _backward(ring, block_attention, residual_name, residuals, grads):
    q, k, v, mask, encoded, log_sums = residuals
    d_encoded, d_log_sums = grads
    inner = inner_products(d_encoded, encoded) - d_log_sums
    d_outputs = OutputGradients(d_encoded, log_sums, inner)
    num_steps = _num_steps(ring, mask, k.shape[1])

    def gradients(offset: Any, kv: Any) -> tuple[jax.Array, tuple]:
        step = RingStep(mask, ring, offset)
        dq, *d_kv = block_attention.gradients(q, *kv, step, d_outputs)
        return dq, tuple(d_kv)

    # The gradients of keys and values travel with them, and each group adds its part.
    def add_step(offset: Any, kv: Any, dq: jax.Array, d_kv: Any) -> tuple[jax.Array, Any]:
        arrived = ring.shift(d_kv, 1)
        dq_part, d_local = gradients(offset, kv)
        return dq + dq_part, jax.tree.map(jnp.add, arrived, d_local)

    def ring_step(offset: Any, carry: Any) -> Any:
        kv, dq, d_kv = carry
        return ring.shift(kv, 1), *add_step(offset, kv, dq, d_kv)

    next_kv = ring.shift((k, v), 1) if num_steps > 1 else (k, v)
    dq, d_kv = gradients(0, (k, v))
    if num_steps > 1:
        carry = jax.lax.fori_loop(1, num_steps - 1, ring_step, (next_kv, dq, d_kv))
        next_kv, dq, d_kv = carry
        dq, d_kv = add_step(num_steps - 1, next_kv, dq, d_kv)
        d_kv = ring.shift(d_kv, 1 - num_steps)  # Return to the group that owns the keys.
    dk, dv = d_kv
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


ring_attention.defvjp(_forward, _backward)


class ChunkedBlocks(NamedTuple):
    """A BlockAttention that works in chunks of `chunk_size` and supports any mask."""

    options: LogitOptions
    chunk_size: int

    def attend(self, q, k, v, step):
        pieces = self._pieces(step, q, k, v)
        return merge_by_logsumexp(*(attend_in_chunks(piece, jnp.float32) for piece in pieces))

    def gradients(self, q, k, v, step, d_outputs):
        pieces = self._pieces(step, q, k, v)
        grads = (gradients_in_chunks(piece, d_outputs, jnp.float32) for piece in pieces)
        dq, dk, dv = zip(*grads, strict=True)
        return sum(dq), jnp.concatenate(dk, axis=1), jnp.concatenate(dv, axis=1)

    def _pieces(self, step: RingStep, q: jax.Array, k: jax.Array, v: jax.Array) -> list[Chunks]:
        """Returns this group's queries with each piece of the keys' group."""
        query_mask = mask_of_queries(step.mask, step.ring, q.shape[1])
        assert query_mask.q_index_BT is not None
        pieces, first = [], 0
        for start, length in step.ring.starts(step.key_group(), k.shape[1]):
            of_piece = functools.partial(
                jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=length, axis=1
            )
            key_mask = query_mask.mapped(lambda x: x, of_piece)
            # Make indices relative to the piece's first key, so that fully masked chunks are
            # skipped.
            mask = dataclasses.replace(key_mask, q_index_BT=query_mask.q_index_BT - start)
            k_piece, v_piece = (x[:, first : first + length] for x in (k, v))
            pieces.append(Chunks(q, k_piece, v_piece, mask, *self))
            first += length
        return pieces


def mask_of_queries(mask: AttentionMask, ring: Ring, num_queries: int) -> AttentionMask:
    """Returns the mask of this group's queries, with their positions as indices."""
    pieces = ring.starts(ring.group_index(), num_queries)
    index = [start + jnp.arange(length, dtype=jnp.int32) for start, length in pieces]
    local = mask.mapped(lambda x: ring.part_of(x, ring.group_index(), num_queries), lambda x: x)
    return dataclasses.replace(local, q_index_BT=jnp.concatenate(index)[None])
