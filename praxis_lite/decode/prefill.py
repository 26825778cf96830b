"""Reads prompts into the cache: in a single forward pass, or in a pass per chunk or token."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.core.collectives.varying import on_any_device, varying_alike
from praxis_lite.decode.decoder import Decoder, Prompts
from praxis_lite.decode.prompt_padding import (
    layers_of,
    layers_that_keep_padding,
    read,
    tell_of_slow_prompts,
)
from praxis_lite.layers.base.variables import rebuilt
from praxis_lite.layers.embedding.rotary_scaling import DynamicRotary

__all__ = ("cache_length", "prefill")

# B batch, P longest prompt, V classes.


class Prefix(NamedTuple):
    """A model's state after its prompts."""

    logits: jax.Array  # float32 [B, V], of the token after each prompt.
    cache: Any  # With room for the new tokens.
    # float32 [B, P] of the prompts' own tokens, 0 for the first and for padding; None after one
    # forward pass, which would need [B, P, V] for them.
    logprobs: jax.Array | None
    max_steps: jax.Array  # int32 [B], the most new tokens of each row.
    # int32 [B], tokens of each prompt that were read for others too; None if that is not tried.
    num_shared: jax.Array | None = None


def cache_length(decoder: Decoder, prompt_length: int) -> int:
    """Returns how many tokens a row of the cache must hold."""
    expected = prompt_length + decoder.max_decode_steps
    return expected if decoder.seqlen is None else max(prompt_length, min(expected, decoder.seqlen))


def prefill(decoder: Decoder, model: Any, prompts: Prompts) -> Prefix:
    """Returns the model's state after the prompts.

    What padding leaves in an attention's cache is overwritten before anything attends to it,
    since a row's new tokens go to the positions right after its prompt; a recurrent layer skips
    it by `paddings`, and so does a window's ring. If a layer does not declare that it skips
    padding, the prompts are read a token at a time, and rows that have ended keep their cache.
    """
    ids, lengths = prompts.ids, prompts.lengths
    num_rows, prompt_length = ids.shape
    cache = model.init_cache(num_rows, cache_length(decoder, prompt_length))
    cache = varying_alike(cache, ids)  # A layer may carry it through a loop.
    if decoder.fprop_for_prefix and (names := layers_that_keep_padding(model)):
        tell_of_slow_prompts(tuple(names))
        logits, cache, _ = read_blocks(model, ids, lengths, cache, 0, 1)
        return Prefix(logits, cache, None, max_steps(decoder, prompts))
    is_padding = jnp.arange(prompt_length)[None, :] >= lengths[:, None]
    paddings = is_padding.astype(jnp.float32)
    last = jnp.maximum(lengths - 1, 0)
    size = decoder.prefill_chunk_size if decoder.fprop_for_prefix else 1
    if size is None or (decoder.fprop_for_prefix and size >= prompt_length):
        positions = {}
        # These angles depend on the length of the text, which padding does not make longer.
        if any(isinstance(layer, DynamicRotary) for _, layer in layers_of(model)):
            true = jnp.minimum(jnp.arange(prompt_length, dtype=jnp.int32), jnp.max(last))
            positions = {"positions": true[None, :]}
        logits, cache = model(ids, paddings=paddings, cache=cache, **positions)
        logits, logprobs = logits[jnp.arange(num_rows), last].astype(jnp.float32), None
    else:
        rest = prompt_length % size
        logits, cache, logprobs = read_blocks(
            model, ids[:, : prompt_length - rest], lengths, cache, 0, size,
            has_logprobs=not decoder.fprop_for_prefix,
        )
        if rest:  # Not padded to a complete chunk, which might not fit into the cache.
            first = prompt_length - rest
            positions = jnp.arange(first, prompt_length, dtype=jnp.int32)[None, :]
            new, cache = read(model, ids[:, first:], positions, paddings[:, first:], cache)
            newest = new[jnp.arange(num_rows), jnp.maximum(last - first, 0)].astype(jnp.float32)
            logits = jnp.where((last >= first)[:, None], newest, logits)
    return Prefix(logits, cache, logprobs, max_steps(decoder, prompts))


def max_steps(decoder: Decoder, prompts: Prompts) -> jax.Array:
    """Returns int32 [B], the most new tokens of each row; 0 if it is to be left empty."""
    lengths = prompts.lengths
    limits = jnp.full_like(lengths, decoder.max_decode_steps)
    if prompts.per_example_max_decode_steps is not None:
        limits = jnp.minimum(limits, prompts.per_example_max_decode_steps)
    if decoder.seqlen is not None:
        limits = jnp.minimum(limits, decoder.seqlen - lengths)
    return jnp.where(lengths > 0, limits, 0)


def read_blocks(
    model: Any, ids: jax.Array, lengths: jax.Array, cache: Any, start: jax.Array | int, size: int,
    *, has_logprobs: bool = False,
) -> tuple[jax.Array, Any, jax.Array | None]:
    """Returns float32 logits [B, V] after each prompt, and the cache with its tokens in it.

    The third result is None or, with `has_logprobs`, the log-probs of the prompts' tokens, float32
    [B, P], 0 for the first and for padding.

    Args:
      ids: int32 [B, P].
      lengths: int32 [B].
      cache: with the first `start` tokens of the prompts in it.
      start: int32 [], a multiple of `size`, less than each length.
      size: tokens of a block; single tokens are read instead if a cache may keep padding.
      has_logprobs: needs blocks of a single token.
    """
    size = 1 if layers_that_keep_padding(model) else size
    num_rows, length = ids.shape
    ids = jnp.pad(ids, ((0, 0), (0, -length % size)))
    end, rows = jnp.minimum(jnp.max(lengths), ids.shape[1]), jnp.arange(num_rows)

    def goes_on(carry: tuple) -> jax.Array:
        return on_any_device(carry[0] < end)

    def read_block(carry: tuple) -> tuple:
        first, logits, cache, logprobs = carry
        positions = first + jnp.arange(size, dtype=jnp.int32)[None, :]
        new, cache = read(
            model, jax.lax.dynamic_slice_in_dim(ids, first, size, axis=1), positions,
            (positions >= lengths[:, None]).astype(jnp.float32), cache,
        )
        if logprobs is not None:
            new_logprobs = jax.nn.log_softmax(logits, axis=-1)[rows, ids[:, first]]
            new_logprobs = jnp.where((first > 0) & (first < lengths), new_logprobs, 0.0)
            logprobs = logprobs.at[:, first].set(new_logprobs)
        # A row whose prompt has ended keeps the logits of its last token.
        place = lengths - 1 - first
        newest = new[rows, jnp.clip(place, 0, size - 1)].astype(jnp.float32)
        logits = jnp.where((place >= 0)[:, None], newest, logits)
        return first + size, logits, cache, logprobs

    item = jax.eval_shape(lambda cache: rebuilt(model)(ids[:, :1], cache=cache)[0], cache)
    logits = jnp.zeros((num_rows, item.shape[-1]), jnp.float32)
    logprobs = jnp.zeros(ids.shape, jnp.float32) if has_logprobs else None
    start = jnp.asarray(start, jnp.int32)
    carry = varying_alike((start, logits, cache, logprobs), (ids, lengths))
    return jax.lax.while_loop(goes_on, read_block, carry)[1:]
