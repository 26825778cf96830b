"""Speculative decoding: prompt lookup, and a check that a model can reject drafts."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.decode.cache_rows import batch_dims
from praxis_lite.decode.prompt_padding import layers_of, layers_that_keep_padding
from praxis_lite.layers.attention.attentions import DotProductAttention
from praxis_lite.layers.attention.kv_cache import SPARE_PLACES
from praxis_lite.layers.base.base_layer import BaseLayer

# R rows, S slots per row, N longest n-gram, K drafts.


def lookup_drafts(
    history: jax.Array, lengths: jax.Array, longest_ngram: int, num_drafts: int
) -> jax.Array:
    """Drafts the next tokens of each row by prompt lookup decoding (Saxena 2023).

    This function looks up the n-gram formed by the last n tokens in the row, for the largest n <= N
    for which this n-gram also occurs earlier in the row. If there are several earlier occurrences,
    the latest is used. The drafts are the K tokens after this occurrence. If fewer than K tokens
    follow, those tokens are repeated periodically. If even the last token does not occur earlier,
    all drafts are equal to that token.

    Args:
      history: int32 [R, S], the tokens of each row so far, and arbitrary ids after them.
      lengths: int32 [R], the number of tokens in each row, at least 1.
      longest_ngram: Maximum length of the n-gram, N.
      num_drafts: Number of drafts, K.

    Returns:
      The drafts, int32 [R, K].
    """
    num_slots = history.shape[1]
    ends = jnp.arange(1, num_slots + 1)  # Candidate ends of the earlier n-gram, exclusive.
    is_equal: bool | jax.Array = True
    num_equal = jnp.zeros(history.shape, jnp.int32)
    for i in range(longest_ngram):
        last = jnp.take_along_axis(history, jnp.maximum(lengths - 1 - i, 0)[:, None], axis=1)
        # Shift the history, to compare the i-th token from the end of each candidate n-gram.
        shifted = jnp.pad(history, ((0, 0), (i, 0)), constant_values=-1)[:, :num_slots]
        is_equal &= shifted == last
        num_equal += is_equal
    # Order by the length of the match first, then by position.
    scores = num_equal * (num_slots + 1) + ends[None, :]
    scores = jnp.where(ends[None, :] < lengths[:, None], scores, 0)
    best = ends[jnp.argmax(scores, axis=1)]
    best = jnp.where(jnp.max(scores, axis=1) > num_slots, best, lengths - 1)
    period = jnp.maximum(lengths - best, 1)[:, None]
    slots = best[:, None] + jnp.arange(num_drafts)[None, :] % period
    return jnp.take_along_axis(history, jnp.clip(slots, 0, num_slots - 1), axis=1)


def check_supports_drafts(model: Any, setting: str, num_drafts: int) -> None:
    """Checks that rejected drafts can be removed from the cache and do not affect other tokens.

    Args:
      model: The model.
      setting: Name of the setting that enables drafts, for error messages.
      num_drafts: Value of the setting.

    Raises:
      ConfigError: A layer has a recurrent state, has a cache that may store padding, cannot remove
        this many tokens from the ring buffer of a local window, or lets tokens depend on later
        tokens.
    """
    states = [jax.tree_util.keystr(path, simple=True, separator="/") for path in _states(model)]
    if states:
        raise ConfigError(
            f"{setting} requires a cache with a slot for each token, to remove rejected drafts. "
            "Every token changes these entries of the model's cache, as in a recurrent layer: "
            f"{', '.join(states[:3])}. Set {setting} to 0."
        )
    if names := layers_that_keep_padding(model):
        raise ConfigError(
            f"{setting} requires caches from which rejected drafts can be removed, but these "
            f"layers do not declare cache_skips_padding: {', '.join(names)}. Set {setting} to 0, "
            "or declare it (docs/how_to_add.md)."
        )
    for path, layer in layers_of(model):
        if isinstance(layer, DotProductAttention) and layer.left_context is not None:
            require(
                num_drafts <= SPARE_PLACES,
                setting,
                num_drafts,
                f"at most {SPARE_PLACES}, the number of tokens that can be removed from the cache "
                f"of {'/'.join(map(str, path))}, which has a local window",
            )
        if isinstance(layer, BaseLayer) and layer.couples_tokens is not None:
            raise ConfigError(
                f"{setting} requires a model in which tokens do not depend on later tokens, but "
                f"{'/'.join(map(str, path))} has {layer.couples_tokens}, so rejected drafts would "
                f"affect other tokens. Set {setting} to 0, or use dropless=True for experts."
            )


def _states(model: Any) -> Iterator[Any]:
    """Yields the path of each cache leaf whose size does not depend on the length of the cache.

    The cache of cross-attention is excluded, because it is constant and as long as the inputs.
    """
    short, long = (jax.eval_shape(lambda n=n: model.init_cache(2, n)) for n in (1, 2))
    rows = jax.tree.leaves(batch_dims(model.init_cache))
    shapes = jax.tree_util.tree_flatten_with_path(short)[0]
    is_cross = {path[:-1] for path, _ in shapes if "encoded_visible" in str(path[-1])}
    for (path, a), b, row_dim in zip(shapes, jax.tree.leaves(long), rows, strict=True):
        if row_dim >= 0 and a.shape == b.shape and path[:-1] not in is_cross:
            yield path
