"""The loop: rows that start from prompts, and go on a token at a time until each has ended."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.decode.cache_rows import batch_dims, repeat_rows
from praxis_lite.decode.decoder import Decoder
from praxis_lite.decode.prefill import prefill
from praxis_lite.decode.rows import Rows
from praxis_lite.layers.base_layer import rebuilt
from praxis_lite.sharding.varying import on_any_device, varying_alike

# B prompts, R rows: B x samples, P longest prompt, M most new tokens, V classes.


def sample_keys(keys: jax.Array, num_samples: int) -> jax.Array:
    """Returns a key per row [R] from those of the prompts [B]: sample s has its number folded in.
    """
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    return jax.vmap(lambda key: fold(key, jnp.arange(num_samples)))(keys).reshape(-1)


def start(
    decoder: Decoder,
    model: Any,
    ids: jax.Array,
    prefix_lengths: jax.Array,
    keys: jax.Array,
    temperature: jax.Array | None = None,
    per_example_max_decode_steps: jax.Array | None = None,
) -> tuple[Rows, jax.Array | None]:
    """Returns rows after their prompts, and the prompts' log-probs if they came about.

    Args: as of `Decoder.__call__`, but with a key per row, [R]; R a multiple of the prompts.
    """
    prefix = prefill(decoder, model, ids, prefix_lengths, per_example_max_decode_steps)
    num_prompts, num_rows = ids.shape[0], keys.shape[0]
    num_samples = num_rows // num_prompts

    def repeat(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, num_samples, axis=0) if num_samples > 1 else x

    if temperature is None:
        temperature = jnp.full((num_prompts,), getattr(decoder, "temperature", 0.0), jnp.float32)
    in_prompt = in_output = None
    if decoder.penalizes:
        # A padding token counts for class V, which is none.
        num_classes = prefix.logits.shape[-1]
        is_true = jnp.arange(ids.shape[1])[None, :] < prefix_lengths[:, None]
        in_prompt = jnp.zeros((num_prompts, num_classes), bool)
        in_prompt = in_prompt.at[
            jnp.arange(num_prompts)[:, None], jnp.where(is_true, ids, num_classes)
        ].set(True, mode="drop")
        in_prompt, in_output = repeat(in_prompt), jnp.zeros((num_rows, num_classes), bool)
    max_steps = repeat(prefix.max_steps)
    shape = (num_rows, decoder.max_decode_steps)
    rows = Rows(
        cache=repeat_rows(prefix.cache, batch_dims(model.init_cache), num_samples),
        logits=repeat(prefix.logits),
        positions=repeat(prefix_lengths),
        keys=keys,
        temperature=repeat(jnp.asarray(temperature, jnp.float32)),
        max_steps=max_steps,
        done=max_steps <= 0,
        output_ids=jnp.zeros(shape, jnp.int32),
        logprobs=jnp.zeros(shape, jnp.float32),
        decode_lengths=jnp.zeros((num_rows,), jnp.int32),
        in_prompt=in_prompt,
        in_output=in_output,
    )
    return rows, prefix.logprobs


def advance(
    decoder: Decoder,
    model: Any,
    rows: Rows,
    num_steps: int | jax.Array,
    until_one_ends: bool | jax.Array = False,
) -> tuple[Rows, jax.Array]:
    """Returns the rows after at most `num_steps` more tokens each, and how many steps it took.

    Stops when every row has ended; with `until_one_ends` as soon as one more has.
    """
    before = rows.done

    def goes_on(carry: tuple[Rows, jax.Array]) -> jax.Array:
        rows, t = carry
        one_ended = jnp.any(rows.done & ~before) & until_one_ends
        return on_any_device((t < num_steps) & ~jnp.all(rows.done) & ~one_ended)

    def body(carry: tuple[Rows, jax.Array]) -> tuple[Rows, jax.Array]:
        rows, t = carry
        return step(decoder, model, rows), t + 1

    return jax.lax.while_loop(goes_on, body, (varying_alike(rows), jnp.zeros((), jnp.int32)))


def step(decoder: Decoder, model: Any, rows: Rows) -> Rows:
    """Returns the rows with one more token each, but for those that are done."""
    index, goes_on = jnp.arange(rows.done.shape[0]), ~rows.done
    new_ids = jnp.where(goes_on, decoder.choose(decoder.penalized(rows), rows), 0)
    logprobs = jax.nn.log_softmax(rows.logits, axis=-1)[index, new_ids]
    # A row that is done writes past the end, that is, nowhere.
    place = jnp.where(goes_on, rows.decode_lengths, rows.output_ids.shape[1])
    output_ids = rows.output_ids.at[index, place].set(new_ids, mode="drop")
    decode_lengths = rows.decode_lengths + goes_on
    ends = decode_lengths >= rows.max_steps
    if decoder.eos_ids:
        ends |= jnp.isin(new_ids, jnp.asarray(decoder.eos_ids, jnp.int32))
    if decoder.stop_sequences:
        ends |= ends_in(decoder.stop_sequences, output_ids, decode_lengths)
    in_output = rows.in_output
    if in_output is not None:
        in_output = in_output.at[index, new_ids].max(goes_on)
    logits, cache = rebuilt(model)(
        new_ids[:, None], positions=rows.positions[:, None], cache=rows.cache
    )
    return dataclasses.replace(
        rows,
        cache=cache,
        logits=jnp.where(goes_on[:, None], logits[:, 0].astype(jnp.float32), rows.logits),
        positions=rows.positions + goes_on,
        done=rows.done | ends,
        output_ids=output_ids,
        logprobs=rows.logprobs.at[index, place].set(logprobs, mode="drop"),
        decode_lengths=decode_lengths,
        in_output=in_output,
    )


def ends_in(
    sequences: Sequence[Sequence[int]], output_ids: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Returns bool [R]: whether the first `lengths` of the row's ids end in one of `sequences`."""
    found = jnp.zeros(lengths.shape, bool)
    for sequence in sequences:
        last = lengths[:, None] + jnp.arange(-len(sequence), 0)[None, :]
        ids = jnp.take_along_axis(output_ids, jnp.maximum(last, 0), axis=1)
        found |= jnp.all((last >= 0) & (ids == jnp.asarray(sequence)[None, :]), axis=1)
    return found
