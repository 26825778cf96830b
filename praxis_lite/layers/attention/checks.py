"""Checks of attention layers: sizes of heads, and contradictory settings and arguments."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.layers.attention.masks import HIDE_LATER, LARGE_NEGATIVE
from praxis_lite.layers.base.calls import require_positive


class HeadSizes(NamedTuple):
    """N heads of queries and G heads of keys and values, with K dims each.

    Attributes:
      input_dims: D of "query", "key" and "value".
      hidden_dim: Pax's hidden_dim; without a learned scale, queries are scaled by hidden_dim / N.
      N: Number of heads of queries.
      G: Number of heads of keys and values.
      K: Dims per head.
    """

    input_dims: dict[str, int]
    hidden_dim: int
    N: int
    G: int
    K: int


def head_sizes(
    layer: object, input_dim: int | Mapping[str, int], hidden_dim: int | None, num_heads: int,
    dim_per_head: int | None, num_kv_heads: int | None,
) -> HeadSizes:
    """Returns the sizes of the heads of `layer`; arguments are settings of DotProductAttention.

    Raises:
      ConfigError: The settings contradict each other.
    """
    name = type(layer).__name__
    inputs = ("query", "key", "value")
    if not isinstance(input_dim, Mapping):
        require_positive(layer, input_dim=input_dim)
        input_dim = dict.fromkeys(inputs, input_dim)
    if set(input_dim) != set(inputs):
        raise ConfigError(
            f"{name}.input_dim has the keys {sorted(input_dim)}; expected query, key and value, "
            "or one integer."
        )
    require_positive(layer, **{f"input_dim[{which!r}]": dim for which, dim in input_dim.items()})
    hidden = input_dim["query"] if hidden_dim is None else hidden_dim
    require_positive(layer, num_heads=num_heads, hidden_dim=hidden)
    if dim_per_head is None and hidden % num_heads:
        raise ConfigError(
            f"{name}: {num_heads} heads do not divide the {hidden} "
            f"{'input' if hidden_dim is None else 'hidden'} dims. Set dim_per_head, or change "
            "num_heads."
        )
    K = hidden // num_heads if dim_per_head is None else dim_per_head
    G = num_heads if num_kv_heads is None else num_kv_heads
    require_positive(layer, dim_per_head=K, num_kv_heads=G)
    if num_heads % G:
        divisors = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise ConfigError(
            f"{name}.num_kv_heads is {G}, which does not divide the {num_heads} heads. Set it to "
            f"one of {divisors}."
        )
    return HeadSizes(dict(input_dim), hidden, num_heads, G, K)


def require_one_source(layer: object, is_one: bool) -> None:
    """Checks that queries, keys and values can be computed by a single product.

    Raises:
      ConfigError: They cannot.
    """
    if not is_one:
        raise ConfigError(
            f"{type(layer).__name__}.combine_qkv requires queries, keys and values of the same "
            "shape from one input: no cross-attention, num_kv_heads or input_dim per input. Set "
            "combine_qkv=False."
        )


def check_contexts(
    layer: object, is_causal: bool, is_cross_attention: bool, window: int | None,
    right_context: int | None,
) -> None:
    """Checks the settings for how far a token sees, before and after it.

    Raises:
      ConfigError: Two settings exclude each other.
    """
    name = type(layer).__name__
    if window is not None:
        require_positive(layer, window=window)
    if is_cross_attention and (window is not None or right_context is not None):
        raise ConfigError(
            f"{name}: window and right_context limit self-attention, but "
            "is_cross_attention=True attends to other inputs. Omit them."
        )
    require(
        right_context is None or (right_context >= 0 and not is_causal), f"{name}.right_context",
        right_context, "0 or more, with is_causal=False",
    )


def require_one_segment(layer: object, cache: Any, segment_ids: jax.Array | None) -> None:
    """Checks that a call with a cache has no segments, because a cache has no segment ids.

    Raises:
      ConfigError: It has.
    """
    if cache is not None and segment_ids is not None:
        raise ConfigError(
            f"{type(layer).__name__}: the call passes both a cache and segment_ids. With a cache, "
            "a row is one segment: put each sequence in its own row, and omit segment_ids."
        )


def check_call(
    layer: Any, inputs: jax.Array, encoded: jax.Array | None, cache: Any,
    atten_mask: jax.Array | None, segment_ids: jax.Array | None,
) -> None:
    """Checks that a call has keys to attend to, and a valid cache and mask.

    Raises:
      ConfigError: One of them is missing or invalid.
    """
    name = type(layer).__name__
    if layer.is_cross_attention and encoded is None and cache is None:
        raise ConfigError(
            f"{name} with is_cross_attention=True was called without `encoded` and without a "
            "cache that has it. Pass encoded=[B, S, D]."
        )
    if atten_mask is not None and not jnp.issubdtype(atten_mask.dtype, jnp.floating):
        raise ConfigError(
            f"{name}: atten_mask is {atten_mask.dtype}; expected floats, as in Pax: 0.0 for "
            f"visible keys and LARGE_NEGATIVE ({LARGE_NEGATIVE:.3g}) for hidden ones, such as "
            "jnp.where(is_seen, 0.0, LARGE_NEGATIVE) of praxis_lite.layers.attention.masks."
        )
    how = layer.tensor_parallel
    if atten_mask is not None and atten_mask.shape[1] > 1 and how is not None and cache is None:
        raise ConfigError(
            f"{name}.tensor_parallel is {how!r}, which does not support an atten_mask with a "
            f"dim of heads (its shape is {atten_mask.shape}); expected [B or 1, 1, 1 or T, S]. Or "
            "set tensor_parallel=None."
        )
    require_one_segment(layer, cache, segment_ids)
    attends_to_itself = not layer.is_cross_attention and encoded is None
    if atten_mask is not None and attends_to_itself and layer.refuses_mask:
        raise ConfigError(
            f"{name}.is_causal is True, but the call passes an atten_mask, which as in Pax would "
            f"be the only mask. Omit is_causal, and {HIDE_LATER}."
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
            f"{name}: encoded has {encoded.shape[0]} rows but inputs have {inputs.shape[0]}; "
            "they must match."
        )
    if cache is not None and "encoded_visible" not in cache:
        raise ConfigError(
            f"{name}: the cache is for self-attention. Build the layer with "
            "is_cross_attention=True to store `encoded` in it."
        )
