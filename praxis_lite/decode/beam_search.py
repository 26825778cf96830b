"""Beam search as in Pax, with separate beams for open and for ended hypotheses."""

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.collectives.varying import on_any_device, varying_alike
from praxis_lite.decode.cache_rows import batch_dims, repeat_rows, take_hyps
from praxis_lite.decode.decoder import Decoder, Outputs, Prompts
from praxis_lite.decode.prefill import prefill
from praxis_lite.layers.base.variables import rebuilt

# B prompts, K hypotheses per prompt, N tokens tried per hypothesis, V classes, M maximum number of
# new tokens.

# Pax's score for an empty slot in a beam. Slots whose log-prob sum is below half of this score are
# empty.
NEVER = -1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearch(Decoder):
    """Searches for the most likely continuations that end with an end-of-text token.

    At each step, every open hypothesis is also continued with an end-of-text token, and the
    beam_size best ended hypotheses so far are stored. Each result therefore contains an end-of-text
    token within max_decode_steps. The score of a hypothesis is the sum of its log-probs divided by
    ((5 + new tokens) / 5) ** alpha. This is the length normalization of Wu et al. 2016
    (arXiv:1609.08144), but with 5 instead of 6 in the denominator.

    Attributes:
      beam_size: Number of hypotheses per prompt, K. An empty slot has length 0 and a score of at
        most -1e8.
      tokens_per_beam: Number of tokens that are tried per hypothesis and step, N. If None,
        beam_size is used.
      length_norm_alpha: Exponent of the length normalization; 0 disables it.
      early_exit: Whether ended hypotheses also occupy slots in the open beam, as in Pax. If so, the
        search stops when ended hypotheses occupy all slots.
      ends_when_decided: Whether to stop when no open hypothesis can still beat the ended
        hypotheses, since log-prob sums only decrease. The results do not change, except for done
        and hyp_ids, which describe the last step.
    """

    beam_size: int = 1
    tokens_per_beam: int | None = None
    length_norm_alpha: float = 0.8
    early_exit: bool = False
    ends_when_decided: bool = False

    def __post_init__(self):
        super().__post_init__()
        self._require("beam_size", self.beam_size >= 1, "1 or more")
        self._require(
            "tokens_per_beam",
            self.tokens_per_beam is None or self.tokens_per_beam >= 1,
            "None (beam_size), or 1 or more",
        )
        self._require("length_norm_alpha", math.isfinite(self.length_norm_alpha), "finite")

    def check_vocabulary(self, size: int, of_tokenizer: Collection[int] = ()) -> None:
        super().check_vocabulary(size, of_tokenizer)
        expected = f"a token of the model, 0 to {size - 1}, because hypotheses must end with it"
        self._require("eos_id", any(i < size for i in self.eos_ids), expected)

    @property
    def num_hyps(self) -> int:
        return self.beam_size

    def decode(self, model: Any, prompts: Prompts) -> Outputs:
        """Implements `__call__`; the search is deterministic and ignores keys and temperature.

        There are two additional outputs. done, bool [B, K], is True for hypotheses in the open beam
        that contain an end-of-text token at the last step. hyp_ids, int32 [B, K], are the indices
        of these hypotheses in the beam of the previous step.
        """
        prefix, ids = prefill(self, model, prompts), prompts.ids
        self.check_vocabulary(prefix.logits.shape[-1])
        num_rows, num_hyps, num_steps = ids.shape[0], self.beam_size, self.max_decode_steps
        dims = batch_dims(model.init_cache)
        shape = (num_rows, num_hyps)
        no_tokens = {
            "output_ids": jnp.zeros((*shape, num_steps), jnp.int32),
            "logprobs": jnp.zeros((*shape, num_steps), jnp.float32),
        }
        # `open` contains the hypotheses to extend, `ended` the best hypotheses with an end-of-text
        # token. `step` is the index of the next token.
        carry = {
            "step": jnp.zeros((), jnp.int32),
            "cache": repeat_rows(prefix.cache, dims, num_hyps),
            "logits": jnp.repeat(prefix.logits[:, None], num_hyps, axis=1),
            # Initially all hypotheses are equal to the prompt, so only the first may be continued.
            "scores": jnp.broadcast_to(NEVER * jnp.arange(num_hyps, dtype=jnp.float32), shape),
            "done": jnp.zeros(shape, bool),
            "hyp_ids": jnp.zeros(shape, jnp.int32),
            "open": no_tokens,
            "ended": {
                **no_tokens,
                "decode_lengths": jnp.zeros(shape, jnp.int32),
                "scores": jnp.full(shape, NEVER, jnp.float32),
            },
        }

        def is_active(carry: dict[str, Any]) -> jax.Array:
            is_open_B = carry["step"] < prefix.max_steps
            if self.ends_when_decided:
                is_open_B &= ~self._is_decided(carry, prefix.max_steps)
            is_any_open = jnp.any(is_open_B)
            if self.early_exit:
                is_any_open &= ~jnp.all(carry["done"])
            return on_any_device(is_any_open)

        def step(carry: dict[str, Any]) -> dict[str, Any]:
            t = carry["step"]
            logprobs_BKV = self._logprobs(carry["logits"], t)
            is_open_B = t < prefix.max_steps
            # Each open hypothesis yields one candidate for the ended beam, and the best extensions
            # become the new open beam.
            ended = self._update_ended(carry, logprobs_BKV, is_open_B)
            scores, hyps_BK, new_ids = self._extend_open(carry["scores"], logprobs_BKV)
            # New hypothesis k extends old hypothesis hyps_BK[:, k], so everything about it,
            # including the cache below, is reordered.
            open_hyps, done, logprobs_BKV = _take(
                (carry["open"], carry["done"], logprobs_BKV), hyps_BK
            )
            new_logprobs = jnp.take_along_axis(logprobs_BKV, new_ids[..., None], axis=2)[..., 0]
            open_hyps = {
                "output_ids": open_hyps["output_ids"].at[..., t].set(new_ids),
                "logprobs": open_hyps["logprobs"].at[..., t].set(new_logprobs),
            }
            positions = jnp.repeat(prompts.lengths + t, num_hyps)
            logits, cache = rebuilt(model)(
                new_ids.reshape(-1, 1),
                positions=positions[:, None],
                cache=take_hyps(carry["cache"], dims, hyps_BK),
            )
            return {
                "step": t + 1,
                "cache": cache,
                "logits": logits.astype(jnp.float32).reshape(carry["logits"].shape),
                "scores": scores,
                "done": done | self.is_eos(new_ids) | ~is_open_B[:, None],
                "hyp_ids": hyps_BK,
                "open": open_hyps,
                "ended": ended,
            }

        last = jax.lax.while_loop(is_active, step, varying_alike(carry, prompts.lengths))
        ended = {**last["ended"], "done": last["done"], "hyp_ids": last["hyp_ids"]}
        if prefix.logprobs is not None:
            ended["prefix_logprobs"] = prefix.logprobs
        return ended

    def _logprobs(self, logits_BKV: jax.Array, t: jax.Array) -> jax.Array:
        """Returns the log-probs, with -1e20 for EOS tokens before min_decode_steps."""
        logprobs_BKV = jax.nn.log_softmax(logits_BKV, axis=-1)
        if not self.min_decode_steps:
            return logprobs_BKV
        is_eos_V = self.is_eos(jnp.arange(logits_BKV.shape[-1]))
        return jnp.where(is_eos_V & (t < self.min_decode_steps), -1e20, logprobs_BKV)

    def _norm(self, num_tokens: jax.Array) -> jax.Array:
        """Returns the length normalization, computed in float32 as in Pax."""
        return ((num_tokens + 5).astype(jnp.float32) / 5.0) ** self.length_norm_alpha

    def _is_decided(self, carry: dict[str, Any], max_steps: jax.Array) -> jax.Array:
        """Returns a bool array [B], True if no open hypothesis can still beat an ended hypothesis.

        Log-prob sums are at most 0 and only decrease, so the best possible score of an open
        hypothesis is its current sum divided by the largest norm in the remaining steps.
        """
        largest = jnp.maximum(self._norm(carry["step"] + 1), self._norm(max_steps))
        # Leave a margin for rounding errors in the norms.
        best_B = jnp.max(carry["scores"], axis=1) / largest * (1.0 - 1e-6)
        return jnp.min(carry["ended"]["scores"], axis=1) >= best_B

    def _update_ended(
        self, carry: dict[str, Any], logprobs_BKV: jax.Array, is_open_B: jax.Array
    ) -> dict[str, jax.Array]:
        """Returns the best ended hypotheses, including open hypotheses that end at this step."""
        t, open_hyps = carry["step"], carry["open"]
        num_classes = logprobs_BKV.shape[-1]
        eos_ids = jnp.asarray([i for i in self.eos_ids if i < num_classes], jnp.int32)
        # A hypothesis ends with its most probable end-of-text token.
        eos_logprobs_BKE = logprobs_BKV[..., eos_ids]
        best_BK1 = jnp.argmax(eos_logprobs_BKE, axis=-1, keepdims=True)
        eos_logprobs_BK = jnp.take_along_axis(eos_logprobs_BKE, best_BK1, axis=-1)[..., 0]
        sums = carry["scores"] + eos_logprobs_BK
        # Compare sums, not scores: normalization by a large length moves any sum close to 0.
        is_empty = (sums < NEVER / 2) | ~is_open_B[:, None]
        scores = jnp.where(is_empty, NEVER, sums / self._norm(t + 1))
        new = {
            "output_ids": open_hyps["output_ids"].at[..., t].set(eos_ids[best_BK1[..., 0]]),
            "logprobs": open_hyps["logprobs"].at[..., t].set(eos_logprobs_BK),
            "decode_lengths": jnp.full(scores.shape, t + 1, jnp.int32),
            "scores": scores,
        }
        for name in ("output_ids", "logprobs", "decode_lengths"):
            is_zero = is_empty[..., None] if new[name].ndim == 3 else is_empty
            new[name] = jnp.where(is_zero, 0, new[name]).astype(new[name].dtype)
        # Keep the best of the previous and the new hypotheses.
        both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), carry["ended"], new)
        return _take(both, jax.lax.top_k(both["scores"], self.beam_size)[1])

    def _extend_open(
        self, scores_BK: jax.Array, logprobs_BKV: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the scores, parents and new tokens of the K best open hypotheses."""
        num_classes = logprobs_BKV.shape[-1]
        num_tokens = min(self.tokens_per_beam or self.beam_size, num_classes)
        logprobs_BKN, ids_BKN = jax.lax.top_k(logprobs_BKV, num_tokens)
        candidates_BKN = logprobs_BKN + scores_BK[..., None]
        # Hypotheses that end belong to the ended beam only.
        if not self.early_exit:
            candidates_BKN += NEVER * self.is_eos(ids_BKN)
        flat = candidates_BKN.reshape(scores_BK.shape[0], -1)
        scores, indices_BK = jax.lax.top_k(flat, self.beam_size)
        new_ids = jnp.take_along_axis(ids_BKN.reshape(flat.shape), indices_BK, axis=1)
        return scores, indices_BK // num_tokens, new_ids


def _take(tree: Any, hyps_BK: jax.Array) -> Any:
    """Selects the hypotheses `hyps_BK` along the second dim of each array."""
    return jax.tree.map(lambda x: jax.vmap(lambda row, hyps: row[hyps])(x, hyps_BK), tree)
