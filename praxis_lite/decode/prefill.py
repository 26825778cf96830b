"""The prompt's way into the cache: a single forward pass, or a pass for each chunk or token."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.collectives.varying import on_any_device, varying_alike
from praxis_lite.decode.decoder import Decoder, Prompts
from praxis_lite.decode.padding import layers_that_keep_padding, read, tell_of_slow_prompts
from praxis_lite.layers.base.variables import rebuilt
from praxis_lite.layers.embedding.rotary_scaling import DynamicRotary

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
        logits, cache = read_blocks(model, ids, lengths, cache, jnp.zeros((), jnp.int32), 1)
        return Prefix(logits, cache, None, max_steps(decoder, prompts))
    is_padding = jnp.arange(prompt_length)[None, :] >= lengths[:, None]
    paddings = is_padding.astype(jnp.float32)
    last = jnp.maximum(lengths - 1, 0)
    size = decoder.prefill_chunk_size if decoder.fprop_for_prefix else 1
    if size is None or (decoder.fprop_for_prefix and size >= prompt_length):
        positions = {}
        if reads_length(model):  # Of the text, which padding does not make longer.
            true = jnp.minimum(jnp.arange(prompt_length, dtype=jnp.int32), jnp.max(last))
            positions = {"positions": true[None, :]}
        logits, cache = model(ids, paddings=paddings, cache=cache, **positions)
        logits, logprobs = logits[jnp.arange(num_rows), last].astype(jnp.float32), None
    else:
        logits, cache, logprobs = _in_chunks(
            model, ids, paddings, last, cache, size, has_logprobs=not decoder.fprop_for_prefix
        )
    return Prefix(logits, cache, logprobs, max_steps(decoder, prompts))


def reads_length(model: Any) -> bool:
    """Returns True if a layer of the model has angles that depend on the length of the text."""
    module = getattr(model, "model", model)  # Of a ConditionedDecoder.
    return isinstance(module, nnx.Module) and any(
        isinstance(layer, DynamicRotary) for _, layer in nnx.compat.iter_modules(module)
    )


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
    model: Any, ids: jax.Array, lengths: jax.Array, cache: Any, start: jax.Array, size: int
) -> tuple[jax.Array, Any]:
    """Returns float32 logits [B, V] after each prompt, and the cache with its tokens in it.

    Args:
      ids: int32 [B, P].
      lengths: int32 [B].
      cache: with the first `start` tokens of the prompts in it.
      start: int32 [], a multiple of `size`, less than each length.
      size: tokens of a block; single tokens are read instead if a cache may keep padding.
    """
    size = 1 if layers_that_keep_padding(model) else size
    num_rows, length = ids.shape
    ids = jnp.pad(ids, ((0, 0), (0, -length % size)))
    end, rows = jnp.max(lengths), jnp.arange(num_rows)

    def goes_on(carry: tuple[jax.Array, jax.Array, Any]) -> jax.Array:
        return on_any_device(carry[0] < end)

    def read_block(carry: tuple[jax.Array, jax.Array, Any]) -> tuple[jax.Array, jax.Array, Any]:
        first, logits, cache = carry
        positions = first + jnp.arange(size, dtype=jnp.int32)[None, :]
        new, cache = read(
            model, jax.lax.dynamic_slice_in_dim(ids, first, size, axis=1), positions,
            (positions >= lengths[:, None]).astype(jnp.float32), cache,
        )
        place = lengths - 1 - first
        is_last = (place >= 0) & (place < size)
        newest = new[rows, jnp.clip(place, 0, size - 1)].astype(jnp.float32)
        return first + size, jnp.where(is_last[:, None], newest, logits), cache

    item = jax.eval_shape(lambda cache: rebuilt(model)(ids[:, :1], cache=cache)[0], cache)
    logits = jnp.zeros((num_rows, item.shape[-1]), jnp.float32)
    carry = varying_alike((jnp.asarray(start, jnp.int32), logits, cache), (ids, lengths))
    _, logits, cache = jax.lax.while_loop(goes_on, read_block, carry)
    return logits, cache


def _in_chunks(
    model: Any, ids: jax.Array, paddings: jax.Array, last: jax.Array, cache: Any, size: int,
    has_logprobs: bool,
) -> tuple[jax.Array, Any, jax.Array | None]:
    """Returns logits after each row's last token, the cache, and the prompts' log-probs or None."""
    (num_rows, length), rows = ids.shape, jnp.arange(ids.shape[0])

    def read_chunk(carry: tuple, start: jax.Array, size: int) -> tuple[tuple, jax.Array | None]:
        logits, cache = carry
        chunk, hidden = (
            jax.lax.dynamic_slice_in_dim(x, start, size, axis=1) for x in (ids, paddings)
        )
        positions = start + jnp.arange(size, dtype=jnp.int32)[None, :]
        new, cache = read(model, chunk, positions, hidden, cache)
        new, logprobs = new.astype(jnp.float32), None
        if has_logprobs:
            before = jnp.concatenate([logits[:, None], new[:, :-1]], axis=1)
            before = jax.nn.log_softmax(before, axis=-1)
            logprobs = jnp.take_along_axis(before, chunk[:, :, None], axis=2)[:, :, 0]
        # A row whose prompt is over keeps the logits of its last token.
        place = last - start
        newest = new[rows, jnp.clip(place, 0, size - 1)]
        return (jnp.where((place >= 0)[:, None], newest, logits), cache), logprobs

    item = jax.eval_shape(lambda cache: rebuilt(model)(ids[:, :1], cache=cache)[0], cache)
    logits = jnp.zeros((item.shape[0], item.shape[-1]), jnp.float32)
    carry, num_chunks = varying_alike((logits, cache), ids), length // size
    starts = size * jnp.arange(num_chunks, dtype=jnp.int32)
    carry, logprobs = jax.lax.scan(functools.partial(read_chunk, size=size), carry, starts)
    if length % size:  # Not padded to a whole chunk, which might not fit into the cache.
        carry, _ = read_chunk(carry, jnp.asarray(size * num_chunks, jnp.int32), length % size)
    if not has_logprobs:
        return *carry, None
    # Of single tokens.
    logprobs = jnp.swapaxes(logprobs, 0, 1).reshape(num_rows, length)
    has_logprob = (paddings == 0) & (jnp.arange(length) > 0)[None, :]
    return *carry, jnp.where(has_logprob, logprobs, 0.0)
