"""Speculation: drafts of a row's next tokens from its own text, and which models can check them."""

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

# R rows, S places of a row, N longest n-gram, K drafts.


def drafts_of(
    history: jax.Array, lengths: jax.Array, longest_ngram: int, num_drafts: int
) -> jax.Array:
    """Returns int32 [R, K]: what followed the row's last tokens where they occurred before.

    Of all places in a row where an n-gram ends that also ends the row, the longest n-gram counts,
    up to N tokens, and of equally long ones the latest. What follows there is repeated if it is
    shorter than K. Where there is no such place, the last token is repeated. This is prompt lookup
    decoding (Saxena 2023).

    Args:
      history: int32 [R, S], the tokens of each row so far, and anything after them.
      lengths: int32 [R], how many tokens each row has, 1 or more.
    """
    num_places = history.shape[1]
    ends = jnp.arange(1, num_places + 1)  # Of n-grams, exclusive.
    is_equal, num_equal = True, jnp.zeros(history.shape, jnp.int32)
    for i in range(longest_ngram):
        last = jnp.take_along_axis(history, jnp.maximum(lengths - 1 - i, 0)[:, None], axis=1)
        # Shifted, so that each place has the token i before the n-gram's last.
        before = jnp.pad(history, ((0, 0), (i, 0)), constant_values=-1)[:, :num_places]
        is_equal &= before == last
        num_equal += is_equal
    scores = num_equal * (num_places + 1) + ends[None, :]
    scores = jnp.where(ends[None, :] < lengths[:, None], scores, 0)
    best = ends[jnp.argmax(scores, axis=1)]
    best = jnp.where(jnp.max(scores, axis=1) > num_places, best, lengths - 1)
    period = jnp.maximum(lengths - best, 1)[:, None]
    places = best[:, None] + jnp.arange(num_drafts)[None, :] % period
    return jnp.take_along_axis(history, jnp.clip(places, 0, num_places - 1), axis=1)


def check_takes_back(model: Any, setting: str, num_drafts: int) -> None:
    """Checks that tokens of the model's cache can be taken back, and that drafts disturb no others.

    Args:
      setting: that asks for drafts, for messages.
      num_drafts: its value.

    Raises:
      ConfigError: a layer's cache is a state that every token changes, or may keep padding; a
        window's cannot take so many tokens back; or a token sees later ones.
    """
    states = [jax.tree_util.keystr(path, simple=True, separator="/") for path in _states(model)]
    if states:
        raise ConfigError(
            f"{setting} needs a cache with a place for each token, so that wrong drafts can be "
            f"taken back; the model's cache has {', '.join(states[:3])}, which every token "
            f"changes, as a recurrent layer's does. Set {setting} to 0."
        )
    if names := layers_that_keep_padding(model):
        raise ConfigError(
            f"{setting} needs caches in which wrong drafts leave nothing; {', '.join(names)} does "
            f"not declare cache_skips_padding. Set {setting} to 0, or declare it "
            "(docs/how_to_add.md)."
        )
    for path, layer in layers_of(model):
        if isinstance(layer, DotProductAttention) and layer.left_context is not None:
            require(
                num_drafts <= SPARE_PLACES, setting, num_drafts,
                f"{SPARE_PLACES} or less: so many tokens can be taken back from the cache of "
                f"{'/'.join(map(str, path))}, which has a window",
            )
        if isinstance(layer, BaseLayer) and layer.couples_tokens is not None:
            raise ConfigError(
                f"{setting} needs tokens that do not depend on what follows them, but "
                f"{'/'.join(map(str, path))} has {layer.couples_tokens}: wrong drafts would change "
                f"what right ones give. Set {setting} to 0, or, of experts, dropless=True."
            )


def _states(model: Any) -> Iterator[Any]:
    """Yields the path of each leaf of a model's cache that has no place for each token.

    Found by asking for caches of two lengths. That of cross-attention has the length of the inputs,
    and no token changes it.
    """
    one, two = (jax.eval_shape(lambda n=n: model.init_cache(2, n)) for n in (1, 2))
    rows = jax.tree.leaves(batch_dims(model.init_cache))
    shapes = jax.tree_util.tree_flatten_with_path(one)[0]
    is_cross = {path[:-1] for path, _ in shapes if "encoded_visible" in str(path[-1])}
    for (path, a), b, row_dim in zip(shapes, jax.tree.leaves(two), rows, strict=True):
        if row_dim >= 0 and a.shape == b.shape and path[:-1] not in is_cross:
            yield path
