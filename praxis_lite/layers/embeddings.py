"""Token embedding, softmax over classes, and positions. Names and numerics are Pax's."""

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.errors import ConfigError
from praxis_lite.sharding import SplitDims, constrain
from praxis_lite.sharding.split_dims import DimSplit
from praxis_lite.weights import BaseLayer, require_positive, zeros

# B batch, T time, D model dims, V classes, K dims per head.


class Embedding(BaseLayer):
    """Returns a vector per id: int [B, T] -> [B, T, input_dims]; its weight is [V, D].

    Args:
      scale_sqrt_depth: multiply by sqrt(input_dims), as Vaswani et al. 2017.
      fprop_dtype: of the vectors, and so of the computation behind them.
    """

    def __init__(
        self,
        num_classes: int,
        input_dims: int,
        *,
        scale_sqrt_depth: bool = False,
        fprop_dtype: jnp.dtype = jnp.float32,
        weight_split_dims_mapping: SplitDims = None,
        activation_split_dims_mapping: SplitDims = None,
        rngs: nnx.Rngs,
    ):
        require_positive(self, num_classes=num_classes, input_dims=input_dims)
        self.emb_var = self.weight(
            (num_classes, input_dims),
            weight_split_dims_mapping,
            init=jax.nn.initializers.normal(input_dims**-0.5),
            rngs=rngs,
        )
        self.class_split = next(iter(weight_split_dims_mapping or ()), None)
        self.scale = input_dims**0.5 if scale_sqrt_depth else 1.0
        self.fprop_dtype = fprop_dtype
        self.activation_split_dims_mapping = activation_split_dims_mapping

    def __call__(self, ids: jax.Array) -> jax.Array:
        embs = _lookup(self.emb_var[...].astype(self.fprop_dtype), ids, self.class_split)
        return constrain(embs * self.scale, self.activation_split_dims_mapping)


def _lookup(table_VD: jax.Array, ids: jax.Array, class_split: DimSplit) -> jax.Array:
    """Returns the rows of `table_VD` at `ids`: [B, T] -> [B, T, D].

    A row is whole where it is used. Were it still split, so would be what is gathered, against the
    batch's split, and XLA would go from one to the other by way of full copies.
    """
    return jnp.take(constrain(table_VD, (class_split, None)), ids, axis=0)


class SharedEmbeddingSoftmax(BaseLayer):
    """A softmax whose weight [D, V] also embeds the ids (Press and Wolf 2017, arXiv:1608.05859).

    Args:
      num_classes: V.
      input_dims: D.
      scale_sqrt_depth: multiply the embeddings by sqrt(input_dims).
      has_bias: add a bias [V] to the logits, split as V is.
      weight_split_dims_mapping: of [D, V].
      activation_split_dims_mapping: of the logits, [..., V].
      lookup_split_dims_mapping: of the embeddings, [B, T, D].
    """

    def __init__(
        self,
        num_classes: int,
        input_dims: int,
        *,
        scale_sqrt_depth: bool = True,
        has_bias: bool = False,
        fprop_dtype: jnp.dtype = jnp.float32,
        weight_split_dims_mapping: SplitDims = None,
        activation_split_dims_mapping: SplitDims = None,
        lookup_split_dims_mapping: SplitDims = None,
        rngs: nnx.Rngs,
    ):
        require_positive(self, num_classes=num_classes, input_dims=input_dims)
        self.w = self.weight(
            (input_dims, num_classes),
            weight_split_dims_mapping,
            init=jax.nn.initializers.normal(input_dims**-0.5),
            rngs=rngs,
        )
        self.class_split = (*(weight_split_dims_mapping or ()), None, None)[1]
        self.b = (
            self.weight((num_classes,), (self.class_split,), init=zeros, rngs=rngs)
            if has_bias
            else None
        )
        self.scale = input_dims**0.5 if scale_sqrt_depth else 1.0
        self.fprop_dtype = fprop_dtype
        self.activation_split_dims_mapping = activation_split_dims_mapping
        self.lookup_split_dims_mapping = lookup_split_dims_mapping

    def emb_lookup(self, ids: jax.Array) -> jax.Array:
        """Returns [B, T, D] for ids [B, T]."""
        embs = _lookup(self.w[...].astype(self.fprop_dtype).T, ids, self.class_split)
        return constrain(embs * self.scale, self.lookup_split_dims_mapping)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns float32 logits [..., V] of inputs [..., D]."""
        logits = jnp.einsum("...d,dv->...v", inputs, self.w[...].astype(inputs.dtype))
        logits = logits.astype(jnp.float32)
        if self.b is not None:
            logits += self.b[...].reshape((1,) * (logits.ndim - 1) + (-1,))
        return constrain(logits, self.activation_split_dims_mapping)


class RotaryPositionalEmbedding(BaseLayer):
    """Returns heads rotated by their position: [B, T, N, K] -> the same (arXiv:2104.09864).

    The first and the second half of K rotate together, as in Pax.
    """

    def __init__(
        self, embedding_dims: int, *, min_timescale: float = 1.0, max_timescale: float = 10_000.0
    ):
        if embedding_dims % 2:
            raise ConfigError(
                f"RotaryPositionalEmbedding.embedding_dims is {embedding_dims}; the halves of a "
                "head rotate together, so it must be even. Change dim_per_head, or use learned "
                "positions."
            )
        self.embedding_dims = embedding_dims
        self.min_timescale = min_timescale
        self.max_timescale = max_timescale

    def __call__(self, inputs: jax.Array, positions: jax.Array) -> jax.Array:
        """Args: inputs [B, T, N, K]; positions int [B, T] (or [1, T])."""
        fraction = jnp.arange(0, self.embedding_dims, 2, dtype=jnp.float32) / self.embedding_dims
        timescale = self.min_timescale * (self.max_timescale / self.min_timescale) ** fraction
        angle = positions[:, :, None, None].astype(jnp.float32) / timescale[None, None, None, :]
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        first, second = jnp.split(inputs.astype(jnp.float32), 2, axis=-1)
        rotated = [first * cos - second * sin, second * cos + first * sin]
        return jnp.concatenate(rotated, axis=-1).astype(inputs.dtype)


class TrainablePositionalEmbedding(BaseLayer):
    """Returns a learned vector per position: int [B, T] -> [B, T, D]; its weight is [max, D]."""

    def __init__(
        self,
        max_seq_length: int,
        embedding_dims: int,
        *,
        weight_split_dims_mapping: SplitDims = None,
        activation_split_dims_mapping: SplitDims = None,
        rngs: nnx.Rngs,
    ):
        require_positive(self, max_seq_length=max_seq_length, embedding_dims=embedding_dims)
        self.emb_var = self.weight(
            (max_seq_length, embedding_dims),
            weight_split_dims_mapping,
            init=jax.nn.initializers.normal(embedding_dims**-0.5),
            rngs=rngs,
        )
        self.max_seq_length = max_seq_length
        self.activation_split_dims_mapping = activation_split_dims_mapping

    def check_length(self, length: int) -> None:
        """Checks that sequences of `length` have a position each: beyond them `take` gives NaN.

        Raises:
          ConfigError: they do not; names the setting.
        """
        if length > self.max_seq_length:
            raise ConfigError(
                f"{type(self).__name__}.max_seq_length is {self.max_seq_length}, but a sequence "
                f"has up to {length} tokens (what is decoded included). Raise the model's "
                "max_seq_length, or shorten seq_len, the prompts or max_decode_steps."
            )

    def __call__(self, positions: jax.Array) -> jax.Array:
        """Args: positions int [B, T], below `max_seq_length`."""
        self.check_length(positions.shape[-1])
        embs = jnp.take(self.emb_var[...], positions, axis=0)
        return constrain(embs, self.activation_split_dims_mapping)
