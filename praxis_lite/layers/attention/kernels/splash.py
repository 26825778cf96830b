"""Splash attention: flash attention that skips masked blocks, with JAX's or tokamax's kernels."""

import importlib.util

import jax
import jax.numpy as jnp

from praxis_lite.core.sharding.split_dims import SplitDims
from praxis_lite.host.optional_packages import is_installed, require_package
from praxis_lite.layers.attention.kernels.einsum import LogitOptions
from praxis_lite.layers.attention.kernels.fused import per_device
from praxis_lite.layers.attention.kernels.splash_kernels import (
    LANES,
    JaxSplash,
    RowSplash,
    TokamaxSplash,
)
from praxis_lite.layers.attention.masks import AttentionMask
from praxis_lite.layers.base.base_layer import pad_to_multiple

# B batch, T queries, S keys, N query heads, G key/value heads, K dims per head.
SPLASHES = ("splash", "tokamax")
_OF_JAX = "jax.experimental.pallas.ops.tpu.splash_attention"


def splash_of(name: str) -> type[RowSplash]:
    """Returns the kernels for a name in SPLASHES.

    "splash" selects JAX's kernels, or tokamax's if this jax version has none. Both give the same
    results.
    """
    is_in_jax = name == "splash" and importlib.util.find_spec(_OF_JAX) is not None
    return JaxSplash if is_in_jax else TokamaxSplash


def splash_is_installed(name: str) -> bool:
    """Returns whether the kernels for a name in SPLASHES are installed."""
    return splash_of(name) is JaxSplash or is_installed("tokamax")


def require_splash(name: str) -> None:
    """Checks that the kernels for a name in SPLASHES are installed.

    Raises:
      ConfigError: The kernels are not installed. The message explains how to install them.
    """
    if splash_of(name) is TokamaxSplash:
        why = f", as jax {jax.__version__} has no splash attention," if name == "splash" else ""
        require_package("tokamax", f"atten_kernel={name!r}{why}")


def splash_attention(
    q_BTNK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    mask: AttentionMask,
    options: LogitOptions,
    *,
    name: str = "splash",
    split: SplitDims = None,
    interpret: bool = False,
    residual_name: str | None = None,
) -> jax.Array:
    """Computes attention outputs [B, T, N, K] with splash attention for TPU.

    Blocks of logits outside the causal mask or the window are never computed. Each device processes
    its shard of the batch and heads. The kernels have been compiled for a TPU v5e without the
    hardware, and tested in interpret mode, which is slow but works on any platform.

    Arguments that are not listed are those of `einsum_attention`.

    Args:
      name: A name in SPLASHES; see `splash_of`.
      split: Sharding of q.
      interpret: Whether to run in interpret mode.
      residual_name: Checkpoint name of the residuals, or None.
    """
    T, S = q_BTNK.shape[1], k_BSGK.shape[1]
    q, k, v = (pad_to_multiple(x, LANES, dim=1) for x in (q_BTNK * options.scale, k_BSGK, v_BSGK))
    lengths = q.shape[1], k.shape[1]
    # Padding keys, both those in the inputs and those added here, get a segment without queries.
    needs_segments = (
        mask.q_segments_BT is not None
        or mask.kv_visible_BS is not None
        or (lengths[1] != S and mask.right_context is None)
    )
    segments: tuple[jax.Array, ...] = ()
    if needs_segments:
        q_segments, kv_segments = mask.segments(q.shape[0], T, S)
        segments = (
            pad_to_multiple(q_segments, LANES, dim=1),
            pad_to_multiple(kv_segments, LANES, dim=1, constant_values=-1),
        )

    def on_one_device(q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> jax.Array:
        row_kernel = splash_of(name)(lengths, q.shape[2], mask, options, interpret, residual_name)

        def one_row(q, k, v, *segments):
            q_NTK, k_GSK, v_GSK = (x.transpose(1, 0, 2) for x in (q, k, v))
            return row_kernel.attend(q_NTK, k_GSK, v_GSK, segments or None).transpose(1, 0, 2)

        return jax.vmap(one_row)(q, k, v, *segments)

    outputs = per_device(on_one_device, q, k, v, segments, split)[:, :T]
    if not mask.may_hide_all:
        return outputs
    # Fully masked queries output the mean of all values; splash would average only over the blocks
    # that it computes.
    visible = mask.visible(T, S)
    assert visible is not None
    sees_any_BT = jnp.any(visible, axis=-1)
    mean_BGK = jnp.mean(v_BSGK, axis=1, dtype=jnp.float32).astype(outputs.dtype)
    mean_BNK = jnp.repeat(mean_BGK, q.shape[2] // k.shape[2], axis=1)
    return jnp.where(sees_any_BT[:, :, None, None], outputs, mean_BNK[:, None])
