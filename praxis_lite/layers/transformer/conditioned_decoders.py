"""Wraps an encoder-decoder with fixed inputs as a language model, for `praxis_lite.decode`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.layers.base.variables import rebuilt

# B batch, S time of the inputs, T time of the targets, D model dims, V classes.


@dataclasses.dataclass(frozen=True)
class ConditionedDecoder:
    """A language model of target tokens that is conditioned on a batch of inputs.

    Attributes:
      model: A TransformerEncoderDecoder.
      encoded: The outputs [B, S, D] of the model's encoder.
      input_paddings: Float [B, S], 1.0 for padding.
    """

    model: Any
    encoded: jax.Array
    input_paddings: jax.Array | None

    def init_cache(self, batch_size: int, max_seq_length: int) -> Any:
        """Returns a cache that contains the inputs, or an empty cache if batch sizes differ."""
        length = self.encoded.shape[1]
        cache = self.model.init_cache(batch_size, max_seq_length, encoded_length=length)
        if batch_size != self.encoded.shape[0]:
            return cache  # Only the shapes of such a cache are used.
        # A call with one padding token stores the inputs; the first real token overwrites the
        # padding token.
        padding = jnp.zeros((batch_size, 1), jnp.int32)
        _, cache = self.model.decode(
            padding,
            encoded=self.encoded,
            input_paddings=self.input_paddings,
            target_paddings=jnp.ones(padding.shape, jnp.float32),
            target_segment_pos=padding,
            cache=cache,
        )
        return cache

    def __call__(
        self,
        ids: jax.Array,
        *,
        positions: jax.Array | None = None,
        paddings: jax.Array | None = None,
        cache: Any,
    ) -> tuple[jax.Array, Any]:
        """Returns float32 logits [B, T, V] and the cache, updated with these targets."""
        model = rebuilt(self.model)
        x, cache = model.decode(
            ids, target_paddings=paddings, target_segment_pos=positions, cache=cache
        )
        return model.softmax(x), cache
