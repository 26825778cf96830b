"""Checks for attention layers: head sizes, and conflicting settings and arguments."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.layers.attention.masks import HIDE_LATER, LARGE_NEGATIVE
from praxis_lite.layers.base.calls import require_positive


class HeadSizes(NamedTuple):
    """Sizes for attention with N query heads and G key/value heads of K dims each.

    Attributes:
      input_dims: D for each of "query", "key" and "value".
      hidden_dim: Pax's hidden_dim. A query scale that is not learned is (hidden_dim / N)^-0.5 by
        default.
      N: Number of query heads.
      G: Number of key/value heads.
      K: Dims per head.
    """

    input_dims: dict[str, int]
    hidden_dim: int
    N: int
    G: int
    K: int


def head_sizes(
    layer: object,
    input_dim: int | Mapping[str, int],
    hidden_dim: int | None,
    num_heads: int,
    dim_per_head: int | None,
    num_kv_heads: int | None,
) -> HeadSizes:
    """Returns the head sizes of `layer`; see DotProductAttention for the other arguments.

    Raises:
      ConfigError: The settings conflict with each other.
    """
    name = type(layer).__name__
    inputs = ("query", "key", "value")
    if not isinstance(input_dim, Mapping):
        require_positive(layer, input_dim=input_dim)
        input_dim = dict.fromkeys(inputs, input_dim)
    if set(input_dim) != set(inputs):
        raise ConfigError(
            f"{name}.input_dim has the keys {sorted(input_dim)}; expected 'query', 'key' and "
            "'value', or a single integer."
        )
    require_positive(layer, **{f"input_dim[{key!r}]": dim for key, dim in input_dim.items()})
    hidden = input_dim["query"] if hidden_dim is None else hidden_dim
    require_positive(layer, num_heads=num_heads, hidden_dim=hidden)
    if dim_per_head is None and hidden % num_heads:
        raise ConfigError(
            f"{name}.num_heads is {num_heads}; expected a divisor of "
            f"{'input_dim' if hidden_dim is None else 'hidden_dim'} {hidden}. Change num_heads, or "
            "set dim_per_head."
        )
    K = hidden // num_heads if dim_per_head is None else dim_per_head
    G = num_heads if num_kv_heads is None else num_kv_heads
    require_positive(layer, dim_per_head=K, num_kv_heads=G)
    if num_heads % G:
        divisors = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise ConfigError(
            f"{name}.num_kv_heads is {G}, which does not divide num_heads {num_heads}. Choose one "
            f"of {divisors}."
        )
    return HeadSizes(dict(input_dim), hidden, num_heads, G, K)


def require_one_source(layer: object, has_one_source: bool) -> None:
    """Checks that a single matmul can compute queries, keys and values.

    Raises:
      ConfigError: Queries, keys and values require separate matmuls.
    """
    if not has_one_source:
        raise ConfigError(
            f"{type(layer).__name__}.combine_qkv computes queries, keys and values of the same "
            "shape from the same input. It cannot be combined with cross-attention, num_kv_heads "
            "or a separate input_dim per input. Set combine_qkv=False."
        )


def check_contexts(
    layer: object,
    is_causal: bool,
    is_cross_attention: bool,
    window: int | None,
    right_context: int | None,
) -> None:
    """Checks the settings that limit how far a token attends to the left and right.

    Raises:
      ConfigError: Two settings cannot be combined.
    """
    name = type(layer).__name__
    if window is not None:
        require_positive(layer, window=window)
    if is_cross_attention and (window is not None or right_context is not None):
        raise ConfigError(
            f"{name}.window and right_context limit self-attention, and cannot be combined with "
            "is_cross_attention=True. Omit them."
        )
    require(
        right_context is None or (right_context >= 0 and not is_causal),
        f"{name}.right_context",
        right_context,
        "a non-negative integer, together with is_causal=False",
    )


def require_one_segment(layer: object, cache: Any, segment_ids: jax.Array | None) -> None:
    """Checks that a call with a cache passes no segment ids, which the cache does not store.

    Raises:
      ConfigError: Segment ids are passed together with a cache.
    """
    if cache is not None and segment_ids is not None:
        raise ConfigError(
            f"{type(layer).__name__}: a cache cannot be combined with segment_ids, because each "
            "row of the cache is a single segment. Put each sequence in a separate row and omit "
            "segment_ids."
        )


def check_call(
    layer: Any,
    inputs: jax.Array,
    encoded: jax.Array | None,
    cache: Any,
    atten_mask: jax.Array | None,
    segment_ids: jax.Array | None,
) -> None:
    """Checks the arguments of a call: the keys to attend to, the cache and the mask.

    Raises:
      ConfigError: An argument is missing or invalid.
    """
    name = type(layer).__name__
    if layer.is_cross_attention and encoded is None and cache is None:
        raise ConfigError(
            f"{name} with is_cross_attention=True was called without `encoded` and without a "
            "cache that contains it. Pass encoded=[B, S, D]."
        )
    if atten_mask is not None and not jnp.issubdtype(atten_mask.dtype, jnp.floating):
        raise ConfigError(
            f"{name}: atten_mask is {atten_mask.dtype}; expected floats, as in Pax: 0.0 for "
            f"visible keys and LARGE_NEGATIVE ({LARGE_NEGATIVE:.3g}) for hidden keys. To convert "
            "bools, use jnp.where(is_visible, 0.0, LARGE_NEGATIVE), with LARGE_NEGATIVE from "
            "praxis_lite.layers.attention.masks."
        )
    setting = layer.tensor_parallel
    if atten_mask is not None and atten_mask.shape[1] > 1 and setting is not None and cache is None:
        raise ConfigError(
            f"{name}.tensor_parallel is {setting!r}, which does not support a different atten_mask "
            f"per head (its shape is {atten_mask.shape}). Pass a mask [B or 1, 1, 1 or T, S], or "
            "set tensor_parallel=None."
        )
    require_one_segment(layer, cache, segment_ids)
    attends_to_itself = not layer.is_cross_attention and encoded is None
    if atten_mask is not None and attends_to_itself and layer.refuses_mask:
        raise ConfigError(
            f"{name}.is_causal is True, but the call passes an atten_mask, which would replace the "
            f"causal mask, as in Pax. Omit is_causal, and {HIDE_LATER}."
        )
    if encoded is None:
        return
    if layer.combined_qkv is not None:
        raise ConfigError(
            f"{name}.combine_qkv computes keys and values from the inputs and cannot attend to "
            "`encoded`. Set combine_qkv=False."
        )
    if encoded.shape[0] != inputs.shape[0]:
        raise ConfigError(
            f"{name}: encoded has batch size {encoded.shape[0]} but inputs have batch size "
            f"{inputs.shape[0]}. Pass arrays with the same batch size."
        )
    if cache is not None and "encoded_visible" not in cache:
        raise ConfigError(
            f"{name}: the cache is for self-attention. Build the layer with "
            "is_cross_attention=True to store `encoded` in it."
        )
