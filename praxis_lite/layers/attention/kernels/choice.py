"""Chooses and calls an attention kernel."""

import dataclasses
import functools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError, require_choice
from praxis_lite.core.sharding.devices.axis_types import type_spec, untyped
from praxis_lite.core.sharding.mesh import compiled_platform
from praxis_lite.core.sharding.split_dims import SplitDims, constrain
from praxis_lite.layers.attention.kernels.blocks import blocked_attention
from praxis_lite.layers.attention.kernels.chunks import chunked_attention
from praxis_lite.layers.attention.kernels.context_parallel import (
    context_parallel_attention,
    is_context_parallel,
)
from praxis_lite.layers.attention.kernels.einsum import einsum_attention
from praxis_lite.layers.attention.kernels.fused import cudnn_attention
from praxis_lite.layers.attention.kernels.settings import AttentionSettings
from praxis_lite.layers.attention.kernels.splash import (
    SPLASHES,
    require_splash,
    splash_attention,
    splash_is_installed,
    splash_of,
)
from praxis_lite.layers.attention.masks import AttentionMask
from praxis_lite.layers.base.activation_names import is_offloaded, named
from praxis_lite.layers.stochastics import Dropout

_ALL = frozenset(
    {
        "atten_dropout_prob",
        "atten_logit_cap",
        "atten_mask",
        "attention_extra_logit",
        "attention_sinks",
        "cache",
        "float32_logits=False",
        "num_kv_heads",
        "paddings",
        "relative_bias_tpl",
        "segment_ids",
        "window",
        "window without is_causal",
        "zero_fully_masked",
    }
)
_SPLASH = frozenset(
    {
        "atten_logit_cap",
        "num_kv_heads",
        "paddings",
        "segment_ids",
        "window",
        "window without is_causal",
    }
)
# Settings and arguments that each kernel supports, in addition to plain and causal attention.
KERNELS: dict[str, frozenset[str]] = {
    "einsum": _ALL,
    "cudnn": frozenset({"num_kv_heads", "window"}),
    "splash": _SPLASH,
    "tokamax": _SPLASH,
    "chunked": _ALL
    - {
        "atten_dropout_prob",
        "atten_mask",
        "float32_logits=False",
        "relative_bias_tpl",
    },
    "blocked": _ALL - {"atten_dropout_prob", "atten_mask", "cache", "relative_bias_tpl"},
}
# Checkpoint name of attention outputs and of a kernel's other residuals.
CONTEXT = "context"
# Kernels that name their own residuals.
_NAMING = ("chunked", *SPLASHES)
# Minimum number of logits per head for which "auto" prefers the chunked kernel to the einsum.
CHUNKED_FROM = 4096 * 4096


@dataclasses.dataclass(frozen=True)
class Workload:
    """Properties of an attention call that determine which kernels support it.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      dtype: Dtype of the queries.
      num_queries: Length of the queries (T).
      num_keys: Length of the keys (S).
      dim_per_head: Size of each head (K).
    """

    platform: str
    dtype: Any
    num_queries: int
    num_keys: int
    dim_per_head: int


def choose_kernel(setting: str, needs: Iterable[str], work: Workload) -> tuple[str, str]:
    """Returns the name of the kernel to use, and the reason for the choice.

    "auto" selects the platform's kernel if it supports the call. Otherwise it selects the chunked
    kernel if there are many logits, and the einsum if not. It never selects "blocked", which is
    meant for platforms without a kernel and for cost estimates of compiled steps. Calls with a
    cache use the einsum or the chunked kernel, regardless of the setting, because their mask
    depends on positions.

    Args:
      setting: A name in KERNELS, or "auto".
      needs: Names of the options in use, as in KERNELS.
      work: Properties of the call.

    Raises:
      ConfigError: The selected kernel does not support the call. The message lists kernels that do.
    """
    needs = frozenset(needs)
    check_kernel(setting, {})
    if setting == "auto" or ("cache" in needs and "cache" not in KERNELS[setting]):
        return _auto(needs, work)
    check_kernel(setting, dict.fromkeys(needs, True))
    if obstacle := _obstacle(setting, needs, work):
        able = [name for name in KERNELS if not _obstacle(name, needs, work)]
        raise ConfigError(
            f"DotProductAttention.atten_kernel is {setting!r}, but {obstacle}. Choose one of "
            f"{able}, or 'auto'."
        )
    if setting == "splash" and splash_of(setting) is splash_of("tokamax"):
        return setting, "set by the user; from tokamax, because this jax version has none"
    return setting, "set by the user"


def check_kernel(setting: str, needs: Mapping[str, bool]) -> None:
    """Checks that a kernel exists, is installed and supports the options in use.

    Args:
      setting: A name in KERNELS, or "auto".
      needs: Whether each option is in use.

    Raises:
      ConfigError: The kernel does not exist, is not installed, or does not support an option on any
        platform. The message lists other kernels.
    """
    require_choice("DotProductAttention.atten_kernel", setting, ("auto", *KERNELS))
    if setting == "auto":
        return
    if setting in SPLASHES:
        require_splash(setting)
    used = {name for name, is_used in needs.items() if is_used}
    if missing := sorted(used - KERNELS[setting]):
        able = [name for name, options in KERNELS.items() if used <= options]
        raise ConfigError(
            f"DotProductAttention.atten_kernel is {setting!r}, which does not support "
            f"{' or '.join(missing)}. Choose one of {able}, or 'auto'."
        )


def _auto(needs: frozenset[str], work: Workload) -> tuple[str, str]:
    fused = {"gpu": "cudnn", "cuda": "cudnn", "tpu": "splash"}.get(work.platform)
    why_not = f"the default on {work.platform}"
    if fused is not None:
        obstacle = _obstacle(fused, needs, work)
        if obstacle is None:
            return fused, why_not
        why_not = obstacle
    if work.num_queries * work.num_keys >= CHUNKED_FROM:
        obstacle = _obstacle("chunked", needs, work)
        if obstacle is None:
            return "chunked", f"{why_not}, and the einsum would store many logits"
        why_not = f"{why_not}, and {obstacle}"
    return "einsum", why_not


def _obstacle(name: str, needs: frozenset[str], work: Workload) -> str | None:
    """Returns the reason why a kernel cannot be used, or None if it can."""
    if missing := sorted(needs - KERNELS[name]):
        return f"{name} does not support {' or '.join(missing)}"
    if name in SPLASHES and not splash_is_installed(name):
        return f"no {name} kernel is installed"
    if name == "cudnn":
        dtype, dims = jnp.dtype(work.dtype).name, work.dim_per_head
        if work.platform not in ("gpu", "cuda"):
            return f"cudnn requires a GPU, not {work.platform}"
        if dtype not in ("bfloat16", "float16"):
            return f"cudnn requires bfloat16 or float16, not {dtype}"
        if dims % 8 or dims > 128:
            return f"cudnn requires dims per head to be a multiple of 8 up to 128, not {dims}"
    return None


def attend(
    settings: AttentionSettings,
    q_BTNK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    mask: AttentionMask,
    *,
    has_cache: bool = False,
    bias: jax.Array | None = None,
    atten_mask: jax.Array | None = None,
    dropout: Dropout | None = None,
    key: jax.Array | None = None,
    split: SplitDims = None,
    sinks_N: jax.Array | None = None,
    dtype: Any = None,
    value_dims: int | None = None,
    is_part: bool = False,
) -> jax.Array:
    """Computes attention outputs [B, T, N, K] with the kernel that `choose_kernel` selects.

    Residuals for the backward pass have the checkpoint name "context". The splash, chunked and ring
    kernels assign the name themselves, so that the kernel runs only once if the policy saves
    "context". If "context" is offloaded to the host, the name is assigned here.

    Arguments that are not listed are those of `einsum_attention`.

    Args:
      settings: The layer's settings.
      has_cache: Whether keys and values come from a cache.
      split: Sharding of queries and outputs, [B, T, N, K].
      dtype: Dtype of the outputs. If None, the dtype of the queries.
      value_dims: Number of value dims without padding. If None, values are not padded.
      is_part: Whether this call runs on one device inside another `attend`, which then names
        offloaded activations.
    """
    is_context_offloaded = is_offloaded(CONTEXT)
    residual_name = None if is_context_offloaded else CONTEXT

    # Every path ends here. The outputs get their checkpoint name, unless the kernel has assigned it
    # or the enclosing `attend` will.
    def finish(encoded_BTNK: jax.Array, *, is_named: bool = False) -> jax.Array:
        encoded_BTNK = encoded_BTNK[..., :value_dims].astype(dtype or q_BTNK.dtype)
        encoded_BTNK = constrain(encoded_BTNK, split)
        has_name = is_part if is_context_offloaded else is_named
        return encoded_BTNK if has_name else named(encoded_BTNK, CONTEXT)

    # Time is sharded. `local_kernel` is used only if devices exchange heads, so that each has
    # complete sequences of some heads.
    if not has_cache and is_context_parallel(settings.context_parallel, split):
        if atten_mask is not None:
            raise ConfigError(
                f"DotProductAttention.context_parallel is {settings.context_parallel!r}, which "
                "does not support an atten_mask. Pass segment_ids or paddings instead, or set "
                "context_parallel=None to let the compiler shard attention along time."
            )
        local_kernel = functools.partial(attend, settings, dtype=dtype, is_part=True)
        encoded_BTNK = context_parallel_attention(
            settings,
            q_BTNK,
            k_BSGK,
            v_BSGK,
            mask,
            local_kernel,
            split=split,
            sinks_N=sinks_N,
            residual_name=residual_name,
        )
        return finish(encoded_BTNK, is_named=True)
    options, chunk_size = settings.options, settings.chunk_size
    drops = key is not None and dropout is not None and dropout.dropout_prob > 0.0
    # The options of this call, with their names in KERNELS. On a first read, skip to
    # `einsum_attention`, the reference for the other kernels.
    uses = {
        "atten_dropout_prob": drops,
        "atten_mask": atten_mask is not None,
        "attention_sinks": sinks_N is not None,
        "cache": has_cache,
        "num_kv_heads": q_BTNK.shape[2] != k_BSGK.shape[2],
        "paddings": mask.kv_visible_BS is not None,
        "relative_bias_tpl": bias is not None,
        "segment_ids": mask.q_segments_BT is not None,
        "window": mask.left_context is not None,
        "window without is_causal": mask.left_context is not None and mask.right_context != 0,
        **options.needs,
    }
    T, S, K = q_BTNK.shape[1], k_BSGK.shape[1], q_BTNK.shape[3]
    work = Workload(compiled_platform(), q_BTNK.dtype, T, S, K)
    needs = (need for need, used in uses.items() if used)
    name, reason = choose_kernel(settings.kernel, needs, work)
    log_choice(name, reason)
    args = q_BTNK, k_BSGK, v_BSGK, mask
    # Only the einsum supports dropout, an atten_mask and a bias.
    if name == "einsum":
        encoded_BTNK = einsum_attention(
            *args,
            options,
            bias=bias,
            atten_mask=atten_mask,
            dropout=dropout,
            key=key,
            sinks_N=sinks_N,
        )
        return finish(encoded_BTNK)

    def run_kernel(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: AttentionMask,
        sinks_N: jax.Array | None,
    ) -> jax.Array:
        args = q, k, v, mask, options
        if name == "blocked":
            return blocked_attention(*args, block_size=chunk_size, sinks_N=sinks_N)
        if name == "chunked":
            return chunked_attention(
                *args, chunk_size=chunk_size, sinks_N=sinks_N, residual_name=residual_name
            )
        if name == "cudnn":
            return cudnn_attention(*args, split=split)
        interpret = work.platform != "tpu"
        return splash_attention(
            *args, name=name, split=split, interpret=interpret, residual_name=residual_name
        )

    # JAX cannot infer the types of kernels or their gradients over Explicit axes.
    encoded_BTNK = untyped(run_kernel, *args, sinks_N, out=type_spec)
    return finish(encoded_BTNK, is_named=name in _NAMING)


@functools.cache
def log_choice(name: str, reason: str) -> None:
    """Logs the chosen kernel and the reason, once per process for each choice."""
    logging.getLogger(__name__).info("attention by the %s kernel: %s", name, reason)
