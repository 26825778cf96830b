"""Decoders that choose one token per step: greedy decoding and sampling."""

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.decode.decoder import Decoder, Outputs, Prompts, TokenizerIds, is_token
from praxis_lite.decode.likely_logits import nucleus_end
from praxis_lite.decode.loop import DecodeState, advance, sample_keys, start

# B prompts, S samples per prompt, R = B x S rows, V classes, C candidates (V, or k).


@dataclasses.dataclass(frozen=True, kw_only=True)
class Greedy(Decoder):
    """Chooses the most likely token at each step.

    Attributes:
      repetition_penalty: Factor that divides positive logits and multiplies negative logits, for
        tokens that occur in the prompt or the output; 1 disables the penalty (Keskar et al. 2019,
        arXiv:1909.05858).
      presence_penalty: Number that is subtracted from the logits of tokens that occur in the
        output.
      stop_sequences: Token sequences. A row ends when its output ends with one of these sequences.
        In Pax, this is an `eos_id` of rank 2.
      stop_strings: Strings that end a row; may contain special tokens. A stop string is removed
        together with all text after it. Requires a task with a tokenizer, which encodes the stop
        strings as stop sequences. The text also ends at a stop string that the model generates in a
        different tokenization.
      num_cache_slots: If positive, prompt datasets are decoded by continuous batching with this
        number of rows: as soon as a row is free, it is assigned to the next prompt. If 0, datasets
        are decoded batch by batch, and each batch takes as long as its longest row. (The name is
        from Pax.)
      num_speculative_tokens: Number of draft tokens to verify in each model call, in addition to
        the next token of each row; 0 disables speculation. Drafts are the tokens that followed an
        earlier occurrence of the row's last tokens in the prompt or the output (prompt lookup,
        called "ngram" in vLLM). Drafts that differ from the decoder's choice are rejected, so the
        output does not change, except for rounding. Speculation is useful for repetitive text. With
        speculation, the outputs also contain `num_model_steps`.
      prompt_lookup_max: Maximum number of a row's last tokens to look up. If there is no match,
        fewer tokens are looked up.
      num_cached_prefixes: If positive, the model reads a common prefix of several prompts, such as
        a system prompt, only once. The length of the prefix is rounded down to a multiple of
        prefill_chunk_size (of 64 if prefill_chunk_size is None). Within a batch, the common prefix
        of all prompts is shared, and its length is returned as the output `num_shared`. Continuous
        batching uses an LRU cache with this number of prefixes, each of which uses as much memory
        as a row.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    stop_strings: tuple[str, ...] = ()
    num_cache_slots: int = 0
    num_speculative_tokens: int = 0
    prompt_lookup_max: int = 3
    num_cached_prefixes: int = 0

    def __post_init__(self):
        # JSON and the command line pass lists.
        lists, strings, sequences = list | tuple, self.stop_strings, self.stop_sequences
        self._require(
            "stop_strings",
            isinstance(strings, lists) and all(isinstance(x, str) and x for x in strings),
            "a sequence of nonempty strings",
        )
        self._require(
            "stop_sequences",
            isinstance(sequences, lists)
            and all(isinstance(x, lists) and x and all(map(is_token, x)) for x in sequences),
            "sequences of at least one token",
        )
        object.__setattr__(self, "stop_strings", tuple(strings))
        sequences = (x if isinstance(x, tuple) else tuple(x) for x in sequences)
        object.__setattr__(self, "stop_sequences", tuple(sequences))
        super().__post_init__()
        self._require("repetition_penalty", 0 < self.repetition_penalty < math.inf, "more than 0")
        self._require("presence_penalty", math.isfinite(self.presence_penalty), "a finite number")
        self._require("num_cache_slots", self.num_cache_slots >= 0, "0 (batches) or more")
        self._require("num_speculative_tokens", self.num_speculative_tokens >= 0, "0 or more")
        self._require("prompt_lookup_max", self.prompt_lookup_max >= 1, "1 or more")
        num = self.num_cached_prefixes
        self._require(
            "num_cached_prefixes",
            num == 0 or (num > 0 and self.fprop_for_prefix),
            "0 or more; 0 with fprop_for_prefix=False, which reads a token at a time",
        )

    def check_vocabulary(self, size: int, of_tokenizer: Collection[int] = ()) -> None:
        super().check_vocabulary(size, of_tokenizer)
        for sequence in self.stop_sequences:
            if not isinstance(sequence, TokenizerIds):
                self._check_tokens("stop_sequences", sequence, size)

    @property
    def num_hyps(self) -> int:
        return 1

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0

    def choose(self, logits: jax.Array, state: DecodeState) -> jax.Array:
        """Chooses a token per row, int32 [R], given the logits [R, V] from `penalized`."""
        del state
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def init_likeliest(self, prompts: Prompts) -> Any:
        """Returns the initial `DecodeState.likeliest`, or None for decoders that do not use it."""
        del prompts

    def update_likeliest(self, state: DecodeState) -> Any:
        """Returns `DecodeState.likeliest` after adding the likeliest tokens for the next step."""
        return state.likeliest

    def penalized(self, state: DecodeState) -> jax.Array:
        """Returns the logits with penalties, and -inf for EOS tokens before min_decode_steps."""
        logits = state.logits
        if self.repetition_penalty != 1.0:
            assert state.in_prompt is not None and state.in_output is not None
            reduced = jnp.where(
                logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty
            )
            logits = jnp.where(state.in_prompt | state.in_output, reduced, logits)
        if self.presence_penalty != 0.0:
            assert state.in_output is not None
            logits = logits - self.presence_penalty * state.in_output
        if self.min_decode_steps and self.eos_ids:
            is_early = (state.decode_lengths < self.min_decode_steps)[:, None]
            is_eos = self.is_eos(jnp.arange(logits.shape[-1]))
            logits = jnp.where(is_early & is_eos[None, :], -jnp.inf, logits)
        return logits

    def gumbel(self, state: DecodeState, shape: tuple[int, ...]) -> jax.Array:
        """Returns Gumbel noise [R, C], derived from each row's key and number of new tokens."""

        def draw(key: jax.Array, step: jax.Array) -> jax.Array:
            return jax.random.gumbel(jax.random.fold_in(key, step), shape[1:])

        return jax.vmap(draw)(state.keys, state.decode_lengths)

    def decode(self, model: Any, prompts: Prompts) -> Outputs:
        """Implements `__call__`; the score of a continuation is the sum of its log-probs.

        With speculation, the outputs also include num_model_steps, int32 [B, S], the number of
        model calls that computed the new tokens. With prefix sharing, the outputs include
        num_shared, int32 [B, S], the number of prompt tokens in the shared prefix.
        """
        prompts = prompts._replace(keys=sample_keys(prompts.keys, self.num_hyps))
        state, prefix_logprobs = start(self, model, prompts)
        state, _ = advance(self, model, state, self.max_decode_steps)
        names = ["output_ids", "decode_lengths", "logprobs"]
        names += ["num_model_steps"] if self.num_speculative_tokens else []
        names += ["num_shared"] if self.num_cached_prefixes else []
        outputs = self.outputs_of({name: getattr(state, name) for name in names})
        if prefix_logprobs is not None:
            outputs["prefix_logprobs"] = prefix_logprobs
        return outputs

    def outputs_of(self, finished: Outputs) -> Outputs:
        """Reshapes finished rows [B x S, ...] to outputs [B, S, ...], and adds their scores."""
        outputs = {name: x.reshape(-1, self.num_hyps, *x.shape[1:]) for name, x in finished.items()}
        outputs["scores"] = jnp.sum(outputs["logprobs"], axis=-1)
        return outputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample(Greedy):
    """Samples each token from the model's distribution, optionally filtered by k, p and min_p.

    The filters apply to the model's probabilities after penalties: first k, then p to the remaining
    k tokens, then min_p. As in Pax, the temperature only applies to the candidates that remain.
    Other libraries apply the temperature before the filters.

    Attributes:
      num_samples: Number of continuations per prompt; the prompt is read only once.
      temperature: Temperature of the distribution; 0 chooses the most likely token.
      k: Number of most likely tokens to sample from, or 0 to sample from all tokens.
      p: Threshold for nucleus sampling: tokens are sampled from the smallest set of most likely
        tokens whose total probability exceeds p, or from all tokens if None (Holtzman et al. 2020,
        arXiv:1904.09751).
      min_p: Minimum probability of tokens to sample from, as a fraction of the probability of the
        most likely token (Nguyen et al. 2024, arXiv:2407.01082).
      sort_samples: Whether to sort the samples for a prompt by their scores, best first.
    """

    num_samples: int = 1
    temperature: float = 1.0
    k: int = 40
    p: float | None = None
    min_p: float = 0.0
    sort_samples: bool = True

    def __post_init__(self):
        super().__post_init__()
        self._require("num_samples", self.num_samples >= 1, "1 or more")
        self._require(
            "temperature", 0.0 <= self.temperature < math.inf, "0 (the most likely token) or more"
        )
        self._require("k", self.k >= 0, "0 (all) or more")
        self._require("p", self.p is None or 0.0 < self.p <= 1.0, "None (all), or 0 < p <= 1")
        self._require("min_p", 0.0 <= self.min_p <= 1.0, "0 <= min_p <= 1")

    @property
    def num_hyps(self) -> int:
        return self.num_samples

    def choose(self, logits: jax.Array, state: DecodeState) -> jax.Array:
        if self.temperature > 0:
            return self._draw(logits, state)
        # Avoid the cost of sampling unless some row overrides the temperature.
        return jax.lax.cond(
            jnp.any(state.temperature > 0),
            lambda: self._draw(logits, state),
            lambda: super(Sample, self).choose(logits, state),
        )

    def _draw(self, logits: jax.Array, state: DecodeState) -> jax.Array:
        logits_RC, ids_RC = self.candidates(logits)
        logits_RC += state.temperature[:, None] * self.gumbel(state, logits_RC.shape)
        chosen_R1 = jnp.argmax(logits_RC, axis=-1, keepdims=True)
        if ids_RC is not None:
            chosen_R1 = jnp.take_along_axis(ids_RC, chosen_R1, axis=-1)
        return chosen_R1[:, 0].astype(jnp.int32)

    def candidates(self, logits: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Returns the candidates' logits and ids, both [R, C].

        Logits of excluded candidates are -inf. Ids are None if the candidates are all V classes in
        order.
        """
        ids_RC = None
        if 0 < self.k < logits.shape[-1]:
            logits, ids_RC = jax.lax.top_k(logits, self.k)
        if self.p is not None and self.p < 1.0:
            logits = jnp.where(logits < nucleus_end(logits, self.p), -jnp.inf, logits)
        if self.min_p > 0.0:
            highest = jnp.max(logits, axis=-1, keepdims=True)
            logits = jnp.where(logits < highest + math.log(self.min_p), -jnp.inf, logits)
        return logits, ids_RC

    def outputs_of(self, finished: Outputs) -> Outputs:
        outputs = super().outputs_of(finished)
        if not self.sort_samples or self.num_samples == 1:
            return outputs
        order_BS = jax.lax.top_k(outputs["scores"], self.num_samples)[1]
        return {
            name: jax.vmap(lambda x, order: x[order])(x, order_BS) for name, x in outputs.items()
        }
