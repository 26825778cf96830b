"""Causal multi-head attention, with a key/value cache as an explicit tree."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.errors import ConfigError
from praxis_lite.layers.embeddings import RotaryPositionalEmbedding
from praxis_lite.layers.stochastics import Dropout
from praxis_lite.sharding import SplitDims, constrain
from praxis_lite.weights import BaseLayer, Initializer, require_positive, zeros

# B batch, T queries, S keys, D model dims, N heads, K dims per head.
Cache = dict[str, jax.Array]

_into_heads = jax.nn.initializers.variance_scaling(
    1.0, "fan_avg", "uniform", in_axis=0, out_axis=(1, 2)
)
_out_of_heads = jax.nn.initializers.variance_scaling(
    1.0, "fan_avg", "uniform", in_axis=(1, 2), out_axis=0
)


class AttentionProjection(BaseLayer):
    """Projects [B, T, D] to heads [B, T, N, K], or back; its weight is [D, N, K] either way."""

    def __init__(
        self,
        input_dims: int,
        num_heads: int,
        dim_per_head: int,
        *,
        is_output_projection: bool = False,
        use_bias: bool = False,
        weight_split_dims_mapping: SplitDims = None,
        activation_split_dims_mapping: SplitDims = None,
        rngs: nnx.Rngs,
    ):
        init: Initializer = _out_of_heads if is_output_projection else _into_heads
        self.w = self.weight(
            (input_dims, num_heads, dim_per_head), weight_split_dims_mapping, init=init, rngs=rngs
        )
        split_D, *split_NK = (*(weight_split_dims_mapping or ()), None, None, None)[:3]
        shape = (input_dims,) if is_output_projection else (num_heads, dim_per_head)
        split = (split_D,) if is_output_projection else tuple(split_NK)
        self.b = self.weight(shape, split, init=zeros, rngs=rngs) if use_bias else None
        self.is_output_projection = is_output_projection
        self.activation_split_dims_mapping = activation_split_dims_mapping

    def __call__(self, inputs: jax.Array) -> jax.Array:
        equation = "btnk,dnk->btd" if self.is_output_projection else "btd,dnk->btnk"
        outputs = jnp.einsum(equation, inputs, self.w[...].astype(inputs.dtype))
        if self.b is not None:
            outputs += self.b[...].astype(inputs.dtype)[None, None]
        return constrain(outputs, self.activation_split_dims_mapping)


class DotProductAttention(BaseLayer):
    """Returns causal self-attention of [B, T, D] and the cache with these T tokens in it.

    Vaswani et al. 2017, arXiv:1706.03762. Softmax in float32.

    Args:
      input_dims: D.
      num_heads: N.
      dim_per_head: K; None: input_dims / num_heads.
      use_bias: of the four projections.
      use_rotary_position_emb: rotate queries and keys by their positions.
      atten_dropout_prob: on the attention probabilities.
      weight_split_dims_mapping: of the weights [D, N, K].
      activation_split_dims_mapping: of queries, keys, values and the cache, [B, T, N, K].
      output_split_dims_mapping: of the outputs, [B, T, D].
    """

    def __init__(
        self,
        input_dims: int,
        num_heads: int,
        *,
        dim_per_head: int | None = None,
        use_bias: bool = False,
        use_rotary_position_emb: bool = True,
        atten_dropout_prob: float = 0.0,
        proj_tpl: Callable[..., Any] = AttentionProjection,
        weight_split_dims_mapping: SplitDims = None,
        activation_split_dims_mapping: SplitDims = None,
        output_split_dims_mapping: SplitDims = None,
        rngs: nnx.Rngs,
    ):
        require_positive(self, input_dims=input_dims, num_heads=num_heads)
        if dim_per_head is None:
            if input_dims % num_heads:
                raise ConfigError(
                    f"DotProductAttention: {num_heads} heads do not divide the {input_dims} input "
                    "dims. Set dim_per_head, or change num_heads."
                )
            dim_per_head = input_dims // num_heads
        require_positive(self, dim_per_head=dim_per_head)

        def projection(**kwargs: Any) -> AttentionProjection:
            return proj_tpl(
                input_dims,
                num_heads,
                dim_per_head,
                use_bias=use_bias,
                weight_split_dims_mapping=weight_split_dims_mapping,
                rngs=rngs,
                **kwargs,
            )

        self.query, self.key, self.value = projection(), projection(), projection()
        self.post = projection(is_output_projection=True)
        self.rotary = RotaryPositionalEmbedding(dim_per_head) if use_rotary_position_emb else None
        self.atten_dropout = Dropout(atten_dropout_prob)
        self.num_heads, self.dim_per_head = num_heads, dim_per_head
        self.activation_split_dims_mapping = activation_split_dims_mapping
        self.output_split_dims_mapping = output_split_dims_mapping

    def init_cache(self, batch_size: int, max_seq_length: int, dtype: Any) -> Cache:
        """Returns an empty cache: keys and values [B, S, N, K]."""
        shape = (batch_size, max_seq_length, self.num_heads, self.dim_per_head)
        return {name: self._split(jnp.zeros(shape, dtype)) for name in ("key", "value")}

    def __call__(
        self,
        inputs: jax.Array,
        *,
        positions: jax.Array | None = None,
        key: jax.Array | None = None,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Args: inputs [B, T, D]; positions int [B or 1, T], consecutive in T; None: 0 to T - 1.

        With a cache the tokens are written at their positions, and attend to every position of
        the cache up to their own. Rows may be at different positions.
        """
        if positions is None:
            # Made here, a constant of the program: XLA then folds the rotary sines and cosines,
            # which from positions handed into a scan it computes for every head of every layer.
            positions = jnp.arange(inputs.shape[1], dtype=jnp.int32)[None, :]
        q_BTNK, k_BSNK, v_BSNK = self.query(inputs), self.key(inputs), self.value(inputs)
        if self.rotary is not None:
            q_BTNK, k_BSNK = self.rotary(q_BTNK, positions), self.rotary(k_BSNK, positions)
        q_BTNK = self._split(q_BTNK * self.dim_per_head**-0.5)
        k_BSNK, v_BSNK = self._split(k_BSNK), self._split(v_BSNK)
        if cache is not None:
            start_B = jnp.broadcast_to(positions, inputs.shape[:2])[:, 0]
            k_BSNK = self._split(_write(cache["key"], k_BSNK, start_B))
            v_BSNK = self._split(_write(cache["value"], v_BSNK, start_B))
            cache = {"key": k_BSNK, "value": v_BSNK}
        logits_BNTS = jnp.einsum(
            "btnk,bsnk->bnts", q_BTNK, k_BSNK, preferred_element_type=jnp.float32
        )
        slots_S = jnp.arange(k_BSNK.shape[1], dtype=positions.dtype)
        visible_BTS = slots_S[None, None, :] <= positions[:, :, None]
        logits_BNTS = jnp.where(visible_BTS[:, None], logits_BNTS, -0.7 * jnp.finfo("float32").max)
        probs_BNTS = jax.nn.softmax(logits_BNTS, axis=-1).astype(inputs.dtype)
        probs_BNTS = self.atten_dropout(probs_BNTS, key)
        encoded_BTNK = self._split(jnp.einsum("bnts,bsnk->btnk", probs_BNTS, v_BSNK))
        outputs = constrain(self.post(encoded_BTNK), self.output_split_dims_mapping)
        return outputs, cache

    def _split(self, x_BTNK: jax.Array) -> jax.Array:
        return constrain(x_BTNK, self.activation_split_dims_mapping)


def _write(cache_BSNK: jax.Array, new_BTNK: jax.Array, start_B: jax.Array) -> jax.Array:
    """Returns the cache with each row's T new entries at that row's start."""

    def write_row(cache: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(cache, new.astype(cache.dtype), (start, 0, 0))

    return jax.vmap(write_row)(cache_BSNK, new_BTNK, start_B)
