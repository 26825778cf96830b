"""How the next token is chosen from its logits: greedy, temperature, top-k, top-p."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from praxis_lite.errors import ConfigError

# B batch, V classes.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Chooses token ids [B] from logits [B, V].

    Attributes:
      temperature: divides the logits; 0: the most likely token (greedy), no randomness.
      top_k: only the k most likely tokens can be chosen; 0: all.
      top_p: only the most likely tokens whose probabilities sum to p can be chosen, at least one;
        1: all. Applied after the temperature and top_k (Holtzman et al. 2020, arXiv:1904.09751).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(
                f"Sampling.temperature is {self.temperature}; wanted is 0 (greedy) or more."
            )
        if self.top_k < 0:
            raise ConfigError(f"Sampling.top_k is {self.top_k}; wanted is 0 (all) or more.")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"Sampling.top_p is {self.top_p}; wanted is 0 < p <= 1.")

    def __call__(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        if self.temperature == 0.0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        chosen = jax.random.categorical(key, self.filtered_logits(logits), axis=-1)
        return chosen.astype(jnp.int32)

    def filtered_logits(self, logits: jax.Array) -> jax.Array:
        """Returns the logits that are drawn from: -inf for the tokens that cannot be chosen."""
        logits = logits.astype(jnp.float32) / self.temperature
        num_classes = logits.shape[-1]
        if 0 < self.top_k < num_classes:
            kth = jax.lax.top_k(logits, self.top_k)[0][..., -1:]
            logits = jnp.where(logits < kth, -jnp.inf, logits)
        if self.top_p < 1.0:
            descending = jnp.sort(logits, axis=-1, descending=True)
            probs = jax.nn.softmax(descending, axis=-1)
            # A token stays if what is more likely than it does not yet reach p.
            stays = jnp.cumsum(probs, axis=-1) - probs < self.top_p
            lowest = jnp.min(jnp.where(stays, descending, jnp.inf), axis=-1, keepdims=True)
            logits = jnp.where(logits < lowest, -jnp.inf, logits)
        return logits
