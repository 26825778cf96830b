"""Decoding token by token: greedy, or drawn from the likely tokens."""

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.decode.decoder import Decoder, Outputs, Prompts, TokenizerIds, is_token
from praxis_lite.decode.likely_logits import nucleus_end
from praxis_lite.decode.loop import DecodeState, advance, sample_keys, start

# B prompts, S samples of each, R = B x S rows, V classes, C candidates (V, or the k most likely).


@dataclasses.dataclass(frozen=True, kw_only=True)
class Greedy(Decoder):
    """Takes the most likely token of each step.

    Attributes:
      repetition_penalty: what the logit of a token that has occurred, in the prompt or after it,
        is divided by if positive and multiplied by if negative; 1: no penalty (Keskar et al.
        2019, arXiv:1909.05858).
      presence_penalty: subtracted from the logit of a token that occurred after the prompt.
      stop_sequences: token sequences of which each, once a row ends in it, ends the row. They may
        not reach back into the prompt. Pax has them as `eos_id` of rank 2.
      stop_strings: Texts that end a row, and are cut off with what follows them; they may name
        special tokens. For a task with a tokenizer: encoded they are stop sequences; a text that
        other tokens spell is cut too.
      num_cache_slots: Pax's name. More than 0: a dataset of prompts is decoded by continuous
        batching in that many rows, each taken by the next prompt as soon as it is free; 0: batch
        by batch, each of which takes as long as its longest row.
      num_speculative_tokens: drafts that each call of the model checks in addition to a row's next
        token: the tokens that followed the row's last tokens where they occurred before, in its
        prompt or after it (prompt lookup, vLLM's "ngram"). Those that the decoder would have chosen
        itself are kept, so the tokens are the same, except for the rounding of a product of several
        tokens instead of one. It pays where texts repeat themselves; outputs then have
        `num_model_steps`. 0: none.
      prompt_lookup_max: most last tokens that are looked for; fewer, if these did not occur.
      num_cached_prefixes: more than 0: a prefix that prompts have in common, such as a system
        prompt, goes through the model once, in blocks of prefill_chunk_size tokens (None: 64), of
        which complete ones are shared. In a batch it is the prefix of all prompts; outputs then
        have `num_shared`, its tokens. Continuous batching caches so many prefixes, each of which
        takes a row's memory, and drops the least recently used.
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
        sequences = (x if isinstance(x, tuple) else tuple(x) for x in self.stop_sequences)
        object.__setattr__(self, "stop_sequences", tuple(sequences))
        if not isinstance(self.stop_strings, str):
            object.__setattr__(self, "stop_strings", tuple(self.stop_strings))
        super().__post_init__()
        self._require("repetition_penalty", 0 < self.repetition_penalty < math.inf, "more than 0")
        self._require("presence_penalty", math.isfinite(self.presence_penalty), "a finite number")
        self._require(
            "stop_sequences", all(x and all(map(is_token, x)) for x in self.stop_sequences),
            "sequences of at least one token",
        )
        self._require(
            "stop_strings", not isinstance(self.stop_strings, str) and all(self.stop_strings),
            "a sequence of texts that are not empty",
        )
        self._require("num_cache_slots", self.num_cache_slots >= 0, "0 (batches) or more")
        self._require("num_speculative_tokens", self.num_speculative_tokens >= 0, "0 or more")
        self._require("prompt_lookup_max", self.prompt_lookup_max >= 1, "1 or more")
        num = self.num_cached_prefixes
        self._require(
            "num_cached_prefixes", num == 0 or (num > 0 and self.fprop_for_prefix),
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
        """Returns a token per row, [R], from logits [R, V] of `penalized`."""
        del state
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def no_likeliest(self, prompts: Prompts) -> Any:
        """Returns the initial `DecodeState.likeliest`; None unless a decoder stores them."""
        del prompts

    def with_likeliest(self, state: DecodeState) -> Any:
        """Returns `DecodeState.likeliest` with the likeliest tokens of the next step."""
        return state.likeliest

    def penalized(self, state: DecodeState) -> jax.Array:
        """Returns the logits that are chosen from: penalties, and no end before its time."""
        logits = state.logits
        if self.repetition_penalty != 1.0:
            lowered = jnp.where(
                logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty
            )
            logits = jnp.where(state.in_prompt | state.in_output, lowered, logits)
        if self.presence_penalty != 0.0:
            logits = logits - self.presence_penalty * state.in_output
        if self.min_decode_steps and self.eos_ids:
            is_early = (state.decode_lengths < self.min_decode_steps)[:, None]
            is_eos = self.is_eos(jnp.arange(logits.shape[-1]))
            logits = jnp.where(is_early & is_eos[None, :], -jnp.inf, logits)
        return logits

    def gumbel(self, state: DecodeState, shape: tuple[int, int]) -> jax.Array:
        """Returns the noise [R, C] of a step, from each row's own key and step."""

        def draw(key: jax.Array, step: jax.Array) -> jax.Array:
            return jax.random.gumbel(jax.random.fold_in(key, step), shape[1:])

        return jax.vmap(draw)(state.keys, state.decode_lengths)

    def decode(self, model: Any, prompts: Prompts) -> Outputs:
        """Returns the result of `__call__`: a sample per hypothesis, scored by its log-probs.

        With speculation also num_model_steps int32 [B, S], the calls of the model that gave the
        new tokens; with shared prefixes num_shared int32 [B, S], their tokens.
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
        """Returns the outputs [B, S, ...] of finished rows [B x S, ...]."""
        outputs = {
            name: x.reshape(-1, self.num_hyps, *x.shape[1:]) for name, x in finished.items()
        }
        outputs["scores"] = jnp.sum(outputs["logprobs"], axis=-1)
        return outputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample(Greedy):
    """Draws each token, from those that k, p and min_p leave.

    The three look at the model's own probabilities, after penalties: k first, then p among the k,
    then min_p. As in Pax, the temperature applies to what is left; others apply it first.

    Attributes:
      num_samples: continuations per prompt; the prompt goes through the model once.
      temperature: 0: the most likely token.
      k: only the k most likely tokens can be drawn; 0: all.
      p: only the most likely tokens whose probabilities together do not exceed p, and the one
        that does, can be drawn; None: all (Holtzman et al. 2020, arXiv:1904.09751).
      min_p: only tokens at least min_p times as likely as the most likely one (Nguyen et al.
        2024, arXiv:2407.01082).
      sort_samples: the likeliest sample of a prompt first.
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
        # The cost of Greedy, unless a batch gives a row a temperature.
        return jax.lax.cond(
            jnp.any(state.temperature > 0),
            lambda: self._draw(logits, state), lambda: super(Sample, self).choose(logits, state),
        )

    def _draw(self, logits: jax.Array, state: DecodeState) -> jax.Array:
        logits_RC, ids_RC = self.candidates(logits)
        logits_RC += state.temperature[:, None] * self.gumbel(state, logits_RC.shape)
        chosen_R1 = jnp.argmax(logits_RC, axis=-1, keepdims=True)
        if ids_RC is not None:
            chosen_R1 = jnp.take_along_axis(ids_RC, chosen_R1, axis=-1)
        return chosen_R1[:, 0].astype(jnp.int32)

    def candidates(self, logits: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Returns the candidates' logits [R, C], -inf where none can be drawn, and their ids.

        The ids are None if the candidates are all V in their own order.
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
