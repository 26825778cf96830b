"""The loop: rows start from prompts and get a token at a time until each has ended."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.collectives.varying import on_any_device, varying_alike
from praxis_lite.decode.cache_rows import batch_dims, repeat_rows
from praxis_lite.decode.decoder import Decoder, Prompts
from praxis_lite.decode.prefill import Prefix, cache_length, prefill
from praxis_lite.decode.prefix_sharing import prefill_shared
from praxis_lite.decode.speculation import drafts_of
from praxis_lite.layers.base.variables import rebuilt

# B prompts, R rows: B x samples, P longest prompt, M most new tokens, V classes, S places of a
# row in the cache, T tokens that the model reads at once, K drafts.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The state of R sequences, each at its own step.

    A row's tokens depend on nothing but its own entries, so rows can leave, come and change
    places between steps.
    """

    cache: Any  # The model's.
    logits: jax.Array  # float32 [R, V], of each row's next token.
    positions: jax.Array  # int32 [R], where the next token goes.
    keys: jax.Array  # [R]; a step folds in how many tokens the row has.
    temperature: jax.Array  # float32 [R].
    top_k: jax.Array | None  # int32 [R], of a decoder that draws by each row's own; else None.
    top_p: jax.Array | None  # float32 [R], the same.
    max_steps: jax.Array  # int32 [R], the most new tokens.
    done: jax.Array  # bool [R]; such a row stays as it is.
    output_ids: jax.Array  # int32 [R, M], 0 after the end.
    logprobs: jax.Array  # float32 [R, M], 0 after the end.
    decode_lengths: jax.Array  # int32 [R], new tokens so far.
    in_prompt: jax.Array | None  # bool [R, V], the tokens that occurred; None without penalties.
    in_output: jax.Array | None  # The same, of the new tokens.
    # Of speculation, otherwise None: int32 [R, S], the tokens of prompt and output; anything after.
    history: jax.Array | None
    num_model_steps: jax.Array | None  # int32 [R], calls of the model that gave the new tokens.
    num_shared: jax.Array | None  # int32 [R], as of `Prefix`; None without shared prefixes.
    likeliest: Any = None  # Of the newest steps, where the decoder keeps them.


def sample_keys(keys: jax.Array, num_samples: int) -> jax.Array:
    """Returns a key per row [R]: that of its prompt [B], its sample's number folded in."""
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    return jax.vmap(lambda key: fold(key, jnp.arange(num_samples)))(keys).reshape(-1)


def start(
    decoder: Decoder, model: Any, prompts: Prompts, prefix: Prefix | None = None
) -> tuple[DecodeState, jax.Array | None]:
    """Returns the state after the prompts, and their log-probs [B, P] or None, as of `prefill`.

    Args:
      prompts: with a key per row, [R], from `sample_keys`; R is a multiple of B.
      prefix: the model's state after the prompts, if it is known.
    """
    decoder.check_model(model)
    if prefix is None:
        shares = decoder.num_cached_prefixes > 0 and len(prompts.ids) > 1
        prefix = (prefill_shared if shares else prefill)(decoder, model, prompts)
    decoder.check_vocabulary(prefix.logits.shape[-1])
    (num_prompts, prompt_length), num_rows = prompts.ids.shape, prompts.keys.shape[0]
    num_samples = num_rows // num_prompts

    def repeat(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, num_samples, axis=0) if num_samples > 1 else x

    def setting(name: str, dtype: Any) -> jax.Array | None:
        given, default = getattr(prompts, name), getattr(decoder, name)
        if default is None:
            return None
        given = jnp.full((num_prompts,), default) if given is None else given
        return repeat(jnp.asarray(given, dtype))

    in_prompt = in_output = None
    if decoder.penalizes:
        num_classes = prefix.logits.shape[-1]
        is_true = jnp.arange(prompt_length)[None, :] < prompts.lengths[:, None]
        # Padding counts for class V, which does not exist, and is dropped.
        ids = jnp.where(is_true, prompts.ids, num_classes)
        in_prompt = jnp.zeros((num_prompts, num_classes), bool)
        in_prompt = in_prompt.at[jnp.arange(num_prompts)[:, None], ids].set(True, mode="drop")
        in_prompt, in_output = repeat(in_prompt), jnp.zeros((num_rows, num_classes), bool)
    history = num_model_steps = None
    if decoder.num_speculative_tokens:
        num_after = cache_length(decoder, prompt_length) - prompt_length
        history = repeat(jnp.pad(prompts.ids, ((0, 0), (0, num_after))))
        num_model_steps = jnp.zeros((num_rows,), jnp.int32)
    num_shared = None
    if decoder.num_cached_prefixes:
        num_shared = prefix.num_shared
        num_shared = jnp.zeros_like(prompts.lengths) if num_shared is None else num_shared
        num_shared = repeat(num_shared)
    max_steps = repeat(prefix.max_steps)
    shape = (num_rows, decoder.max_decode_steps)
    state = DecodeState(
        cache=repeat_rows(prefix.cache, batch_dims(model.init_cache), num_samples),
        logits=repeat(prefix.logits),
        positions=repeat(prompts.lengths),
        keys=prompts.keys,
        temperature=setting("temperature", jnp.float32),
        top_k=setting("top_k", jnp.int32),
        top_p=setting("top_p", jnp.float32),
        max_steps=max_steps,
        done=max_steps <= 0,
        output_ids=jnp.zeros(shape, jnp.int32),
        logprobs=jnp.zeros(shape, jnp.float32),
        decode_lengths=jnp.zeros((num_rows,), jnp.int32),
        in_prompt=in_prompt,
        in_output=in_output,
        history=history,
        num_model_steps=num_model_steps,
        num_shared=num_shared,
        likeliest=decoder.no_likeliest(prompts),
    )
    return state, prefix.logprobs


def advance(
    decoder: Decoder, model: Any, state: DecodeState, num_steps: int | jax.Array,
    until_one_ends: bool | jax.Array = False,
) -> tuple[DecodeState, jax.Array]:
    """Returns the state after at most `num_steps` calls of the model, and the number of them.

    Each gives a row that is not done a token, and with speculation those drafts that are right.

    Stops when every row has ended; with `until_one_ends` as soon as one more has.
    """
    done_before = state.done

    def goes_on(carry: tuple[DecodeState, jax.Array]) -> jax.Array:
        state, t = carry
        one_ended = jnp.any(state.done & ~done_before) & until_one_ends
        return on_any_device((t < num_steps) & ~jnp.all(state.done) & ~one_ended)

    def body(carry: tuple[DecodeState, jax.Array]) -> tuple[DecodeState, jax.Array]:
        state, t = carry
        take = speculative_step if decoder.num_speculative_tokens else step
        return take(decoder, model, state), t + 1

    return jax.lax.while_loop(goes_on, body, (varying_alike(state), jnp.zeros((), jnp.int32)))


def step(decoder: Decoder, model: Any, state: DecodeState) -> DecodeState:
    """Returns the state with another token in each row that is not done."""
    goes_on, positions = ~state.done, state.positions
    new_ids, state = with_chosen(decoder, state, goes_on)
    logits, cache = rebuilt(model)(
        new_ids[:, None], positions=positions[:, None], cache=state.cache
    )
    logits = jnp.where(goes_on[:, None], logits[:, 0].astype(jnp.float32), state.logits)
    return dataclasses.replace(state, cache=cache, logits=logits)


def with_chosen(
    decoder: Decoder, state: DecodeState, goes_on: jax.Array, drafts: jax.Array | None = None
) -> tuple[jax.Array, DecodeState]:
    """Returns the tokens [R] that the logits give, and the state with them in the rows `goes_on`.

    The logits and the cache of the state are those before these tokens.

    Args:
      drafts: int32 [R]; only rows whose token is the draft's get it.
    """
    index = jnp.arange(state.done.shape[0])
    new_ids = decoder.choose(decoder.penalized(state), state)
    goes_on = goes_on if drafts is None else goes_on & (new_ids == drafts)
    new_ids = jnp.where(goes_on, new_ids, 0)
    logprobs = jax.nn.log_softmax(state.logits, axis=-1)[index, new_ids]
    # A row that is done writes past the end, which is dropped.
    place = jnp.where(goes_on, state.decode_lengths, state.output_ids.shape[1])
    output_ids = state.output_ids.at[index, place].set(new_ids, mode="drop")
    decode_lengths = state.decode_lengths + goes_on
    ends = decode_lengths >= state.max_steps
    if decoder.eos_ids:
        ends |= decoder.is_eos(new_ids)
    if decoder.stop_sequences:
        ends |= ends_in(decoder.stop_sequences, output_ids, decode_lengths)
    in_output, history = state.in_output, state.history
    if in_output is not None:
        in_output = in_output.at[index, new_ids].max(goes_on)
    if history is not None:
        position = jnp.where(goes_on, state.positions, history.shape[1])
        history = history.at[index, position].set(new_ids, mode="drop")
    return new_ids, dataclasses.replace(
        state,
        positions=state.positions + goes_on,
        done=state.done | (goes_on & ends),
        output_ids=output_ids,
        logprobs=state.logprobs.at[index, place].set(logprobs, mode="drop"),
        decode_lengths=decode_lengths,
        in_output=in_output,
        history=history,
        likeliest=decoder.with_likeliest(state),
    )


def speculative_step(decoder: Decoder, model: Any, state: DecodeState) -> DecodeState:
    """Returns the state with another token in each row that is not done, and its right drafts.

    The model reads the token and K drafts at once, and tokens are chosen from its logits as they
    are from those of one token, so that a draft counts if it is the token that was to be chosen.
    Wrong drafts stay in the cache until the tokens of later steps take their places: nothing
    attends to them before. Near a row's end the last tokens are read again, so that no draft is
    behind its last place.
    """
    num_places = state.history.shape[1]
    num_drafts = min(decoder.num_speculative_tokens, num_places - 1)
    index, goes_on, positions = jnp.arange(len(state.done)), ~state.done, state.positions
    _, state = with_chosen(decoder, state, goes_on)
    drafts_RK = drafts_of(state.history, state.positions, decoder.prompt_lookup_max, num_drafts)
    places_RK = state.positions[:, None] + jnp.arange(num_drafts)[None, :]
    history = state.history.at[index[:, None], places_RK].set(drafts_RK, mode="drop")
    first = jnp.minimum(positions, num_places - 1 - num_drafts)
    read_RT = first[:, None] + jnp.arange(1 + num_drafts)[None, :]
    logits_RTV, cache = rebuilt(model)(
        jnp.take_along_axis(history, read_RT, axis=1), positions=read_RT, cache=state.cache
    )

    def logits_after(state: DecodeState, has_token: jax.Array) -> jax.Array:
        last = jnp.clip(state.positions - 1 - first, 0, num_drafts)
        return jnp.where(
            has_token[:, None], logits_RTV[index, last].astype(jnp.float32), state.logits
        )

    def goes_on_with_drafts(carry: tuple[DecodeState, jax.Array, jax.Array]) -> jax.Array:
        _, accepts, k = carry
        return on_any_device((k < num_drafts) & jnp.any(accepts))

    def accept(
        carry: tuple[DecodeState, jax.Array, jax.Array]
    ) -> tuple[DecodeState, jax.Array, jax.Array]:
        state, accepts, k = carry
        draft = jax.lax.dynamic_index_in_dim(drafts_RK, k, axis=1, keepdims=False)
        _, new = with_chosen(decoder, state, accepts, draft)
        accepts = new.decode_lengths > state.decode_lengths
        new = dataclasses.replace(new, logits=logits_after(new, accepts))
        return new, accepts & ~new.done, k + 1

    state = dataclasses.replace(
        state, cache=None, logits=logits_after(state, goes_on),
        num_model_steps=state.num_model_steps + goes_on,
    )
    carry = varying_alike((state, ~state.done), logits_RTV)
    carry = (*carry, jnp.zeros((), jnp.int32))
    state, _, _ = jax.lax.while_loop(goes_on_with_drafts, accept, carry)
    return dataclasses.replace(state, cache=cache)


def ends_in(
    sequences: Sequence[Sequence[int]], output_ids: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Returns bool [R]: True if the first `lengths` of a row's ids end in any of `sequences`."""
    result = jnp.zeros(lengths.shape, bool)
    for sequence in sequences:
        last = lengths[:, None] + jnp.arange(-len(sequence), 0)[None, :]
        ids = jnp.take_along_axis(output_ids, jnp.maximum(last, 0), axis=1)
        result |= jnp.all((last >= 0) & (ids == jnp.asarray(sequence)[None, :]), axis=1)
    return result
