"""Splash attention for one sequence, with the kernels of JAX or tokamax."""

import abc
import contextlib
import dataclasses
from types import ModuleType
from typing import Any

import jax
import numpy as np

from praxis_lite.layers.attention.kernels.chunks import OutputGradients
from praxis_lite.layers.attention.kernels.einsum import LogitOptions
from praxis_lite.layers.attention.masks import AttentionMask
from praxis_lite.layers.base.foreign_kernels import share_of_blocks
from praxis_lite.layers.base.tokamax_internals import splash_kernels, splash_masks

# N query heads, T queries, G key/value heads, S keys, K dims per head.
LANES = 128  # Lanes of a TPU's vector registers; splash's block sizes are multiples of this.
Ids = tuple[jax.Array, jax.Array] | None  # Segments of queries [T] and of keys [S].


@dataclasses.dataclass(frozen=True)
class RowSplash(abc.ABC):
    """Splash attention for one sequence, with scaled q [N, T, K], and k and v [G, S, K].

    Attributes:
      lengths: T and S, multiples of LANES.
      num_heads: N.
      mask: Mask, of which only left_context and right_context are used.
      options: Options, of which only cap is used.
      interpret: Whether to run in interpret mode, which is slow but works on any platform.
      residual_name: Checkpoint name of the residuals, or None.
    """

    lengths: tuple[int, int]
    num_heads: int
    mask: AttentionMask
    options: LogitOptions
    interpret: bool
    residual_name: str | None = None

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, ids: Ids) -> jax.Array:
        """Returns attention outputs [N, T, K]; differentiable."""
        with self.annotated():
            return self.kernel()(q, k, v, self.segments(ids))

    @abc.abstractmethod
    def with_log_sums(
        self, q: jax.Array, k: jax.Array, v: jax.Array, ids: Ids
    ) -> tuple[jax.Array, jax.Array]:
        """Returns outputs [N, T, K] and logsumexp, float32 [N, T]."""

    @abc.abstractmethod
    def gradients(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        ids: Ids,
        d_outputs: OutputGradients,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the gradients with respect to q, k and v for a softmax over more keys than k.

        The arrays in `d_outputs` are [N, T, K], [N, T] and [N, T].
        """

    @abc.abstractmethod
    def kernel(self, *, save_residuals: bool = False) -> Any:
        """Returns the library's kernel, which is not differentiable with save_residuals."""

    @abc.abstractmethod
    def segments(self, ids: Ids) -> Any:
        """Returns segments in the library's format."""

    def mask_of_head(self, masks: ModuleType) -> Any:
        """Builds the mask for a head with the library's mask module."""
        left = None if self.mask.left_context is None else self.mask.left_context - 1
        if left is None and self.mask.right_context is None:
            return masks.FullMask(self.lengths)
        return masks.LocalMask(self.lengths, (left, self.mask.right_context), offset=0)

    @property
    def block_sizes(self) -> tuple[int, int]:
        """The block sizes for queries and keys."""
        # With blocks of up to 512, the tiles of a fused backward kernel with 256 dims per head fit
        # into a v5e's vector memory.
        block_q, block_kv = (
            max(size for size in (128, 256, 512) if length % size == 0) for length in self.lengths
        )
        return block_q, block_kv

    def annotated(self) -> contextlib.AbstractContextManager[Any]:
        """Annotates kernels inside the `with` block with the fraction of computed blocks."""
        return share_of_blocks(self.share_of_blocks())

    def share_of_blocks(self) -> float:
        """Returns the fraction of blocks that splash computes: those not fully masked."""
        (num_queries, num_keys), (block_q, block_kv) = self.lengths, self.block_sizes
        first_q, first_kv = np.arange(0, num_queries, block_q), np.arange(0, num_keys, block_kv)
        # The smallest and the largest distance from a key to a query within a block.
        smallest = first_q[:, None] - (first_kv[None, :] + block_kv - 1)
        largest = first_q[:, None] + block_q - 1 - first_kv[None, :]
        is_visible = np.ones_like(smallest, bool)
        if self.mask.left_context is not None:
            is_visible &= smallest < self.mask.left_context
        if self.mask.right_context is not None:
            is_visible &= largest >= -self.mask.right_context
        return float(is_visible.mean())


class JaxSplash(RowSplash):
    """JAX's kernels: one forward (2 matmuls), one for dq (3), and one for dk and dv (4)."""

    def with_log_sums(self, q, k, v, ids):
        with self.annotated():
            encoded, (log_sums,) = self.kernel(save_residuals=True)(q, k, v, self.segments(ids))
        return encoded, log_sums

    def gradients(self, q, k, v, ids, d_outputs):
        # The kernel's own gradient assumes a softmax over k. These private functions accept the
        # logsumexp over all keys.
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

        kernel = self.kernel(save_residuals=True)
        sizes = kernel.kwargs["block_sizes"]
        # Both backward kernels take most settings of the forward kernel.
        common = {
            name: kernel.kwargs[name]
            for name in (
                "is_mqa",
                "mask_value",
                "attn_logits_soft_cap",
                "mask_function",
                "interpret",
            )
        } | {name: getattr(sizes, name) for name in ("q_layout", "k_layout", "v_layout")}
        d_encoded, log_sums, inner = d_outputs
        arrays = q, k, v, self.segments(ids), None, log_sums, d_encoded, inner
        with self.annotated():
            _, dk, dv = splash_attention_kernel._splash_attention_bwd_dkv(
                *arrays,
                bq=sizes.block_q_dkv,
                bkv=sizes.block_kv_dkv,
                bkv_compute=sizes.block_kv_dkv_compute,
                mask_info=kernel.dkv_mask_info,
                use_fused_bwd_kernel=False,
                **common,
            )
            dq = splash_attention_kernel._splash_attention_bwd_dq(
                *arrays,
                bq=sizes.block_q_dq,
                bkv=sizes.block_kv_dq,
                mask_info=kernel.dq_mask_info,
                **common,
            )
        return dq, dk, dv

    def kernel(self, *, save_residuals: bool = False) -> Any:
        # Imported here, because importing Pallas is slow and only TPUs need it.
        from jax.experimental.pallas.ops.tpu.splash_attention import (
            splash_attention_kernel as splash,
        )
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

        block_q, block_kv = self.block_sizes
        sizes = splash.BlockSizes(
            block_q=block_q,
            block_kv=block_kv,
            block_q_dkv=block_q,
            block_kv_dkv=block_kv,
            block_q_dq=block_q,
            block_kv_dq=block_kv,
        )
        mask = masks.MultiHeadMask([self.mask_of_head(masks)] * self.num_heads)
        return splash.make_splash_mha(
            mask,
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=self.options.cap or None,
            interpret=self.interpret,
            save_residuals=save_residuals,
            residual_checkpoint_name=self.residual_name,
        )

    def segments(self, ids: Ids) -> Any:
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

        return ids and splash_attention_kernel.SegmentIds(*ids)


# With up to this number of key blocks, the kernel returns a separate dq per block, and these are
# summed afterwards. With more blocks, the kernel accumulates dq in three arrays with the dtype of
# q.
_MAX_SEPARATE_DQ = 4


class TokamaxSplash(RowSplash):
    """Tokamax's kernels: one forward (2 matmuls) and one backward (5 matmuls).

    The results equal those from JAX's kernels, because tokamax's optional exp2, which rounds
    queries once more, is disabled. With 16-bit queries, dq is rounded for each key block.
    """

    def with_log_sums(self, q, k, v, ids):
        with self.annotated():
            encoded, sums = self.kernel(save_residuals=True)(q, k, v, self.segments(ids))
        return encoded, sums["logsumexp"]

    def gradients(self, q, k, v, ids, d_outputs):
        kernel = self.kernel()
        block_q, block_kv = self.block_sizes
        shared = ("is_mqa", "mask_value", "mask_function", "config", "dkv_mask_sparsity")
        with self.annotated():
            return splash_kernels()._splash_attention_bwd_dkv(
                q,
                k,
                v,
                self.segments(ids),
                d_outputs.log_sums,
                d_outputs.encoded,
                d_outputs.inner,
                bq=block_q,
                bkv=block_kv,
                bkv_compute=block_kv,
                mask_info=kernel.dkv_mask_info,
                **{name: kernel.kwargs[name] for name in shared},
            )

    def kernel(self, *, save_residuals: bool = False) -> Any:
        splash = splash_kernels()
        block_q, block_kv = self.block_sizes
        # To sum dq, the kernel uses an output that aliases an input. JAX's plain interpreter does
        # not support this.
        accumulates_dq = (
            self.lengths[1] // block_kv > _MAX_SEPARATE_DQ and self.interpret is not True
        )
        config = splash.SplashConfig(
            block_q=block_q,
            block_kv=block_kv,
            block_q_dkv=block_q,
            block_kv_dkv=block_kv,
            attn_logits_soft_cap=self.options.cap or None,
            use_base2_exp=False,
            dq_reduction_steps=3 if accumulates_dq else None,
            interpret=self.interpret,
            residual_checkpoint_name=self.residual_name,
        )
        return splash.make_splash_mha(
            self.mask_of_head(splash_masks()),
            config=config,
            q_seq_shards=1,
            save_residuals=save_residuals,
        )

    def segments(self, ids: Ids) -> Any:
        return ids and splash_kernels().SegmentIds(*ids)
