"""Splash attention of tokamax: a backward pass of one kernel, which gives dq beside dk and dv."""

from collections.abc import Callable
from typing import Any

import jax

from praxis_lite.layers.attention.kernels.splash_row import Ids, SplashOfARow
from praxis_lite.layers.base.tokamax_internals import splash_kernels, splash_masks

# So many blocks of keys have each a dq of its own, to be added behind the kernel. With more, the
# kernel adds them up in three, in the dtype of q.
_MOST_DQ = 4


class SplashOfTokamax(SplashOfARow):
    """One kernel forward, two products; one backward, five, where JAX's two have seven.

    The numbers are those of JAX's: by exp, not by exp2 of queries that are rounded once more, which
    tokamax offers. Of 16-bit queries dq is rounded for each block of keys.
    """

    def with_log_sums(
        self, q: jax.Array, k: jax.Array, v: jax.Array, ids: Ids
    ) -> tuple[jax.Array, jax.Array]:
        with self.noted():
            encoded, sums = self.kernel(save_residuals=True)(q, k, v, self.segments(ids))
        return encoded, sums["logsumexp"]

    def gradients(
        self, q: jax.Array, k: jax.Array, v: jax.Array, ids: Ids, log_sums: jax.Array,
        inner: jax.Array, d_encoded: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        kernel = self.kernel()
        block_q, block_kv = self.block_sizes
        shared = ("is_mqa", "mask_value", "mask_function", "config", "dkv_mask_sparsity")
        with self.noted():
            return splash_kernels()._splash_attention_bwd_dkv(
                q, k, v, self.segments(ids), log_sums, d_encoded, inner, bq=block_q, bkv=block_kv,
                bkv_compute=block_kv, mask_info=kernel.dkv_mask_info,
                **{name: kernel.kwargs[name] for name in shared},
            )

    def kernel(self, *, save_residuals: bool = False) -> Callable[..., Any]:
        splash = splash_kernels()
        block_q, block_kv = self.block_sizes
        # JAX's plain interpreter does not read from an input what was written to the output that
        # shares its memory, by which dq is added up.
        adds_up = self.lengths[1] // block_kv > _MOST_DQ and self.interpret is not True
        config = splash.SplashConfig(
            block_q=block_q, block_kv=block_kv, block_q_dkv=block_q, block_kv_dkv=block_kv,
            attn_logits_soft_cap=self.options.cap or None, use_base2_exp=False,
            dq_reduction_steps=3 if adds_up else None, interpret=self.interpret,
            residual_checkpoint_name=self.kept_as,
        )
        return splash.make_splash_mha(
            self.mask_of_head(splash_masks()), config=config, q_seq_shards=1,
            save_residuals=save_residuals,
        )

    def segments(self, ids: Ids) -> Any:
        return ids and splash_kernels().SegmentIds(*ids)
