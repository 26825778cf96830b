"""Decodes rows together, each with its own temperature, top_k and top_p."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.core.collectives.varying import on_any_device
from praxis_lite.decode.decoder import Prompts
from praxis_lite.decode.likely_logits import kth_logit, nucleus_end
from praxis_lite.decode.loop import DecodeState
from praxis_lite.decode.sampling import Greedy

__all__ = ("SampleByRow",)

# R rows, V classes, N likeliest tokens, C newest steps.


class Likeliest(NamedTuple):
    """The likeliest tokens of each row's newest steps: step t is at t % C."""

    is_wanted: jax.Array  # bool [R]; of other rows they are anything.
    ids: jax.Array  # int32 [R, C, N].
    logprobs: jax.Array  # float32 [R, C, N].


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleByRow(Greedy):
    """Decodes each row by its own settings, greedy or drawn, in a single program.

    A row's tokens are those of Greedy, or of Sample with k=0 and its temperature and p. Noise,
    limits and the likeliest tokens are computed only if a row needs them.

    Attributes:
      temperature: of rows without a setting; 0: the most likely token.
      top_k: the same; only the k most likely tokens, and those as likely, can be drawn; 0: all.
      top_p: the same; as `Sample.p`, among those that top_k leaves.
      num_likeliest: N; the likeliest tokens of each step are stored for rows that ask for them.
      num_kept_steps: C.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    num_likeliest: int = 0
    num_kept_steps: int = 8

    def __post_init__(self):
        super().__post_init__()
        self._require(
            "temperature", 0.0 <= self.temperature < math.inf, "0 (the most likely token) or more"
        )
        self._require("top_k", self.top_k >= 0, "0 (all) or more")
        self._require("top_p", 0.0 < self.top_p <= 1.0, "0 < top_p <= 1")
        self._require("num_likeliest", self.num_likeliest >= 0, "0 or more")
        self._require("num_kept_steps", self.num_kept_steps >= 1, "1 or more")

    def choose(self, logits: jax.Array, state: DecodeState) -> jax.Array:
        draws_R = ~state.done & (state.temperature > 0)
        limits_R = draws_R & ((state.top_k > 0) | (state.top_p < 1.0))

        def drawn() -> jax.Array:
            logits_RV = jax.lax.cond(
                on_any_device(jnp.any(limits_R)),
                lambda: _limited(logits, state.top_k, state.top_p), lambda: logits,
            )
            return logits_RV + state.temperature[:, None] * self.gumbel(state, logits.shape)

        noised_RV = jax.lax.cond(on_any_device(jnp.any(draws_R)), drawn, lambda: logits)
        return jnp.argmax(noised_RV, axis=-1).astype(jnp.int32)

    def no_likeliest(self, prompts: Prompts) -> Likeliest | None:
        if not self.num_likeliest:
            return None
        num_rows = prompts.keys.shape[0]
        is_wanted, shape = prompts.wants_likeliest, (self.num_kept_steps, self.num_likeliest)
        if is_wanted is None:
            is_wanted = jnp.zeros((num_rows,), bool)
        ids = jnp.zeros((num_rows, *shape), jnp.int32)
        return Likeliest(is_wanted, ids, jnp.zeros(ids.shape, jnp.float32))

    def with_likeliest(self, state: DecodeState) -> Likeliest | None:
        if not self.num_likeliest:
            return None
        kept, goes_on_R = state.likeliest, ~state.done

        def found() -> tuple[jax.Array, jax.Array]:
            logits_RN, ids_RN = jax.lax.top_k(state.logits, self.num_likeliest)
            total_R1 = jax.nn.logsumexp(state.logits, axis=-1, keepdims=True)
            return ids_RN, logits_RN - total_R1

        ids_RN, logprobs_RN = jax.lax.cond(
            on_any_device(jnp.any(goes_on_R & kept.is_wanted)), found,
            lambda: (kept.ids[:, 0], kept.logprobs[:, 0]),
        )
        # A row that is done writes past the end, which is dropped.
        place_R = jnp.where(
            goes_on_R, state.decode_lengths % self.num_kept_steps, self.num_kept_steps
        )
        index = jnp.arange(len(place_R))
        return kept._replace(
            ids=kept.ids.at[index, place_R].set(ids_RN, mode="drop"),
            logprobs=kept.logprobs.at[index, place_R].set(logprobs_RN, mode="drop"),
        )


def _limited(logits_RV: jax.Array, top_k_R: jax.Array, top_p_R: jax.Array) -> jax.Array:
    """Returns the logits, -inf where a row cannot draw."""
    size = logits_RV.shape[-1]
    k_R = jnp.where((top_k_R > 0) & (top_k_R < size), top_k_R, size)
    logits_RV = jnp.where(logits_RV < kth_logit(logits_RV, k_R), -jnp.inf, logits_RV)
    # Rounded probabilities may sum to more than 1 before the last token.
    end_R1 = jnp.where(top_p_R[:, None] < 1.0, nucleus_end(logits_RV, top_p_R), -jnp.inf)
    return jnp.where(logits_RV < end_R1, -jnp.inf, logits_RV)
