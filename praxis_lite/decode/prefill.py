"""Prefill: reads prompts into the cache, in one forward pass or in chunks."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.core.collectives.varying import on_any_device, varying_alike
from praxis_lite.decode.decoder import Decoder, Prompts
from praxis_lite.decode.prompt_padding import (
    layers_of,
    layers_that_keep_padding,
    log_slow_prefill,
    read,
)
from praxis_lite.layers.base.variables import rebuilt
from praxis_lite.layers.embedding.rotary_scaling import DynamicRotary

__all__ = ("cache_length", "prefill")

# B batch, P longest prompt, V classes.


class Prefix(NamedTuple):
    """A model's state after prefill.

    Attributes:
      logits: float32 [B, V], logits of the token after each prompt.
      cache: The model's cache, with room for the new tokens.
      logprobs: float32 [B, P], log-probs of the prompt tokens, and 0 for the first token and for
        padding. None unless prompts were read a token at a time, because a single pass would need
        an array [B, P, V].
      max_steps: int32 [B], the maximum number of new tokens for each row.
      num_shared: int32 [B], the number of prompt tokens that were read once for several prompts;
        None without prefix sharing.
    """

    logits: jax.Array
    cache: Any
    logprobs: jax.Array | None
    max_steps: jax.Array
    num_shared: jax.Array | None = None


def cache_length(decoder: Decoder, prompt_length: int) -> int:
    """Returns the number of token slots that a row of the cache needs."""
    length = prompt_length + decoder.max_decode_steps
    return length if decoder.seqlen is None else max(prompt_length, min(length, decoder.seqlen))


def prefill(decoder: Decoder, model: Any, prompts: Prompts) -> Prefix:
    """Returns the model's state after reading the prompts.

    Padding must not affect the continuation. An attention cache may store padding, because new
    tokens are stored directly after the prompt and overwrite padding before any token attends to
    it. Recurrent layers and the ring buffers of local attention use `paddings` to skip padding. If
    a layer does not declare that it skips padding, prompts are read a token at a time, and the
    cache rows of prompts that have ended are restored after each token.
    """
    ids, lengths = prompts.ids, prompts.lengths
    num_rows, prompt_length = ids.shape
    cache = model.init_cache(num_rows, cache_length(decoder, prompt_length))
    cache = varying_alike(cache, ids)  # A layer may carry the cache through a loop.
    if decoder.fprop_for_prefix and (names := layers_that_keep_padding(model)):
        log_slow_prefill(tuple(names))
        logits, cache, _ = read_blocks(model, ids, lengths, cache, 0, 1)
        return Prefix(logits, cache, None, max_steps(decoder, prompts))
    is_padding = jnp.arange(prompt_length)[None, :] >= lengths[:, None]
    paddings = is_padding.astype(jnp.float32)
    last = jnp.maximum(lengths - 1, 0)
    size = decoder.prefill_chunk_size if decoder.fprop_for_prefix else 1
    if size is None or (decoder.fprop_for_prefix and size >= prompt_length):
        options: dict[str, jax.Array] = {}
        # The angles of dynamic rotary embeddings depend on the largest position, which must not be
        # the position of padding.
        if any(isinstance(layer, DynamicRotary) for _, layer in layers_of(model)):
            clipped = jnp.minimum(jnp.arange(prompt_length, dtype=jnp.int32), jnp.max(last))
            options = {"positions": clipped[None, :]}
        logits, cache = model(ids, paddings=paddings, cache=cache, **options)
        logits, logprobs = logits[jnp.arange(num_rows), last].astype(jnp.float32), None
    else:
        rest = prompt_length % size
        logits, cache, logprobs = read_blocks(
            model,
            ids[:, : prompt_length - rest],
            lengths,
            cache,
            0,
            size,
            has_logprobs=not decoder.fprop_for_prefix,
        )
        if rest:  # Read a shorter last chunk, because a padded chunk might not fit into the cache.
            first = prompt_length - rest
            positions = jnp.arange(first, prompt_length, dtype=jnp.int32)[None, :]
            new, cache = read(model, ids[:, first:], positions, paddings[:, first:], cache)
            newest = new[jnp.arange(num_rows), jnp.maximum(last - first, 0)].astype(jnp.float32)
            logits = jnp.where((last >= first)[:, None], newest, logits)
    return Prefix(logits, cache, logprobs, max_steps(decoder, prompts))


def max_steps(decoder: Decoder, prompts: Prompts) -> jax.Array:
    """Returns the maximum number of new tokens per row, int32 [B]; 0 for rows without a prompt."""
    lengths = prompts.lengths
    limits = jnp.full_like(lengths, decoder.max_decode_steps)
    if prompts.per_example_max_decode_steps is not None:
        limits = jnp.minimum(limits, prompts.per_example_max_decode_steps)
    if decoder.seqlen is not None:
        limits = jnp.minimum(limits, decoder.seqlen - lengths)
    return jnp.where(lengths > 0, limits, 0)


def read_blocks(
    model: Any,
    ids: jax.Array,
    lengths: jax.Array,
    cache: Any,
    start: jax.Array | int,
    size: int,
    *,
    has_logprobs: bool = False,
) -> tuple[jax.Array, Any, jax.Array | None]:
    """Reads prompt tokens from `start` on into the cache, one block per forward pass.

    Args:
      model: The model.
      ids: int32 [B, P], the prompts, padded on the right.
      lengths: int32 [B], the length of each prompt.
      cache: Cache with the first `start` tokens of the prompts.
      start: int32 scalar, a multiple of `size` that is smaller than each length.
      size: Number of tokens per block. If a layer's cache may store padding, each block has one
        token.
      has_logprobs: Whether to return log-probs; requires size=1.

    Returns:
      (logits, cache, logprobs): logits of the token after each prompt, float32 [B, V]; the cache
      with all tokens; and log-probs of the prompt tokens, float32 [B, P], with 0 for the first
      token and for padding, or None.
    """
    size = 1 if layers_that_keep_padding(model) else size
    num_rows, length = ids.shape
    ids = jnp.pad(ids, ((0, 0), (0, -length % size)))
    end, rows = jnp.minimum(jnp.max(lengths), ids.shape[1]), jnp.arange(num_rows)

    def has_block(carry: tuple) -> jax.Array:
        return on_any_device(carry[0] < end)

    def read_block(carry: tuple) -> tuple:
        first, logits, cache, logprobs = carry
        positions = first + jnp.arange(size, dtype=jnp.int32)[None, :]
        new, cache = read(
            model,
            jax.lax.dynamic_slice_in_dim(ids, first, size, axis=1),
            positions,
            (positions >= lengths[:, None]).astype(jnp.float32),
            cache,
        )
        # With a block of one token, the logits of the previous block predict this token.
        if logprobs is not None:
            new_logprobs = jax.nn.log_softmax(logits, axis=-1)[rows, ids[:, first]]
            new_logprobs = jnp.where((first > 0) & (first < lengths), new_logprobs, 0.0)
            logprobs = logprobs.at[:, first].set(new_logprobs)
        # Rows whose prompt ended in an earlier block keep the logits of their last token.
        last = lengths - 1 - first
        newest = new[rows, jnp.clip(last, 0, size - 1)].astype(jnp.float32)
        logits = jnp.where((last >= 0)[:, None], newest, logits)
        return first + size, logits, cache, logprobs

    # Only the number of classes is needed, for the initial logits.
    shape = jax.eval_shape(lambda cache: rebuilt(model)(ids[:, :1], cache=cache)[0], cache).shape
    logits = jnp.zeros((num_rows, shape[-1]), jnp.float32)
    logprobs = jnp.zeros(ids.shape, jnp.float32) if has_logprobs else None
    start = jnp.asarray(start, jnp.int32)
    carry = varying_alike((start, logits, cache, logprobs), (ids, lengths))
    return jax.lax.while_loop(has_block, read_block, carry)[1:]
