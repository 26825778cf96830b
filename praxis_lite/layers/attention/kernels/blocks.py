"""Blocked attention, in which a block of queries reads only the keys that the mask allows.

For causal attention, slightly more than half of the logits are computed, and for windowed attention
even fewer. The blocks are unrolled into plain matmuls, so the compiler can schedule, fuse and
estimate them like any other matmul. The gradient is custom.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.core.jaxprs import RECOMPUTED
from praxis_lite.layers.attention.kernels.chunks import add_at, to_output_layout
from praxis_lite.layers.attention.kernels.einsum import LogitOptions
from praxis_lite.layers.attention.masks import AttentionMask

# B batch, T queries, S keys, G key/value heads, R query heads per key/value head, K dims per head,
# C queries per block.
_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def blocked_attention(
    q_BTNK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    mask: AttentionMask,
    options: LogitOptions,
    *,
    block_size: int,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Returns attention outputs [B, T, N, K].

    The residuals are the unnormalized probabilities for the computed blocks, in the queries' dtype.
    With remat, the residuals exist only during the backward pass of a layer.

    Arguments that are not listed are those of `einsum_attention`.

    Args:
      mask: A mask without indices.
      block_size: C, the number of queries per block.
    """
    B, T, N, K = q_BTNK.shape
    G = k_BSGK.shape[2]
    q_BTGRK = q_BTNK.reshape(B, T, G, N // G, K)
    extra = options.extra
    sinks = None if extra is None else jnp.full((1, 1, 1, 1), extra, jnp.float32)
    if sinks_N is not None:
        sinks = sinks_N.astype(jnp.float32).reshape(1, G, N // G, 1)
    encoded = _attention(q_BTGRK, k_BSGK, v_BSGK, mask, sinks, options, block_size)
    return encoded.reshape(B, T, N, v_BSGK.shape[-1])


class _Block(NamedTuple):
    """A block of queries [start, stop), which attend only to keys in [first, end)."""

    start: int
    stop: int
    first: int
    end: int

    def queries(self, x: jax.Array) -> jax.Array:
        return x[:, self.start : self.stop]

    def keys(self, x: jax.Array) -> jax.Array:
        return x[:, self.first : self.end]

    def logits(self, q, k, mask: AttentionMask, options: LogitOptions) -> tuple[Any, Any]:
        """Returns the capped logits [B, G, R, C, S'] and their mask [B or 1, 1, 1, C, S']."""
        dtype = jnp.float32 if options.float32_logits else q.dtype
        logits = jnp.einsum(
            "btgrk,bsgk->bgrts", self.queries(q), self.keys(k), preferred_element_type=dtype
        )
        index_T = jnp.arange(self.start, self.stop, dtype=jnp.int32)[None]
        index_S = jnp.arange(self.first, self.end, dtype=jnp.int32)[None]
        visible = mask.mapped(self.queries, self.keys).visible_at(index_T, index_S)
        return options.apply(logits), None if visible is None else visible[:, None, None]


def _blocks(num_queries: int, num_keys: int, mask: AttentionMask, size: int) -> Iterator[_Block]:
    for start in range(0, num_queries, size):
        # A block reads at least one key, even if all of its queries are fully masked.
        stop, first, end = min(start + size, num_queries), 0, num_keys
        if mask.left_context is not None:
            first = min(max(start - mask.left_context + 1, 0), num_keys - 1)
        if mask.right_context is not None:
            end = max(min(stop + mask.right_context, num_keys), first + 1)
        yield _Block(start, stop, first, end)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attention(q, k, v, mask, sinks, options, block_size):
    return _forward(q, k, v, mask, sinks, options, block_size)[0]


def _forward(q, k, v, mask, sinks, options, block_size):
    """Returns attention outputs, and the residuals of each block."""
    parts, saved = [], []
    # The loop is unrolled, because blocks of queries read different numbers of keys.
    for block in _blocks(q.shape[1], k.shape[1], mask, block_size):
        logits, visible = block.logits(q, k, mask, options)
        lowest = float(jnp.finfo(logits.dtype).min)
        if visible is not None:
            logits = jnp.where(visible, logits, lowest)
        highest = jnp.max(logits, axis=-1)
        sees_any = highest > lowest
        if sinks is not None:
            highest = jnp.maximum(highest, sinks.astype(highest.dtype))
        exp = jnp.exp(logits - highest[..., None]).astype(q.dtype)
        total = jnp.sum(exp, axis=-1, dtype=jnp.float32)
        highest = highest.astype(jnp.float32)
        if sinks is not None:
            total += jnp.exp(sinks - highest)
        # Fully masked queries have exp = 1 for all keys; set their probabilities to zero.
        share = jnp.where(sees_any, 1.0 / total, 0.0)
        part = _einsum("bgrts,bsgk->btgrk", exp, block.keys(v)) * to_output_layout(share)
        if _averages(q, k, mask, sinks, options):
            mean = jnp.mean(v, axis=1, dtype=jnp.float32)[:, None, :, None]
            part = jnp.where(to_output_layout(sees_any), part, mean)
        parts.append(part.astype(q.dtype))
        saved.append((exp, share, highest))
    return jnp.concatenate(parts, axis=1), saved


def _averages(q, k, mask, sinks, options: LogitOptions) -> bool:
    """Returns whether queries may be fully masked and would then output the mean of all values."""
    may_see_none = mask.may_hide_all or q.shape[1] != k.shape[1]
    return options.averages and sinks is None and may_see_none


def _forward_with_residuals(q, k, v, mask, sinks, options, block_size):
    encoded, saved = _forward(q, k, v, mask, sinks, options, block_size)
    return encoded, (q, k, v, mask, sinks, encoded, saved)


def _backward(options, block_size, residuals, d_encoded):
    q, k, v, mask, sinks, encoded, saved = residuals
    num_keys, dq, dk, dv, d_sinks = k.shape[1], [], None, None, 0.0
    blocks = list(_blocks(q.shape[1], num_keys, mask, block_size))
    # Start with the last block, which attends to all keys in causal attention.
    for block, (exp, share, highest) in zip(reversed(blocks), reversed(saved), strict=True):
        d_out = block.queries(d_encoded)
        d_sums = (d_out * to_output_layout(share)).astype(q.dtype)
        # The sum of p_s dp_s over keys s, which the gradient of the softmax subtracts.
        inner = _einsum("btgrk,btgrk->bgrt", d_out, block.queries(encoded)) * share
        logits_dtype = jnp.float32 if options.float32_logits else q.dtype
        d_exp = jnp.einsum(
            "btgrk,bsgk->bgrts", d_sums, block.keys(v), preferred_element_type=logits_dtype
        )
        d_logits = exp * (d_exp - inner[..., None].astype(logits_dtype))
        if options.cap > 0.0:
            with jax.named_scope(RECOMPUTED):
                logits, _ = block.logits(q, k, mask, options)
            d_logits = d_logits * (1.0 - (logits / options.cap) ** 2)
        if options.scale != 1.0:
            d_logits = d_logits * options.scale
        d_logits = d_logits.astype(q.dtype)
        dq.append(_einsum("bgrts,bsgk->btgrk", d_logits, block.keys(k)).astype(q.dtype))
        dk_part = _einsum("bgrts,btgrk->bsgk", d_logits, block.queries(q))
        dv_part = _einsum("bgrts,btgrk->bsgk", exp, d_sums)
        if dk is None:
            padding = [(0, 0), (block.first, num_keys - block.end), (0, 0), (0, 0)]
            dk, dv = jnp.pad(dk_part, padding), jnp.pad(dv_part, padding)
        else:
            dk, dv = add_at(dk, dk_part, block.first), add_at(dv, dv_part, block.first)
        if _averages(q, k, mask, sinks, options):
            sees_none = (share == 0.0).astype(d_out.dtype)
            dv += _einsum("bgrt,btgrk->bgk", sees_none, d_out)[:, None] / num_keys
        if sinks is not None:
            d_sinks -= jnp.sum(jnp.exp(sinks - highest) * inner, axis=(0, 3), keepdims=True)
    if sinks is not None and sinks.size == 1:  # One sink for all heads: `options.extra`.
        d_sinks = jnp.sum(d_sinks, keepdims=True)
    dq = jnp.concatenate(dq[::-1], axis=1)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None, None if sinks is None else d_sinks


_attention.defvjp(_forward_with_residuals, _backward)
