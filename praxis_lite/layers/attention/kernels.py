"""Which kernel computes attention, why, and the call of it."""

import dataclasses
import functools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.errors import ConfigError, did_you_mean
from praxis_lite.layers.attention import fused as attention_fused
from praxis_lite.layers.attention.chunks import chunked_attention
from praxis_lite.layers.attention.einsum import LogitOptions, einsum_attention
from praxis_lite.layers.attention.masks import AttentionMask
from praxis_lite.layers.stochastics import Dropout
from praxis_lite.sharding import SplitDims, compiled_platform

_ALL = frozenset(
    {
        "atten_dropout_prob",
        "atten_logit_cap",
        "atten_mask",
        "attention_extra_logit",
        "cache",
        "num_kv_heads",
        "paddings",
        "relative_bias_tpl",
        "segment_ids",
        "window",
        "window without is_causal",
        "zero_fully_masked",
    }
)
# What each kernel can do beside plain and causal attention, by the name of setting or argument.
KERNELS: dict[str, frozenset[str]] = {
    "einsum": _ALL,
    "dot_product": _ALL
    - {
        "atten_dropout_prob",
        "atten_logit_cap",
        "atten_mask",
        "attention_extra_logit",
        "zero_fully_masked",
    },
    "cudnn": frozenset({"num_kv_heads", "window"}),
    "splash": frozenset(
        {
            "atten_logit_cap",
            "num_kv_heads",
            "paddings",
            "segment_ids",
            "window",
            "window without is_causal",
        }
    ),
    "chunked": _ALL - {"atten_dropout_prob", "atten_mask", "relative_bias_tpl"},
}
# From so many logits per head on, chunks are worth their second pass.
CHUNKED_FROM = 4096 * 4096


@dataclasses.dataclass(frozen=True)
class Place:
    """Where and on what attention runs."""

    platform: str
    dtype: Any
    num_queries: int
    num_keys: int
    dim_per_head: int


def choose_kernel(setting: str, needs: Iterable[str], place: Place) -> tuple[str, str]:
    """Returns the kernel's name and the reason for it, as a sentence's end.

    "auto" is the hardware's own kernel where that can do what is needed, chunks where the logits
    would be many, otherwise the einsum. Calls with a cache, whose mask depends on the positions,
    take the einsum or chunks whatever kernel is set.

    Args:
      setting: a name in KERNELS, or "auto".
      needs: names of options in use, as in KERNELS.
      place: the platform ("cpu", "gpu", "tpu") and the sizes.

    Raises:
      ConfigError: the kernel that is set cannot do it; says which can.
    """
    needs = frozenset(needs)
    check_kernel(setting, {})
    if setting == "auto" or ("cache" in needs and "cache" not in KERNELS[setting]):
        return _auto(needs, place)
    check_kernel(setting, dict.fromkeys(needs, True))
    if obstacle := _obstacle(setting, needs, place):
        able = [name for name in KERNELS if not _obstacle(name, needs, place)]
        raise ConfigError(
            f"DotProductAttention.atten_kernel is {setting!r}, but {obstacle}. Choose one of "
            f"{able}."
        )
    return setting, "it is set"


def check_kernel(setting: str, needs: Mapping[str, bool]) -> None:
    """Checks a kernel's name, and that it can do what of `needs` is True, on some platform.

    Raises:
      ConfigError: otherwise.
    """
    if setting == "auto":
        return
    if setting not in KERNELS:
        raise ConfigError(
            f"DotProductAttention.atten_kernel is {setting!r}; wanted is one of "
            f"{['auto', *KERNELS]}.{did_you_mean(str(setting), ['auto', *KERNELS])}"
        )
    used = {name for name, is_used in needs.items() if is_used}
    if missing := sorted(used - KERNELS[setting]):
        able = [name for name, options in KERNELS.items() if used <= options]
        raise ConfigError(
            f"DotProductAttention.atten_kernel is {setting!r}, which cannot do "
            f"{' or '.join(missing)}. Choose one of {able}, or 'auto'."
        )


def _auto(needs: frozenset[str], place: Place) -> tuple[str, str]:
    own = {"gpu": "cudnn", "cuda": "cudnn", "tpu": "splash"}.get(place.platform)
    why_not = f"the {place.platform} has none of its own"
    if own is not None:
        why_not = _obstacle(own, needs, place)
        if why_not is None:
            return own, f"it is the {place.platform}'s own"
    if place.num_queries * place.num_keys >= CHUNKED_FROM:
        obstacle = _obstacle("chunked", needs, place)
        if obstacle is None:
            return "chunked", f"{why_not}, and the logits would be many"
        why_not = f"{why_not}, and {obstacle}"
    return "einsum", why_not


def _obstacle(name: str, needs: frozenset[str], place: Place) -> str | None:
    """Returns why a kernel cannot run, or None."""
    if missing := sorted(needs - KERNELS[name]):
        return f"{name} cannot do {' or '.join(missing)}"
    if name == "cudnn":
        if place.platform not in ("gpu", "cuda"):
            return f"cudnn runs on a GPU, not on {place.platform}"
        if jnp.dtype(place.dtype) not in (jnp.dtype("bfloat16"), jnp.dtype("float16")):
            return f"cudnn takes bfloat16 or float16, not {jnp.dtype(place.dtype).name}"
        if place.dim_per_head % 8 or place.dim_per_head > 128:
            return f"cudnn takes heads of a multiple of 8 up to 128 dims, not {place.dim_per_head}"
    return None


def attend(
    setting: str,
    q_BTNK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    mask: AttentionMask,
    options: LogitOptions,
    *,
    has_cache: bool = False,
    bias: jax.Array | None = None,
    atten_mask: jax.Array | None = None,
    dropout: Dropout | None = None,
    key: jax.Array | None = None,
    chunk_size: int = 512,
    split: SplitDims = None,
) -> jax.Array:
    """Returns the attended values [B, T, N, K] by the kernel that `choose_kernel` names.

    Arguments are `einsum_attention`'s; and `split`, the layout of q [B, T, N, K].
    """
    drops = key is not None and dropout is not None and dropout.dropout_prob > 0.0
    uses = {
        "atten_dropout_prob": drops,
        "atten_mask": atten_mask is not None,
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
    place = Place(compiled_platform(), q_BTNK.dtype, T, S, K)
    name, reason = choose_kernel(setting, (need for need, used in uses.items() if used), place)
    _log_once(name, reason)
    args = q_BTNK, k_BSGK, v_BSGK, mask, options
    if name == "chunked":
        return chunked_attention(*args, chunk_size=chunk_size)
    if name == "dot_product":
        return attention_fused.dot_product_attention(*args, bias=bias)
    if name == "cudnn":
        return attention_fused.cudnn_attention(*args, split=split)
    if name == "splash":
        interpret = place.platform != "tpu"
        return attention_fused.splash_attention(*args, split=split, interpret=interpret)
    return einsum_attention(*args, bias=bias, atten_mask=atten_mask, dropout=dropout, key=key)


@functools.cache
def _log_once(name: str, reason: str) -> None:
    logging.getLogger("praxis_lite").info("attention by the %s kernel: %s", name, reason)
