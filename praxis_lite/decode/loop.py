"""The decoding loop: appends a token per step to each row until all rows have ended."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from praxis_lite.core.collectives.varying import on_any_device, varying_alike
from praxis_lite.decode.cache_rows import batch_dims, repeat_rows
from praxis_lite.decode.decoder import Prompts
from praxis_lite.decode.prefill import Prefix, cache_length, prefill
from praxis_lite.decode.prefix_sharing import prefill_shared
from praxis_lite.decode.speculation import lookup_drafts
from praxis_lite.layers.base.variables import rebuilt

if TYPE_CHECKING:
    from praxis_lite.decode.sampling import Greedy

# B prompts, R rows (B x samples), P longest prompt, M maximum number of new tokens, V classes,
# S cache slots per row, T tokens per call of the model, K drafts.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The state of R sequences, each of which may be at a different step.

    The tokens generated for a row depend only on that row's entries, so rows can be added, removed
    and reordered between steps.

    Attributes:
      cache: The model's cache.
      logits: float32 [R, V], for each row's next token.
      positions: int32 [R], the position of each row's next token.
      keys: Random keys [R]. Each step folds the row's number of new tokens into its key.
      temperature: float32 [R].
      top_k: int32 [R] for a decoder with per-row settings, else None.
      top_p: float32 [R] for a decoder with per-row settings, else None.
      max_steps: int32 [R], the maximum number of new tokens.
      done: bool [R], True for rows that have ended and no longer change.
      output_ids: int32 [R, M], the new tokens, and 0 after the end.
      logprobs: float32 [R, M], log-probs of the new tokens, and 0 after the end.
      decode_lengths: int32 [R], the number of new tokens so far.
      in_prompt: bool [R, V], True for tokens that occur in the prompt; None without penalties.
      in_output: bool [R, V], True for tokens that occur in the output; None without penalties.
      history: int32 [R, S], the tokens in the prompt and the output, followed by arbitrary ids;
        None without speculation.
      num_model_steps: int32 [R], the number of model calls that computed the new tokens; None
        without speculation.
      num_shared: int32 [R], see `Prefix`; None without prefix sharing.
      likeliest: The likeliest tokens from recent steps, if the decoder stores them.
    """

    cache: Any
    logits: jax.Array
    positions: jax.Array
    keys: jax.Array
    temperature: jax.Array
    top_k: jax.Array | None
    top_p: jax.Array | None
    max_steps: jax.Array
    done: jax.Array
    output_ids: jax.Array
    logprobs: jax.Array
    decode_lengths: jax.Array
    in_prompt: jax.Array | None
    in_output: jax.Array | None
    history: jax.Array | None
    num_model_steps: jax.Array | None
    num_shared: jax.Array | None
    likeliest: Any = None


def sample_keys(keys: jax.Array, num_samples: int) -> jax.Array:
    """Returns a key for each row [R]: the prompt's key [B] with the sample's index folded in."""
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    return jax.vmap(lambda key: fold(key, jnp.arange(num_samples)))(keys).reshape(-1)


def start(
    decoder: "Greedy", model: Any, prompts: Prompts, prefix: Prefix | None = None
) -> tuple[DecodeState, jax.Array | None]:
    """Reads the prompts and returns the initial state of the loop.

    Args:
      decoder: The decoder.
      model: The model.
      prompts: Prompts with a key per row, [R], from `sample_keys`; R is a multiple of B.
      prefix: The model's state after the prompts. If None, the prompts are read here.

    Returns:
      (state, logprobs), where logprobs are the log-probs [B, P] of the prompts, or None; see
      `Prefix`.
    """
    decoder.check_model(model)
    if prefix is None:
        shares_prefix = decoder.num_cached_prefixes > 0 and len(prompts.ids) > 1
        prefix = (prefill_shared if shares_prefix else prefill)(decoder, model, prompts)
    decoder.check_vocabulary(prefix.logits.shape[-1])
    (num_prompts, prompt_length), num_rows = prompts.ids.shape, prompts.keys.shape[0]
    num_samples = num_rows // num_prompts

    # Row b x samples + s is sample s of prompt b.
    def repeat(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, num_samples, axis=0) if num_samples > 1 else x

    def setting(values: jax.Array | None, default: float, dtype: Any) -> jax.Array:
        values = jnp.full((num_prompts,), default) if values is None else values
        return repeat(jnp.asarray(values, dtype))

    # Penalties only: the classes that occur in each prompt and in each continuation.
    in_prompt = in_output = None
    if decoder.penalizes:
        num_classes = prefix.logits.shape[-1]
        is_prompt = jnp.arange(prompt_length)[None, :] < prompts.lengths[:, None]
        # Set padding to the out-of-range class V, which the scatter drops.
        ids = jnp.where(is_prompt, prompts.ids, num_classes)
        in_prompt = jnp.zeros((num_prompts, num_classes), bool)
        in_prompt = in_prompt.at[jnp.arange(num_prompts)[:, None], ids].set(True, mode="drop")
        in_prompt, in_output = repeat(in_prompt), jnp.zeros((num_rows, num_classes), bool)
    # Speculation only: each row's tokens, in which drafts are looked up.
    history = num_model_steps = None
    if decoder.num_speculative_tokens:
        num_after = cache_length(decoder, prompt_length) - prompt_length
        history = repeat(jnp.pad(prompts.ids, ((0, 0), (0, num_after))))
        num_model_steps = jnp.zeros((num_rows,), jnp.int32)
    # Prefix sharing only: the number of prompt tokens that were read for several prompts at once.
    num_shared = None
    if decoder.num_cached_prefixes:
        num_shared = prefix.num_shared
        num_shared = jnp.zeros_like(prompts.lengths) if num_shared is None else num_shared
        num_shared = repeat(num_shared)
    top_k = top_p = None
    if decoder.top_k is not None:
        top_k = setting(prompts.top_k, decoder.top_k, jnp.int32)
    if decoder.top_p is not None:
        top_p = setting(prompts.top_p, decoder.top_p, jnp.float32)
    # A row without a prompt has 0 steps, so it is done from the start.
    max_steps = repeat(prefix.max_steps)
    shape = (num_rows, decoder.max_decode_steps)
    state = DecodeState(
        cache=repeat_rows(prefix.cache, batch_dims(model.init_cache), num_samples),
        logits=repeat(prefix.logits),
        positions=repeat(prompts.lengths),
        keys=prompts.keys,
        temperature=setting(prompts.temperature, decoder.temperature, jnp.float32),
        top_k=top_k,
        top_p=top_p,
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
        likeliest=decoder.init_likeliest(prompts),
    )
    return state, prefix.logprobs


def advance(
    decoder: "Greedy",
    model: Any,
    state: DecodeState,
    num_steps: int | jax.Array,
    until_one_ends: bool | jax.Array = False,
) -> tuple[DecodeState, jax.Array]:
    """Runs up to `num_steps` steps of the loop.

    Each step calls the model once and appends a token to every row that has not ended. With
    speculation, it also appends the accepted drafts. The loop stops early when all rows have ended.

    Args:
      decoder: The decoder.
      model: The model.
      state: The state to start from.
      num_steps: Maximum number of steps.
      until_one_ends: Whether to stop as soon as any active row ends.

    Returns:
      The new state, and the number of steps that were run.
    """
    initially_done = state.done

    def is_active(carry: tuple[DecodeState, jax.Array]) -> jax.Array:
        state, t = carry
        one_ended = jnp.any(state.done & ~initially_done) & until_one_ends
        return on_any_device((t < num_steps) & ~jnp.all(state.done) & ~one_ended)

    def body(carry: tuple[DecodeState, jax.Array]) -> tuple[DecodeState, jax.Array]:
        state, t = carry
        take_step = speculative_step if decoder.num_speculative_tokens else step
        return take_step(decoder, model, state), t + 1

    return jax.lax.while_loop(is_active, body, (varying_alike(state), jnp.zeros((), jnp.int32)))


def step(decoder: "Greedy", model: Any, state: DecodeState) -> DecodeState:
    """Appends a token to each row that has not ended, and computes the next token's logits."""
    is_active, positions = ~state.done, state.positions
    new_ids, state = append_tokens(decoder, state, is_active)
    logits, cache = rebuilt(model)(
        new_ids[:, None], positions=positions[:, None], cache=state.cache
    )
    logits = jnp.where(is_active[:, None], logits[:, 0].astype(jnp.float32), state.logits)
    return dataclasses.replace(state, cache=cache, logits=logits)


def append_tokens(
    decoder: "Greedy", state: DecodeState, is_active: jax.Array, drafts: jax.Array | None = None
) -> tuple[jax.Array, DecodeState]:
    """Chooses a token from the logits and appends it to the active rows.

    The logits and the cache are not changed; the caller must update them.

    Args:
      decoder: Chooses the tokens.
      state: The current state.
      is_active: bool [R], True for rows to which a token is appended.
      drafts: int32 [R], or None. If given, a row is extended only if the chosen token equals its
        draft.

    Returns:
      The appended tokens, int32 [R] (0 for all other rows), and the new state.
    """
    index = jnp.arange(state.done.shape[0])
    new_ids = decoder.choose(decoder.penalized(state), state)
    is_active = is_active if drafts is None else is_active & (new_ids == drafts)
    new_ids = jnp.where(is_active, new_ids, 0)
    logprobs = jax.nn.log_softmax(state.logits, axis=-1)[index, new_ids]
    # Inactive rows write out of bounds, which the scatter drops.
    slot = jnp.where(is_active, state.decode_lengths, state.output_ids.shape[1])
    output_ids = state.output_ids.at[index, slot].set(new_ids, mode="drop")
    decode_lengths = state.decode_lengths + is_active
    has_ended = decode_lengths >= state.max_steps
    if decoder.eos_ids:
        has_ended |= decoder.is_eos(new_ids)
    if decoder.stop_sequences:
        has_ended |= ends_with_any(decoder.stop_sequences, output_ids, decode_lengths)
    in_output, history = state.in_output, state.history
    if in_output is not None:
        # Inactive rows have id 0, which must not count as an output.
        in_output = in_output.at[index, new_ids].max(is_active)
    if history is not None:
        position = jnp.where(is_active, state.positions, history.shape[1])
        history = history.at[index, position].set(new_ids, mode="drop")
    return new_ids, dataclasses.replace(
        state,
        positions=state.positions + is_active,
        done=state.done | (is_active & has_ended),
        output_ids=output_ids,
        logprobs=state.logprobs.at[index, slot].set(logprobs, mode="drop"),
        decode_lengths=decode_lengths,
        in_output=in_output,
        history=history,
        likeliest=decoder.update_likeliest(state),
    )


def speculative_step(decoder: "Greedy", model: Any, state: DecodeState) -> DecodeState:
    """Appends a token and the accepted drafts after it to each row that has not ended.

    The model reads the token and K drafts in a single call, which returns the logits after each of
    them. The next token is then chosen from the logits as in `step`. If it equals the first draft,
    this draft is accepted, and the second draft is checked in the same way. The outputs are
    therefore the same as with `step`.

    Rejected drafts remain in the cache until later tokens overwrite them, but no token attends to
    them. Near the end of a row, the model reads some tokens a second time, so that drafts do not
    extend past the last cache slot.
    """
    assert state.history is not None and state.num_model_steps is not None
    num_slots = state.history.shape[1]
    num_drafts = min(decoder.num_speculative_tokens, num_slots - 1)
    index, is_active, positions = jnp.arange(len(state.done)), ~state.done, state.positions
    num_model_steps = state.num_model_steps + is_active
    _, state = append_tokens(decoder, state, is_active)
    assert state.history is not None
    # Each row's history now ends with the new token. Drafts are written after it, and dropped
    # beyond the last slot.
    drafts_RK = lookup_drafts(state.history, state.positions, decoder.prompt_lookup_max, num_drafts)
    slots_RK = state.positions[:, None] + jnp.arange(num_drafts)[None, :]
    history = state.history.at[index[:, None], slots_RK].set(drafts_RK, mode="drop")
    first = jnp.minimum(positions, num_slots - 1 - num_drafts)
    positions_RT = first[:, None] + jnp.arange(1 + num_drafts)[None, :]
    logits_RTV, cache = rebuilt(model)(
        jnp.take_along_axis(history, positions_RT, axis=1),
        positions=positions_RT,
        cache=state.cache,
    )

    def logits_after(state: DecodeState, has_token: jax.Array) -> jax.Array:
        # Index in T of each row's last token.
        last = jnp.clip(state.positions - 1 - first, 0, num_drafts)
        return jnp.where(
            has_token[:, None], logits_RTV[index, last].astype(jnp.float32), state.logits
        )

    def has_draft(carry: tuple[DecodeState, jax.Array, jax.Array]) -> jax.Array:
        _, is_accepting, k = carry
        return on_any_device((k < num_drafts) & jnp.any(is_accepting))

    def accept_draft(
        carry: tuple[DecodeState, jax.Array, jax.Array],
    ) -> tuple[DecodeState, jax.Array, jax.Array]:
        state, is_accepting, k = carry
        # Append the next token if it equals the draft. Otherwise the row keeps its logits for the
        # next step.
        draft = jax.lax.dynamic_index_in_dim(drafts_RK, k, axis=1, keepdims=False)
        _, new = append_tokens(decoder, state, is_accepting, draft)
        is_accepted = new.decode_lengths > state.decode_lengths
        new = dataclasses.replace(new, logits=logits_after(new, is_accepted))
        return new, is_accepted & ~new.done, k + 1

    # The loop only compares tokens and does not call the model, so the cache is not in the carry.
    state = dataclasses.replace(
        state,
        cache=None,
        logits=logits_after(state, is_active),
        num_model_steps=num_model_steps,
    )
    # The carry is the state, whether each row still accepts drafts, and the index of the next
    # draft.
    carry = varying_alike((state, ~state.done), logits_RTV)
    carry = (*carry, jnp.zeros((), jnp.int32))
    state, _, _ = jax.lax.while_loop(has_draft, accept_draft, carry)
    return dataclasses.replace(state, cache=cache)


def ends_with_any(
    sequences: Sequence[Sequence[int]], output_ids: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Returns a bool array [R] that is True for rows whose output ends with one of `sequences`."""
    is_match = jnp.zeros(lengths.shape, bool)
    for sequence in sequences:
        last = lengths[:, None] + jnp.arange(-len(sequence), 0)[None, :]
        ids = jnp.take_along_axis(output_ids, jnp.maximum(last, 0), axis=1)
        is_match |= jnp.all((last >= 0) & (ids == jnp.asarray(sequence)[None, :]), axis=1)
    return is_match
