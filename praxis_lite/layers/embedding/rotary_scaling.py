"""Rotary embeddings scaled for longer sequences, as in Hugging Face's `rope_scaling`.

Each variant further slows down the low-frequency pairs.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import require
from praxis_lite.layers.base.calls import inherit_params, require_positive
from praxis_lite.layers.embedding.positional_embeddings import RotaryPositionalEmbedding

# B batch, T time.


def _check_factor(layer: object, factor: float) -> None:
    require(factor > 0, f"{type(layer).__name__}.factor", factor, "a positive number")


class LinearScaledRotary(RotaryPositionalEmbedding):
    """RotaryPositionalEmbedding in which all frequencies are divided by `factor`.

    See arXiv:2306.15595.
    """

    @inherit_params(RotaryPositionalEmbedding)
    def __init__(self, embedding_dims: int, *, factor: float, **settings: Any):
        super().__init__(embedding_dims, **settings)
        _check_factor(self, factor)
        self.factor = factor

    def _timescales(self) -> jax.Array:
        return super()._timescales() * self.factor


class ProportionalRotary(RotaryPositionalEmbedding):
    """RotaryPositionalEmbedding in which only the highest-frequency pairs rotate.

    Unlike with `rotary_dims`, each pair has one dim in each half of the head.

    Args:
      embedding_dims: Size K of a head.
      factor: Factor by which the frequencies of all rotating pairs are divided.
      share: Fraction of the pairs that rotate.
    """

    @inherit_params(RotaryPositionalEmbedding)
    def __init__(
        self, embedding_dims: int, *, factor: float = 1.0, share: float = 1.0, **settings: Any
    ):
        super().__init__(embedding_dims, **settings)
        _check_factor(self, factor)
        require(
            0.0 < share <= 1.0,
            "ProportionalRotary.share",
            share,
            "a positive number, at most 1",
        )
        self.factor, self.share = factor, share

    def _timescales(self) -> jax.Array:
        rotates = jnp.arange(self.rotary_dims // 2) < int(self.share * self.rotary_dims // 2)
        # An infinite timescale means no rotation.
        return jnp.where(rotates, super()._timescales() * self.factor, jnp.inf)


class DynamicRotary(RotaryPositionalEmbedding):
    """RotaryPositionalEmbedding whose theta grows with the sequence length ("dynamic NTK").

    A call uses the theta for its last position. The cache for a sequence decoded beyond
    `original_max_positions` therefore contains keys with different thetas, as in Hugging Face's
    models.

    Args:
      embedding_dims: Size K of a head.
      factor: Factor by which the maximum sequence length increases.
      original_max_positions: Sequence length up to which theta does not change.
    """

    couples_tokens = "angles that grow with the text"

    @inherit_params(RotaryPositionalEmbedding)
    def __init__(
        self, embedding_dims: int, *, factor: float, original_max_positions: int, **settings: Any
    ):
        super().__init__(embedding_dims, **settings)
        _check_factor(self, factor)
        require_positive(self, original_max_positions=original_max_positions)
        require(self.rotary_dims > 2, "DynamicRotary.rotary_dims", self.rotary_dims, "at least 4")
        self.factor, self.original_max_positions = factor, original_max_positions

    def _angles(self, positions_BT: jax.Array) -> jax.Array:
        positions = positions_BT.astype(jnp.float32)
        length = jnp.maximum(jnp.max(positions) + 1.0, self.original_max_positions)
        grown = self.factor * length / self.original_max_positions - (self.factor - 1.0)
        ratio = self.max_timescale / self.min_timescale
        # With this exponent, the timescale of the slowest pair is multiplied by `grown`.
        theta = ratio * grown ** (self.rotary_dims / (self.rotary_dims - 2))
        return positions[:, :, None] / self._timescales_to(theta)[None, None, :]


class Llama3Rotary(RotaryPositionalEmbedding):
    """The RotaryPositionalEmbedding of Llama 3.1; it slows down only low-frequency pairs.

    Args:
      embedding_dims: Size K of a head.
      factor: Factor by which the frequencies of low-frequency pairs are divided.
      low_freq_factor: Pairs with fewer rotations than this in `original_max_positions` are
        low-frequency.
      high_freq_factor: Pairs with more rotations than this are high-frequency and do not change. In
        between, factors are interpolated.
      original_max_positions: Sequence length that the model was originally trained on.
    """

    @inherit_params(RotaryPositionalEmbedding)
    def __init__(
        self,
        embedding_dims: int,
        *,
        factor: float = 8.0,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 4.0,
        original_max_positions: int = 8192,
        **settings: Any,
    ):
        super().__init__(embedding_dims, **settings)
        _check_factor(self, factor)
        require_positive(self, original_max_positions=original_max_positions)
        require(
            0 < low_freq_factor < high_freq_factor,
            "Llama3Rotary.low_freq_factor",
            low_freq_factor,
            f"a positive number, less than high_freq_factor {high_freq_factor}",
        )
        self.factor, self.original_max_positions = factor, original_max_positions
        self.low_freq_factor, self.high_freq_factor = low_freq_factor, high_freq_factor

    def _timescales(self) -> jax.Array:
        unscaled = super()._timescales()
        num_rotations = self.original_max_positions / (2.0 * math.pi * unscaled)
        low, high = self.low_freq_factor, self.high_freq_factor
        # 1 for high-frequency pairs, 0 for low-frequency pairs. Frequencies are interpolated in
        # between, not timescales.
        fast = jnp.clip((num_rotations - low) / (high - low), 0.0, 1.0)
        return 1.0 / ((1.0 - fast) / (unscaled * self.factor) + fast / unscaled)


class YarnRotary(RotaryPositionalEmbedding):
    """RotaryPositionalEmbedding with YaRN (arXiv:2309.00071).

    Args:
      embedding_dims: Size K of a head.
      factor: Factor by which the frequencies of low-frequency pairs are divided.
      original_max_positions: Sequence length that the model was originally trained on.
      beta_fast: Pairs with more rotations than this in `original_max_positions` do not change.
      beta_slow: Pairs with fewer rotations than this are low-frequency. In between, factors are
        interpolated.
      truncate: Whether to round the two bounds outwards to integer pair indices.
      attention_factor: Factor that multiplies sines and cosines. If None, 0.1 ln(factor) + 1.
    """

    @inherit_params(RotaryPositionalEmbedding)
    def __init__(
        self,
        embedding_dims: int,
        *,
        factor: float,
        original_max_positions: int,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        truncate: bool = True,
        attention_factor: float | None = None,
        **settings: Any,
    ):
        super().__init__(embedding_dims, **settings)
        _check_factor(self, factor)
        require_positive(self, original_max_positions=original_max_positions)
        require(
            0 < beta_slow < beta_fast,
            "YarnRotary.beta_slow",
            beta_slow,
            f"a positive number, less than beta_fast {beta_fast}",
        )
        self.factor, self.original_max_positions = factor, original_max_positions
        self.beta_fast, self.beta_slow, self.truncate = beta_fast, beta_slow, truncate
        self._amplitude = yarn_factor(factor) if attention_factor is None else attention_factor

    def _timescales(self) -> jax.Array:
        unscaled, num_pairs = super()._timescales(), self.rotary_dims // 2
        first, last = self._pair(self.beta_fast), self._pair(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.rotary_dims - 1)
        # Avoid a division by 0.
        last = last + 0.001 if first == last else last
        # 0 for high-frequency pairs, 1 for low-frequency pairs.
        slowed = jnp.clip((jnp.arange(num_pairs) - first) / (last - first), 0.0, 1.0)
        return 1.0 / (slowed / (unscaled * self.factor) + (1.0 - slowed) / unscaled)

    def _pair(self, num_rotations: float) -> float:
        """Returns the fractional index of the pair with this number of rotations."""
        timescale = self.original_max_positions / (2.0 * math.pi * num_rotations)
        theta = self.max_timescale / self.min_timescale
        return self.rotary_dims / 2 * math.log(timescale / self.min_timescale) / math.log(theta)


def yarn_factor(factor: float, mscale: float = 1.0) -> float:
    """Returns YaRN's factor 0.1 mscale ln(factor) + 1, or 1.0 for a factor of at most 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


class LongRope(RotaryPositionalEmbedding):
    """RotaryPositionalEmbedding with LongRoPE, a factor per pair (arXiv:2402.13753).

    A call with a position beyond `original_max_positions` uses `long_factor`; all other calls use
    `short_factor`. If a sequence is decoded beyond this limit, the cache therefore contains keys
    with both factors, as in Hugging Face's models.

    Args:
      embedding_dims: Size K of a head.
      short_factor: Factors by which each pair's frequency is divided in short sequences,
        [rotary_dims / 2].
      long_factor: Factors by which each pair's frequency is divided in long sequences, [rotary_dims
        / 2].
      original_max_positions: Sequence length that the model was originally trained on.
      attention_factor: Factor that multiplies sines and cosines.
    """

    @inherit_params(RotaryPositionalEmbedding)
    def __init__(
        self,
        embedding_dims: int,
        *,
        short_factor: Sequence[float],
        long_factor: Sequence[float],
        original_max_positions: int,
        attention_factor: float = 1.0,
        **settings: Any,
    ):
        super().__init__(embedding_dims, **settings)
        require_positive(self, original_max_positions=original_max_positions)
        for name, factors in (("short_factor", short_factor), ("long_factor", long_factor)):
            require(
                len(factors) == self.rotary_dims // 2,
                f"LongRope.{name}",
                len(factors),
                f"{self.rotary_dims // 2} numbers, one per pair of rotary dims",
            )
        self.short_factor, self.long_factor = tuple(short_factor), tuple(long_factor)
        self.original_max_positions, self._amplitude = original_max_positions, attention_factor

    def _angles(self, positions_BT: jax.Array) -> jax.Array:
        is_long = jnp.max(positions_BT) >= self.original_max_positions
        long, short = (jnp.asarray(x, jnp.float32) for x in (self.long_factor, self.short_factor))
        timescales = self._timescales() * jnp.where(is_long, long, short)
        return positions_BT.astype(jnp.float32)[:, :, None] / timescales[None, None, :]
