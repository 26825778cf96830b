"""Attention by kernels of other libraries: jax.nn's, cuDNN's flash attention, TPU's splash."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.sharding.split_dims import SplitDims, to_partition_spec, without_axes
from praxis_lite.layers.attention.kernels.einsum import LogitOptions
from praxis_lite.layers.attention.kernels.head_parts import heads_in_parts
from praxis_lite.layers.attention.masks import AttentionMask
from praxis_lite.layers.base.base_layer import to_multiple
from praxis_lite.layers.base.foreign_kernels import share_of_blocks, without_vma

# B batch, T queries, S keys, N heads, G heads of keys and values, K dims per head.
LANES = 128  # Of a TPU's vector registers; splash works on blocks of so many.


def dot_product_attention(
    q_BTNK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, mask: AttentionMask,
    options: LogitOptions, *, bias: jax.Array | None = None,
) -> jax.Array:
    """Returns the attended values [B, T, N, K], by jax.nn.dot_product_attention in XLA."""
    visible_BTS = mask.visible(q_BTNK.shape[1], k_BSGK.shape[1])
    return jax.nn.dot_product_attention(
        q_BTNK,
        k_BSGK,
        v_BSGK,
        # It adds the bias to scaled logits, Pax to unscaled ones.
        bias=None if bias is None else bias * options.scale,
        mask=None if visible_BTS is None else visible_BTS[:, None],
        scale=options.scale,
        implementation="xla",
    )


def cudnn_attention(
    q_BTNK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, mask: AttentionMask,
    options: LogitOptions, *, split: SplitDims = None,
) -> jax.Array:
    """Returns the attended values [B, T, N, K], by cuDNN's flash attention (arXiv:2307.08691).

    Takes 16-bit inputs and causal masks with or without a window, or no mask. Each device works on
    its own rows and heads, as `split` [B, T, N, K] says. Lowered for CUDA, not yet run on a GPU.
    """
    window = None if mask.left_context is None else (mask.left_context - 1, 0)

    def on_one_device(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            q, k, v, scale=options.scale, is_causal=mask.right_context == 0,
            local_window_size=window, implementation="cudnn",
        )

    return per_device(on_one_device, q_BTNK, k_BSGK, v_BSGK, (), split)


def splash_attention(
    q_BTNK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, mask: AttentionMask,
    options: LogitOptions, *, split: SplitDims = None, interpret: bool = False,
    kept_as: str | None = None,
) -> jax.Array:
    """Returns the attended values [B, T, N, K], by JAX's splash attention for TPU.

    Blocks of logits that the causal mask or the window hides are never computed. Each device works
    on its own rows and heads, as `split` [B, T, N, K] says. Compiled for a TPU v5e that was not
    attached, and run in interpret mode, which any platform has and which is slow.

    Args:
      q_BTNK, k_BSGK, v_BSGK, mask, options: as of `einsum_attention`.
      split: of q.
      interpret: run in interpret mode.
      kept_as: the name of results that the backward pass takes up; None: they have none.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    T, S = q_BTNK.shape[1], k_BSGK.shape[1]
    q, k, v = (to_multiple(x, LANES, dim=1) for x in (q_BTNK * options.scale, k_BSGK, v_BSGK))
    lengths = q.shape[1], k.shape[1]
    # Keys that are padding, of the input or of a block, are a segment that no query is of.
    needs_segments = (
        mask.q_segments_BT is not None
        or mask.kv_visible_BS is not None
        or (lengths[1] != S and mask.right_context is None)
    )
    segments = ()
    if needs_segments:
        q_segments, kv_segments = mask.q_segments_BT, mask.kv_segments_BS
        if q_segments is None:
            q_segments, kv_segments = (jnp.zeros((q.shape[0], n), jnp.int32) for n in (T, S))
        if mask.kv_visible_BS is not None:
            kv_segments = jnp.where(mask.kv_visible_BS, kv_segments, -1)
        segments = (
            to_multiple(q_segments.astype(jnp.int32), LANES, dim=1),
            to_multiple(kv_segments.astype(jnp.int32), LANES, dim=1, constant_values=-1),
        )

    def on_one_device(q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> jax.Array:
        kernel = splash_kernel(
            lengths, q.shape[2], mask, options, interpret, kept_as=kept_as
        )

        def one_row(q, k, v, *segments):
            q_NTK, k_GSK, v_GSK = (x.transpose(1, 0, 2) for x in (q, k, v))
            ids = splash_attention_kernel.SegmentIds(*segments) if segments else None
            with computed_blocks(lengths, mask):
                return kernel(q_NTK, k_GSK, v_GSK, ids).transpose(1, 0, 2)

        return jax.vmap(one_row)(q, k, v, *segments)

    outputs = per_device(on_one_device, q, k, v, segments, split)[:, :T]
    if not mask.may_hide_all:
        return outputs
    # A query that sees no key gets the mean of all values; splash's is of the blocks it works on.
    sees_any_BT = jnp.any(mask.visible(T, S), axis=-1)
    mean_BGK = jnp.mean(v_BSGK, axis=1, dtype=jnp.float32).astype(outputs.dtype)
    mean_BNK = jnp.repeat(mean_BGK, q.shape[2] // k.shape[2], axis=1)
    return jnp.where(sees_any_BT[:, :, None, None], outputs, mean_BNK[:, None])


def _block_sizes(lengths: tuple[int, int]) -> tuple[int, int]:
    """Returns the queries and the keys of a block that splash works on."""
    # Of 512 the fused backward kernel's tiles fit into a v5e's vector memory at 256 dims per head.
    block_q, block_kv = (
        max(size for size in (128, 256, 512) if length % size == 0) for length in lengths
    )
    return block_q, block_kv


def computed_blocks(
    lengths: tuple[int, int], mask: AttentionMask
) -> contextlib.AbstractContextManager[Any]:
    """Returns a context that notes on splash's kernels the share of blocks that they compute."""
    return share_of_blocks(_share_of_blocks(lengths, mask))


def _share_of_blocks(lengths: tuple[int, int], mask: AttentionMask) -> float:
    """Returns the share of the blocks of logits that splash computes: those with any seen."""
    block_q, block_kv = _block_sizes(lengths)
    first_q, first_kv = np.arange(0, lengths[0], block_q), np.arange(0, lengths[1], block_kv)
    # The distances from a key to a query within a block, from the least to the largest.
    least = first_q[:, None] - (first_kv[None, :] + block_kv - 1)
    most = first_q[:, None] + block_q - 1 - first_kv[None, :]
    is_seen = np.ones_like(least, bool)
    if mask.left_context is not None:
        is_seen &= least < mask.left_context
    if mask.right_context is not None:
        is_seen &= most >= -mask.right_context
    return float(is_seen.mean())


def splash_kernel(
    lengths: tuple[int, int], num_heads: int, mask: AttentionMask, options: LogitOptions,
    interpret: bool, *, has_log_sums: bool = False, kept_as: str | None = None,
) -> Callable[..., Any]:
    """Returns splash's kernel of a row: from q [N, T, K], k and v [G, S, K] and segments or None.

    Args:
      lengths: T and S, multiples of LANES.
      mask: whose contexts are in the kernel; its arrays are not.
      has_log_sums: it returns also ([N, T],), float32, and has no gradient.
      kept_as: see `splash_attention`.
    """
    # Imported here: Pallas takes a while to import, and only a TPU needs it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    left = None if mask.left_context is None else mask.left_context - 1
    if left is None and mask.right_context is None:
        head_mask = masks.FullMask(lengths)
    else:
        head_mask = masks.LocalMask(lengths, (left, mask.right_context), offset=0)
    block_q, block_kv = _block_sizes(lengths)
    sizes = splash.BlockSizes(
        block_q=block_q, block_kv=block_kv, block_q_dkv=block_q, block_kv_dkv=block_kv,
        block_q_dq=block_q, block_kv_dq=block_kv,
    )
    return splash.make_splash_mha(
        masks.MultiHeadMask([head_mask] * num_heads), block_sizes=sizes, head_shards=1,
        q_seq_shards=1, attn_logits_soft_cap=options.cap or None, interpret=interpret,
        save_residuals=has_log_sums, residual_checkpoint_name=kept_as,
    )


def per_device(
    attend: Callable[..., jax.Array], q_BTNK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array,
    rest: tuple[jax.Array, ...], split: SplitDims,
) -> jax.Array:
    """Returns `attend(q, k, v, *rest)` with each device's rows and heads worked on by it alone.

    XLA cannot split a foreign kernel, and would gather its operands instead. shard_map takes only
    what divides, so rows and heads are padded. `rest` is [B, ...].
    """
    mesh = jax.sharding.get_abstract_mesh()
    auto_axes = set(mesh.axis_names) - set(mesh.manual_axes)
    if mesh.empty or not auto_axes:
        return attend(q_BTNK, k_BSGK, v_BSGK, *rest)
    spec = to_partition_spec(split or (), mesh.axis_names, rank=4)
    rows, _, heads, _ = without_axes(spec, mesh.manual_axes)
    num_row_shards, num_head_shards = (
        math.prod(mesh.shape[axis] for axis in axes_of(entry)) for entry in (rows, heads)
    )
    B, _, N, _ = q_BTNK.shape
    q, k, v = (
        to_multiple(x, num_row_shards, dim=0)
        for x in heads_in_parts(q_BTNK, k_BSGK, v_BSGK, num_head_shards)
    )
    rest = tuple(to_multiple(x, num_row_shards, dim=0) for x in rest)
    of_heads = PartitionSpec(rows, None, heads, None)
    of_rest = tuple(PartitionSpec(rows) for _ in rest)
    outputs = without_vma(attend, (of_heads,) * 3, of_rest, of_heads, auto_axes)(q, k, v, *rest)
    return outputs[:B, :, :N]
