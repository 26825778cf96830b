"""Attention in chunks of queries and keys, with memory linear in the number of queries."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.core.collectives.varying import varying_alike
from praxis_lite.core.jaxprs import RECOMPUTED
from praxis_lite.layers.attention.kernels.einsum import LogitOptions
from praxis_lite.layers.attention.masks import LARGE_NEGATIVE, AttentionMask
from praxis_lite.layers.base.activation_names import name_residuals
from praxis_lite.layers.base.base_layer import pad_to

# B batch, T queries, S keys, G key/value heads, R query heads per key/value head, K dims per head,
# C queries or keys per chunk.
_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def chunked_attention(
    q_BTNK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    mask: AttentionMask,
    options: LogitOptions,
    *,
    chunk_size: int,
    sinks_N: jax.Array | None = None,
    residual_name: str | None = None,
) -> jax.Array:
    """Computes attention outputs [B, T, N, K] with one chunk of the logits in memory at a time.

    A running maximum and sum make the softmax exact (arXiv:2112.05682, arXiv:2205.14135). The
    backward pass recomputes each chunk's logits. Fully masked chunks are skipped. Fully masked
    queries get the same outputs as with `einsum_attention`.

    In addition to arguments and results, the kernel needs memory for two numbers per query and
    head, and for one chunk of logits and their derivatives.

    Arguments that are not listed are those of `einsum_attention`.

    Args:
      chunk_size: Number of queries and keys in a chunk.
      residual_name: Checkpoint name of the residuals, or None.
    """
    B, T, N, K = q_BTNK.shape
    G = k_BSGK.shape[2]
    q_BTGRK = q_BTNK.reshape(B, T, G, N // G, K)
    encoded, log_sums = attention_with_log_sums(
        q_BTGRK, k_BSGK, v_BSGK, mask, options, chunk_size, residual_name
    )
    may_see_none = k_BSGK.shape[1] != T or mask.may_hide_all
    mean_BGK = None
    if options.averages and sinks_N is None and may_see_none:
        mean_BGK = jnp.mean(v_BSGK, axis=1, dtype=jnp.float32)
    return apply_sinks(encoded, log_sums, options, sinks_N, mean_BGK).astype(q_BTNK.dtype)


def apply_sinks(
    encoded: jax.Array,
    log_sums: jax.Array,
    options: LogitOptions,
    sinks_N: jax.Array | None,
    mean_BGK: jax.Array | None,
) -> jax.Array:
    """Adds sinks to the softmax over keys, and returns attention outputs [B, T, N, K].

    Args:
      encoded: Outputs without sinks, [B, T, G, R, K]; zeros for fully masked queries.
      log_sums: Logsumexp of the logits, float32 [B, G, R, T]; LARGE_NEGATIVE for fully masked
        queries.
      options: Options whose `extra` is the logit of a sink shared by all heads.
      sinks_N: An additional logit per head.
      mean_BGK: Mean of all values, which fully masked queries output. If None, these queries output
        zeros.
    """
    B, T, G, R, K = encoded.shape
    extra: float | jax.Array | None = options.extra
    if sinks_N is not None:
        extra = sinks_N.astype(jnp.float32).reshape(1, G, R, 1)
    if extra is not None:
        # The fraction of the softmax that remains for the keys.
        share = jnp.exp(log_sums - jnp.logaddexp(log_sums, extra))
        encoded = encoded * to_output_layout(share)
    if mean_BGK is not None:
        sees_any = to_output_layout(log_sums > 0.5 * LARGE_NEGATIVE)
        encoded = jnp.where(sees_any, encoded, mean_BGK[:, None, :, None])
    return encoded.reshape(B, T, G * R, K)


def to_output_layout(x_BGRT: jax.Array) -> jax.Array:
    """Transposes [B, G, R, T] to [B, T, G, R, 1], to broadcast with outputs."""
    return x_BGRT.transpose(0, 3, 1, 2)[..., None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def attention_with_log_sums(q, k, v, mask, options, chunk_size, residual_name):
    """Calls `attend_in_chunks`, with checkpoint names for the results and a custom gradient."""
    results = attend_in_chunks(Chunks(q, k, v, mask, options, chunk_size), q.dtype)
    return name_residuals(results, residual_name)


class Chunks:
    """The arrays of attention, padded to multiples of the chunk size, and the logits of each chunk.

    Args:
      q: Queries [B, T, G, R, K].
      k: Keys [B, S, G, K].
      v: Values [B, S, G, K].
      mask: Mask of queries and keys.
      options: Options for the logits; `extra` and `zero_fully_masked` are not used.
      size: Number of queries and keys in a chunk.
    """

    def __init__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: AttentionMask,
        options: LogitOptions,
        size: int,
    ):
        T, S = q.shape[1], k.shape[1]
        self.q_size, self.kv_size = min(size, T), min(size, S)
        self.num_q, self.num_kv = -(-T // self.q_size), -(-S // self.kv_size)
        self.T, self.S, self.dims = T, S, (q.shape[0], *q.shape[2:4])
        self.options = options
        rows, columns = self.padded_rows, self.padded_columns
        self.q, self.k, self.v = rows(q), columns(k), columns(v)
        self.q_index = rows(mask.q_index(T), mode="edge")
        self.mask = dataclasses.replace(mask, q_index_BT=None).mapped(rows, columns)

    @property
    def arrays(self) -> tuple:
        """The arrays from which a chunk's logits and values are computed."""
        return self.q, self.k, self.v, self.q_index, self.mask

    def padded_rows(self, x: jax.Array, mode: str = "constant") -> jax.Array:
        return pad_to(x, self.num_q * self.q_size, 1, mode=mode)

    def padded_columns(self, x: jax.Array) -> jax.Array:
        return pad_to(x, self.num_kv * self.kv_size, 1)

    def rows(self, x: jax.Array, i: jax.Array, dim: int = 1) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, i * self.q_size, self.q_size, axis=dim)

    def columns(self, x: jax.Array, j: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, j * self.kv_size, self.kv_size, axis=1)

    def columns_seen(self, i: jax.Array) -> tuple[Any, Any]:
        """Returns the range [first, end) of key chunks to which queries in chunk i may attend."""
        first: int | jax.Array = 0
        end: int | jax.Array = self.num_kv
        index = self.rows(self.q_index, i)
        if self.mask.kv_index_BS is not None:  # Keys may be in any order.
            return first, end
        if self.mask.right_context is not None:
            last_key = jnp.max(index) + self.mask.right_context
            end = jnp.minimum(last_key // self.kv_size + 1, self.num_kv)
        if self.mask.left_context is not None:
            first_key = jnp.min(index) - self.mask.left_context + 1
            first = jnp.maximum(first_key // self.kv_size, 0)
        return first, end

    def logits(self, i: jax.Array, j: jax.Array) -> tuple[Any, Any]:
        """Returns the capped logits [B, G, R, C, C] and their mask [B or 1, 1, 1, C, C]."""
        logits = _einsum("btgrk,bsgk->bgrts", self.rows(self.q, i), self.columns(self.k, j))
        index_S = j * self.kv_size + jnp.arange(self.kv_size, dtype=jnp.int32)
        mask = self.mask.mapped(lambda x: self.rows(x, i), lambda x: self.columns(x, j))
        # Keys from S on are padding.
        visible = (index_S < self.S)[None, None, :]
        index_BS = index_S[None] if mask.kv_index_BS is None else mask.kv_index_BS
        allowed = mask.visible_at(self.rows(self.q_index, i), index_BS)
        if allowed is not None:
            visible = allowed & jnp.broadcast_to(visible, allowed.shape)
        return self.options.apply(logits), visible[:, None, None]


def attend_in_chunks(chunks: Chunks, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns attention outputs, and the logsumexp of each query's logits.

    The outer loop is over chunks of queries. The inner loop is over chunks of keys and carries, per
    query, the largest logit so far, the sum of exp(logit - largest) and the weighted sum of values.
    When a larger logit is found, `decay` rescales the two sums.

    Args:
      chunks: Queries, keys and values.
      dtype: Dtype of the outputs.

    Returns:
      Outputs [B, T, G, R, K] and logsumexp, float32 [B, G, R, T]; zeros and LARGE_NEGATIVE for
      fully masked queries.
    """
    B, G, R = chunks.dims
    Cq, K = chunks.q_size, chunks.v.shape[-1]

    def one_chunk_of_queries(i, carry):
        encoded, log_sums = carry

        def add_keys(j, carry):
            highest, total, acc = carry
            logits, visible = chunks.logits(i, j)
            logits = jnp.where(visible, logits, LARGE_NEGATIVE)
            new_highest = jnp.maximum(highest, jnp.max(logits, axis=-1))
            # If no logit is visible so far, new_highest is LARGE_NEGATIVE, and exp(0) would be 1
            # for masked keys. The mask sets it to 0.
            exp = jnp.where(visible, jnp.exp(logits - new_highest[..., None]), 0.0)
            decay = jnp.exp(highest - new_highest)
            values = chunks.columns(chunks.v, j)
            added = _einsum("bgrts,bsgk->btgrk", exp.astype(values.dtype), values)
            total = total * decay + jnp.sum(exp, axis=-1)
            return new_highest, total, acc * to_output_layout(decay) + added

        first, end = chunks.columns_seen(i)
        start = (
            jnp.full((B, G, R, Cq), LARGE_NEGATIVE, jnp.float32),
            jnp.zeros((B, G, R, Cq), jnp.float32),
            jnp.zeros((B, Cq, G, R, K), jnp.float32),
        )
        start = varying_alike(start, chunks.arrays)
        highest, total, acc = jax.lax.fori_loop(first, end, add_keys, start)
        # A fully masked query has a total of 0. With a share of 1, its outputs are zeros, and its
        # logsumexp is LARGE_NEGATIVE.
        share = 1.0 / jnp.where(total > 0.0, total, 1.0)
        part = (acc * to_output_layout(share)).astype(dtype)
        encoded = jax.lax.dynamic_update_slice_in_dim(encoded, part, i * Cq, axis=1)
        log_sum = highest - jnp.log(share)
        return encoded, jax.lax.dynamic_update_slice_in_dim(log_sums, log_sum, i * Cq, axis=3)

    # The carry of the outer loop: the outputs and logsumexps of all queries, filled chunk by chunk.
    empty = (
        jnp.zeros((*chunks.q.shape[:-1], K), dtype),
        jnp.zeros((B, G, R, chunks.q.shape[1]), jnp.float32),
    )
    empty = varying_alike(empty, chunks.arrays)
    encoded, log_sums = jax.lax.fori_loop(0, chunks.num_q, one_chunk_of_queries, empty)
    return encoded[:, : chunks.T], log_sums[..., : chunks.T]


def _forward_with_residuals(q, k, v, mask, options, chunk_size, residual_name):
    encoded, log_sums = attention_with_log_sums(q, k, v, mask, options, chunk_size, None)
    encoded, log_sums = name_residuals((encoded, log_sums), residual_name)
    return (encoded, log_sums), (q, k, v, mask, encoded, log_sums)


def _backward(options, chunk_size, residual_name, residuals, grads):
    q, k, v, mask, encoded, log_sums = residuals
    d_encoded, d_log_sums = grads
    inner = inner_products(d_encoded, encoded) - d_log_sums
    d_outputs = OutputGradients(d_encoded, log_sums, inner)
    chunks = Chunks(q, k, v, mask, options, chunk_size)
    dq, dk, dv = gradients_in_chunks(chunks, d_outputs, q.dtype)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None


class OutputGradients(NamedTuple):
    """The gradient with respect to attention outputs.

    The gradients of some of the keys can be computed from it, because `log_sums` is over all keys.

    Attributes:
      encoded: Gradient with respect to the outputs, [B, T, G, R, K].
      log_sums: Logsumexp over all keys, float32 [B, G, R, T].
      inner: `inner_products` of outputs and their gradient, minus the gradient with respect to
        `log_sums`, [B, G, R, T].
    """

    encoded: jax.Array
    log_sums: jax.Array
    inner: jax.Array


def inner_products(d_encoded: jax.Array, encoded: jax.Array) -> jax.Array:
    """Returns the sum of p_s dp_s over keys s, [B, G, R, T], for the gradient of the softmax."""
    return _einsum("btgrk,btgrk->bgrt", d_encoded, encoded)


def gradients_in_chunks(
    chunks: Chunks, d_outputs: OutputGradients, dtype: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients with respect to q, k and v; the latter two are float32.

    Args:
      chunks: Queries, keys and values.
      d_outputs: Gradient with respect to the outputs.
      dtype: Dtype of the gradient of q.
    """
    options = chunks.options
    d_encoded = chunks.padded_rows(d_outputs.encoded)
    pad = [(0, 0)] * 3 + [(0, chunks.q.shape[1] - chunks.T)]
    log_sums, inner = jnp.pad(d_outputs.log_sums, pad), jnp.pad(d_outputs.inner, pad)

    def one_chunk_of_queries(i, carry):
        dq, dk, dv = carry
        d_out, q_part = chunks.rows(d_encoded, i), chunks.rows(chunks.q, i)

        def add_keys(j, carry):
            dq_part, dk, dv = carry
            with jax.named_scope(RECOMPUTED):
                logits, visible = chunks.logits(i, j)
            log_sum = chunks.rows(log_sums, i, 3)[..., None]
            # With the saved logsumexp, probabilities need no second pass over the keys.
            probs = jnp.where(visible, jnp.exp(logits - log_sum), 0.0)
            values, keys = chunks.columns(chunks.v, j), chunks.columns(chunks.k, j)
            d_probs = _einsum("btgrk,bsgk->bgrts", d_out, values)
            # The gradient of the softmax, then of the cap and of the scale.
            d_logits = probs * (d_probs - chunks.rows(inner, i, 3)[..., None])
            if options.cap > 0.0:
                # Masked logits have probability 0, so their derivative is 0, too.
                d_logits = d_logits * (1.0 - (logits / options.cap) ** 2)
            if options.scale != 1.0:
                d_logits = d_logits * options.scale
            d_logits, probs = d_logits.astype(q_part.dtype), probs.astype(q_part.dtype)
            dq_part += _einsum("bgrts,bsgk->btgrk", d_logits, keys)
            dk = add_at(dk, _einsum("bgrts,btgrk->bsgk", d_logits, q_part), j * chunks.kv_size)
            dv = add_at(dv, _einsum("bgrts,btgrk->bsgk", probs, d_out), j * chunks.kv_size)
            return dq_part, dk, dv

        first, end = chunks.columns_seen(i)
        # dq_part is the sum for this chunk of queries. dk and dv are sums over all chunks of
        # queries, so both loops carry them.
        start = varying_alike((jnp.zeros(q_part.shape, jnp.float32), dk, dv))
        dq_part, dk, dv = jax.lax.fori_loop(first, end, add_keys, start)
        dq_part = dq_part.astype(dq.dtype)
        dq = jax.lax.dynamic_update_slice_in_dim(dq, dq_part, i * chunks.q_size, axis=1)
        return dq, dk, dv

    start = (
        jnp.zeros(chunks.q.shape, dtype),
        jnp.zeros(chunks.k.shape, jnp.float32),
        jnp.zeros(chunks.v.shape, jnp.float32),
    )
    start = varying_alike(start, (chunks.arrays, d_encoded))
    dq, dk, dv = jax.lax.fori_loop(0, chunks.num_q, one_chunk_of_queries, start)
    return dq[:, : chunks.T], dk[:, : chunks.S], dv[:, : chunks.S]


def add_at(total: jax.Array, part: jax.Array, start: int | jax.Array) -> jax.Array:
    """Adds `part` to `total` [B, S, G, K], starting at key `start`."""
    old = jax.lax.dynamic_slice_in_dim(total, start, part.shape[1], axis=1)
    return jax.lax.dynamic_update_slice_in_dim(total, old + part, start, axis=1)


attention_with_log_sums.defvjp(_forward_with_residuals, _backward)
