"""The prompt's way into the cache: a single forward pass, or a token at a time."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.collectives.varying import varying_alike
from praxis_lite.decode.decoder import Decoder, Prompts
from praxis_lite.layers.base_layer import rebuilt

# B batch, P longest prompt, V classes.


class Prefix(NamedTuple):
    """A model's state after its prompts."""

    logits: jax.Array  # float32 [B, V], of the token after each prompt.
    cache: Any  # With room for the new tokens.
    # float32 [B, P] of the prompts' own tokens, 0 for the first and for padding; None after one
    # forward pass, which would need [B, P, V] for them.
    logprobs: jax.Array | None
    max_steps: jax.Array  # int32 [B], the most new tokens of each row.


def cache_length(decoder: Decoder, prompt_length: int) -> int:
    """Returns how many tokens a row of the cache must hold."""
    expected = prompt_length + decoder.max_decode_steps
    return expected if decoder.seqlen is None else max(prompt_length, min(expected, decoder.seqlen))


def prefill(decoder: Decoder, model: Any, prompts: Prompts) -> Prefix:
    """Returns the model's state after the prompts.

    What padding leaves in an attention's cache is overwritten before anything attends to it,
    since a row's new tokens go to the positions right after its prompt; a recurrent layer skips
    it by `paddings`.
    """
    ids, lengths = prompts.ids, prompts.lengths
    num_rows, prompt_length = ids.shape
    cache = model.init_cache(num_rows, cache_length(decoder, prompt_length))
    cache = varying_alike(cache, ids)  # A layer may carry it through a loop.
    is_padding = jnp.arange(prompt_length)[None, :] >= lengths[:, None]
    paddings = is_padding.astype(jnp.float32)
    last = jnp.maximum(lengths - 1, 0)
    if decoder.fprop_for_prefix:
        logits, cache = model(ids, paddings=paddings, cache=cache)
        logits, logprobs = logits[jnp.arange(num_rows), last].astype(jnp.float32), None
    else:
        logits, cache, logprobs = _step_by_step(model, ids, paddings, last, cache)
    limits = jnp.full_like(lengths, decoder.max_decode_steps)
    if prompts.per_example_max_decode_steps is not None:
        limits = jnp.minimum(limits, prompts.per_example_max_decode_steps)
    if decoder.seqlen is not None:
        limits = jnp.minimum(limits, decoder.seqlen - lengths)
    return Prefix(logits, cache, logprobs, jnp.where(lengths > 0, limits, 0))


def _step_by_step(
    model: Any, ids: jax.Array, paddings: jax.Array, last: jax.Array, cache: Any
) -> tuple[jax.Array, Any, jax.Array]:
    """Returns logits after each row's last token, the cache, and the prompts' log-probs."""
    rows = jnp.arange(ids.shape[0])

    def step(carry: tuple, t: jax.Array) -> tuple[tuple, jax.Array]:
        logits, cache = carry
        logprobs = jax.nn.log_softmax(logits, axis=-1)[rows, ids[:, t]]
        new, cache = rebuilt(model)(
            ids[:, t][:, None], positions=jnp.full((ids.shape[0], 1), t, jnp.int32),
            paddings=paddings[:, t][:, None], cache=cache,
        )
        # A row whose prompt is over keeps the logits of its last token.
        logits = jnp.where((t <= last)[:, None], new[:, 0].astype(jnp.float32), logits)
        return (logits, cache), logprobs

    item = jax.eval_shape(lambda cache: rebuilt(model)(ids[:, :1], cache=cache)[0], cache)
    logits = jnp.zeros((item.shape[0], item.shape[-1]), jnp.float32)
    carry = varying_alike((logits, cache), ids)
    (logits, cache), logprobs = jax.lax.scan(step, carry, jnp.arange(ids.shape[1]))
    has_logprob = (paddings == 0) & (jnp.arange(ids.shape[1]) > 0)[None, :]
    return logits, cache, jnp.where(has_logprob, logprobs.T, 0.0)
