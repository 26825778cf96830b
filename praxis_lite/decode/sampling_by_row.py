"""A decoder with a separate temperature, top_k and top_p for each row."""

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

# R rows, V classes, N likeliest tokens, C most recent steps.


class Likeliest(NamedTuple):
    """A ring buffer of the likeliest tokens from the last C steps; step t is at index t % C.

    Attributes:
      is_wanted: bool [R], True for rows that request the likeliest tokens. The entries for other
        rows are undefined.
      ids: int32 [R, C, N].
      logprobs: float32 [R, C, N].
    """

    is_wanted: jax.Array
    ids: jax.Array
    logprobs: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleByRow(Greedy):
    """Decodes greedy and sampled rows, each with its own settings, in a single compiled step.

    The tokens in a row are the same as with Greedy, or with Sample given k=0 and the row's
    temperature and p. Noise, thresholds and the likeliest tokens are computed only if a row needs
    them.

    Attributes:
      temperature: Temperature for rows that do not set a temperature; 0 chooses the most likely
        token.
      top_k: Number of most likely tokens to sample from, for rows that do not set top_k; 0 samples
        from all tokens. Tokens that are as likely as the k-th most likely token are also included.
      top_p: Like `Sample.p`, applied after top_k, for rows that do not set top_p.
      num_likeliest: Number of likeliest tokens to store per step for rows that request them, N.
      num_kept_steps: Number of recent steps whose likeliest tokens are stored, C.
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
        top_k_R, top_p_R = state.top_k, state.top_p
        assert top_k_R is not None and top_p_R is not None
        is_sampled_R = ~state.done & (state.temperature > 0)
        is_filtered_R = is_sampled_R & ((top_k_R > 0) | (top_p_R < 1.0))

        # Random numbers and the thresholds for top-k and top-p are skipped if no row needs them.
        def add_noise() -> jax.Array:
            logits_RV = jax.lax.cond(
                on_any_device(jnp.any(is_filtered_R)),
                lambda: _filtered(logits, top_k_R, top_p_R),
                lambda: logits,
            )
            return logits_RV + state.temperature[:, None] * self.gumbel(state, logits.shape)

        noisy_RV = jax.lax.cond(on_any_device(jnp.any(is_sampled_R)), add_noise, lambda: logits)
        return jnp.argmax(noisy_RV, axis=-1).astype(jnp.int32)

    def init_likeliest(self, prompts: Prompts) -> Likeliest | None:
        if not self.num_likeliest:
            return None
        num_rows = prompts.keys.shape[0]
        is_wanted, shape = prompts.wants_likeliest, (self.num_kept_steps, self.num_likeliest)
        if is_wanted is None:
            is_wanted = jnp.zeros((num_rows,), bool)
        ids = jnp.zeros((num_rows, *shape), jnp.int32)
        return Likeliest(is_wanted, ids, jnp.zeros(ids.shape, jnp.float32))

    def update_likeliest(self, state: DecodeState) -> Likeliest | None:
        if not self.num_likeliest:
            return None
        likeliest, is_active_R = state.likeliest, ~state.done

        def top_tokens() -> tuple[jax.Array, jax.Array]:
            logits_RN, ids_RN = jax.lax.top_k(state.logits, self.num_likeliest)
            total_R1 = jax.nn.logsumexp(state.logits, axis=-1, keepdims=True)
            return ids_RN, logits_RN - total_R1

        ids_RN, logprobs_RN = jax.lax.cond(
            on_any_device(jnp.any(is_active_R & likeliest.is_wanted)),
            top_tokens,
            # No active row requests the likeliest tokens, so any values may be written.
            lambda: (likeliest.ids[:, 0], likeliest.logprobs[:, 0]),
        )
        # Rows that have ended write out of bounds, which the scatter drops.
        slot_R = jnp.where(
            is_active_R, state.decode_lengths % self.num_kept_steps, self.num_kept_steps
        )
        index = jnp.arange(len(slot_R))
        return likeliest._replace(
            ids=likeliest.ids.at[index, slot_R].set(ids_RN, mode="drop"),
            logprobs=likeliest.logprobs.at[index, slot_R].set(logprobs_RN, mode="drop"),
        )


def _filtered(logits_RV: jax.Array, top_k_R: jax.Array, top_p_R: jax.Array) -> jax.Array:
    """Applies top_k and top_p: sets the logits of excluded tokens to -inf."""
    size = logits_RV.shape[-1]
    k_R = jnp.where((top_k_R > 0) & (top_k_R < size), top_k_R, size)
    logits_RV = jnp.where(logits_RV < kth_logit(logits_RV, k_R), -jnp.inf, logits_RV)
    # Skip rows with top_p=1: rounded probabilities may exceed 1 before the last token.
    end_R1 = jnp.where(top_p_R[:, None] < 1.0, nucleus_end(logits_RV, top_p_R), -jnp.inf)
    return jnp.where(logits_RV < end_R1, -jnp.inf, logits_RV)
