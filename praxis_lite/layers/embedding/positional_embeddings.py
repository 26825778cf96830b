"""Sinusoidal, learned and rotary positions, with Pax's names and numerics."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.core.sharding.split_dims import constrain
from praxis_lite.layers.base.base_layer import BaseLayer
from praxis_lite.layers.base.calls import inherit_params, require_positive
from praxis_lite.layers.base.dims import SplitSetting, splits
from praxis_lite.layers.embedding.embeddings import Embedding, lookup

# B batch (or 1), T time, D model dims, N heads, K dims per head.


def _check_timescales(layer: object, min_timescale: float, max_timescale: float) -> None:
    require(
        0 < min_timescale <= max_timescale,
        f"{type(layer).__name__}.min_timescale",
        min_timescale,
        f"a positive number, at most max_timescale {max_timescale}",
    )


def _positions_or_default(positions: jax.Array | None, seq_length: int | None) -> jax.Array:
    """Returns positions [B or 1, T]; by default 0 to `seq_length - 1`."""
    if positions is not None:
        return positions
    assert seq_length is not None, "Either positions or seq_length must be passed."
    # A constant, so that XLA folds computations that depend on it.
    return jnp.arange(seq_length, dtype=jnp.int32)[None, :]


class PositionalEmbedding(BaseLayer):
    """Maps positions to sines and cosines: int [B, T] -> float32 [B, T, D].

    The first half of D contains sines and the second half cosines, with wavelengths from 2 pi to
    2 pi max_timescale / min_timescale. If D is odd, the last element is zero. Vaswani et al. 2017,
    arXiv:1706.03762, in Pax's order.
    """

    splits = splits(activation=())

    def __init__(
        self,
        embedding_dims: int,
        *,
        min_timescale: float = 1.0,
        max_timescale: float = 10_000.0,
        rngs: nnx.Rngs | None = None,
        activation_split_dims_mapping: SplitSetting = None,
    ):
        # rngs are unused, but learned embeddings that use the same template need them.
        require_positive(self, embedding_dims=embedding_dims)
        _check_timescales(self, min_timescale, max_timescale)
        self.embedding_dims = embedding_dims
        self.min_timescale, self.max_timescale = min_timescale, max_timescale

    def check_length(self, length: int) -> None:
        """Accepts any length, because sines and cosines are defined for all positions."""

    def __call__(
        self, positions: jax.Array | None = None, *, seq_length: int | None = None
    ) -> jax.Array:
        """Returns the embeddings, [B or 1, T, D].

        Args:
          positions: Int [B or 1, T]. If None, 0 to seq_length - 1.
          seq_length: T; only used if positions is None.
        """
        num = self.embedding_dims // 2
        step = math.log(self.max_timescale / self.min_timescale) / max(num - 1, 1)
        frequency_K = self.min_timescale * jnp.exp(jnp.arange(num, dtype=jnp.float32) * -step)
        time_BT = _positions_or_default(positions, seq_length).astype(jnp.float32)
        angle = time_BT[:, :, None] * frequency_K[None, None, :]
        signal = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
        signal = jnp.pad(signal, ((0, 0), (0, 0), (0, self.embedding_dims % 2)))
        return constrain(signal, self.activation_split_dims_mapping)


class TrainablePositionalEmbedding(Embedding):
    """Maps positions to learned vectors: int [B, T] -> [B, T, D]; its weight is [max, D].

    Args:
      max_seq_length: Number of positions.
      embedding_dims: D.
      lookup_style: See `embeddings.lookup`. Pax's default is "matmul"; "index" gives the same
        numbers without a one-hot array [B, T, max].
      weight_split_dims_mapping: Sharding of [max, D].
      activation_split_dims_mapping: Sharding of [B, T, D].
    """

    splits = splits(weight=(None, "embed"), activation=())

    @inherit_params(
        Embedding, exclude=("num_classes", "input_dims", "scale_sqrt_depth", "fprop_dtype")
    )
    def __init__(self, max_seq_length: int, embedding_dims: int, **settings: Any):
        require_positive(self, max_seq_length=max_seq_length, embedding_dims=embedding_dims)
        super().__init__(max_seq_length, embedding_dims, **settings)
        self.max_seq_length = max_seq_length

    def check_length(self, length: int) -> None:
        """Checks that sequences of this length do not exceed max_seq_length.

        Raises:
          ConfigError: The length exceeds max_seq_length. A lookup would return NaN.
        """
        if length > self.max_seq_length:
            raise ConfigError(
                f"{type(self).__name__}.max_seq_length is {self.max_seq_length}, but a sequence "
                f"has up to {length} tokens (including decoded tokens). Increase the model's "
                "max_seq_length, or reduce seq_len, max_decode_steps or the length of the prompts."
            )

    def __call__(
        self, positions: jax.Array | None = None, *, seq_length: int | None = None
    ) -> jax.Array:
        """Returns the embeddings, [B or 1, T, D].

        Args:
          positions: Int [B or 1, T], below max_seq_length. If None, 0 to seq_length - 1.
          seq_length: T; only used if positions is None.
        """
        positions = _positions_or_default(positions, seq_length)
        self.check_length(positions.shape[-1])
        table = self.emb_var[...]
        split = self.activation_split_dims_mapping
        embs = lookup(
            table, positions, self.weight_split_dims_mapping, self.lookup_style, table.dtype, split
        )
        return constrain(embs, split)


class RotaryPositionalEmbedding(BaseLayer):
    """Rotates heads by angles proportional to token positions: [B, T, N, K] -> [B, T, N, K].

    See arXiv:2104.09864. As in Pax, dims i and i + rotary_dims / 2 rotate together, in float32.

    Args:
      embedding_dims: K.
      min_timescale: Number of positions after which the fastest pair has rotated by one radian.
      max_timescale: Approximate number of positions after which the slowest pair has rotated by one
        radian; max_timescale / min_timescale is theta.
      rotary_dims: Number of leading dims of K that rotate; must be even. If None, all dims rotate.
      cast_as_fprop_dtype: Whether to return the inputs' dtype instead of float32.
    """

    def __init__(
        self,
        embedding_dims: int,
        *,
        min_timescale: float = 1.0,
        max_timescale: float = 10_000.0,
        rotary_dims: int | None = None,
        cast_as_fprop_dtype: bool = True,
    ):
        require_positive(self, embedding_dims=embedding_dims)
        name = type(self).__name__
        if rotary_dims is None:
            require(
                embedding_dims % 2 == 0,
                f"{name}.embedding_dims",
                embedding_dims,
                "an even number, because the halves of a head rotate together",
                "Change dim_per_head, or use learned positions.",
            )
            rotary_dims = embedding_dims
        require(
            rotary_dims % 2 == 0 and 0 < rotary_dims <= embedding_dims,
            f"{name}.rotary_dims",
            rotary_dims,
            f"a positive even number, at most {embedding_dims}, the size of a head",
        )
        _check_timescales(self, min_timescale, max_timescale)
        self.embedding_dims, self.rotary_dims = embedding_dims, rotary_dims
        self.min_timescale, self.max_timescale = min_timescale, max_timescale
        self.cast_as_fprop_dtype = cast_as_fprop_dtype

    def __call__(self, inputs: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Returns the rotated heads, [B, T, N, K].

        Args:
          inputs: [B, T, N, K].
          positions: Int [B or 1, T]. If None, 0 to T - 1.
        """
        positions = _positions_or_default(positions, inputs.shape[1])
        angle = self._angles(positions)[:, :, None, :]
        sin, cos = jnp.sin(angle) * self._amplitude, jnp.cos(angle) * self._amplitude
        # A dim in the first half is rotated with the dim at the same index of the second half.
        rotating = inputs[..., : self.rotary_dims].astype(jnp.float32)
        first, second = jnp.split(rotating, 2, axis=-1)
        parts = [first * cos - second * sin, second * cos + first * sin]
        if self.rotary_dims < self.embedding_dims:
            parts.append(inputs[..., self.rotary_dims :].astype(jnp.float32))
        outputs = jnp.concatenate(parts, axis=-1)
        return outputs.astype(inputs.dtype) if self.cast_as_fprop_dtype else outputs

    # Factor that multiplies sines and cosines.
    _amplitude = 1.0

    def _angles(self, positions_BT: jax.Array) -> jax.Array:
        """Returns angles in radians, [B, T, rotary_dims / 2]."""
        return positions_BT.astype(jnp.float32)[:, :, None] / self._timescales()[None, None, :]

    def _timescales(self) -> jax.Array:
        """Returns the number of positions per radian for each pair, float32 [rotary_dims / 2]."""
        return self._timescales_to(self.max_timescale / self.min_timescale)

    def _timescales_to(self, ratio: float | jax.Array) -> jax.Array:
        """Returns timescales that increase from `min_timescale` by a factor of almost `ratio`."""
        fraction = jnp.arange(0, self.rotary_dims, 2, dtype=jnp.float32) / self.rotary_dims
        return self.min_timescale * ratio**fraction
