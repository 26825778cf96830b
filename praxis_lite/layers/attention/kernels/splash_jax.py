"""Splash attention of JAX (jax.experimental.pallas): a backward pass of two kernels.

The one file that uses it. Two functions of it are not in its interface from jax 0.10 to 0.12.
"""

from collections.abc import Callable
from typing import Any

import jax

from praxis_lite.layers.attention.kernels.splash_row import Ids, SplashOfARow


class SplashOfJax(SplashOfARow):
    """One kernel forward, two products; one for dq, three; one for dk and dv, four."""

    def with_log_sums(
        self, q: jax.Array, k: jax.Array, v: jax.Array, ids: Ids
    ) -> tuple[jax.Array, jax.Array]:
        with self.noted():
            encoded, (log_sums,) = self.kernel(save_residuals=True)(q, k, v, self.segments(ids))
        return encoded, log_sums

    def gradients(
        self, q: jax.Array, k: jax.Array, v: jax.Array, ids: Ids, log_sums: jax.Array,
        inner: jax.Array, d_encoded: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        # Splash's gradient is of a softmax over the keys that it was given. These two functions
        # below it take the sums over all keys.
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

        kernel = self.kernel(save_residuals=True)
        sizes = kernel.kwargs["block_sizes"]
        common = {
            name: kernel.kwargs[name] for name in
            ("is_mqa", "mask_value", "attn_logits_soft_cap", "mask_function", "interpret")
        } | {name: getattr(sizes, name) for name in ("q_layout", "k_layout", "v_layout")}
        arrays = q, k, v, self.segments(ids), None, log_sums, d_encoded, inner
        with self.noted():
            _, dk, dv = splash_attention_kernel._splash_attention_bwd_dkv(
                *arrays, bq=sizes.block_q_dkv, bkv=sizes.block_kv_dkv,
                bkv_compute=sizes.block_kv_dkv_compute, mask_info=kernel.dkv_mask_info,
                use_fused_bwd_kernel=False, **common,
            )
            dq = splash_attention_kernel._splash_attention_bwd_dq(
                *arrays, bq=sizes.block_q_dq, bkv=sizes.block_kv_dq,
                mask_info=kernel.dq_mask_info, **common,
            )
        return dq, dk, dv

    def kernel(self, *, save_residuals: bool = False) -> Callable[..., Any]:
        # Imported here: Pallas takes a while to import, and only a TPU needs it.
        from jax.experimental.pallas.ops.tpu.splash_attention import (
            splash_attention_kernel as splash,
        )
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

        block_q, block_kv = self.block_sizes
        sizes = splash.BlockSizes(
            block_q=block_q, block_kv=block_kv, block_q_dkv=block_q, block_kv_dkv=block_kv,
            block_q_dq=block_q, block_kv_dq=block_kv,
        )
        mask = masks.MultiHeadMask([self.mask_of_head(masks)] * self.num_heads)
        return splash.make_splash_mha(
            mask, block_sizes=sizes, head_shards=1, q_seq_shards=1,
            attn_logits_soft_cap=self.options.cap or None, interpret=self.interpret,
            save_residuals=save_residuals, residual_checkpoint_name=self.kept_as,
        )

    def segments(self, ids: Ids) -> Any:
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

        return ids and splash_attention_kernel.SegmentIds(*ids)
