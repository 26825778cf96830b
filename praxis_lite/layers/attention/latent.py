"""Multi-head latent attention: all heads compute keys and values from one latent vector."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.devices.axis_types import typed_as
from praxis_lite.core.sharding.split_dims import DimSplit, SplitDims, constrain, num_shards_of
from praxis_lite.layers.attention.checks import require_one_segment
from praxis_lite.layers.attention.kernels.choice import attend, check_kernel
from praxis_lite.layers.attention.kernels.context_parallel import check_context_parallel
from praxis_lite.layers.attention.kernels.settings import AttentionSettings
from praxis_lite.layers.attention.kv_cache import (
    Cache,
    append,
    constrain_cache,
    round_to_cache,
    stored_dtype,
)
from praxis_lite.layers.attention.masks import AttentionMask, not_padding
from praxis_lite.layers.attention.projections import AttentionProjection
from praxis_lite.layers.base.activation_names import named
from praxis_lite.layers.base.base_layer import BaseLayer, pad_to
from praxis_lite.layers.base.calls import require_positive
from praxis_lite.layers.base.dense import Product
from praxis_lite.layers.base.dims import HEAD_SPLITS, RESIDUAL, SplitSetting, sized, splits
from praxis_lite.layers.embedding.positional_embeddings import RotaryPositionalEmbedding
from praxis_lite.layers.linears import Bias, Linear
from praxis_lite.layers.normalizations import RmsNorm
from praxis_lite.layers.stochastics import Dropout

# B batch, T queries, S keys, D model dims, N heads, K non-rotary dims per head, R rotary dims per
# head, V value dims per head, L latent dims.


class MultiHeadLatentAttention(BaseLayer):
    """Causal self-attention over [B, T, D] via latents; returns outputs and the cache.

    See DeepSeek-V2, arXiv:2405.04434, section 2.1. For each token, the cache stores a latent [L]
    and a positional key [R] that all heads share: S (L + R) numbers per sequence. With a cache,
    queries are projected to the latent space, where all heads share the same keys. Without a cache,
    the keys and values of each head are computed from the latents. The results are equal up to
    rounding.

    Args:
      input_dim: D.
      num_heads: N.
      dim_per_head: Ignored; models pass it to all of their layers.
      q_lora_rank: Dims of the query latent. If None, queries are computed from the inputs.
      kv_lora_rank: L.
      qk_nope_head_dim: K.
      qk_rope_head_dim: R.
      v_head_dim: V.
      query_scale: Factor that multiplies the queries. If None, (K + R)^-0.5.
      use_bias: Whether to add biases to the outputs and to both latents, before their norms.
      rope_interleave: Whether dims 2 i and 2 i + 1 rotate together, as in DeepSeek's models. If
        False, dim i rotates with dim i + R / 2.
      ln_tpl: Norms for the latents, called with (dims, rngs=).
      rotary_position_emb_tpl: Rotary embedding, called with (R).
      atten_dropout_prob: See DotProductAttention.
      atten_kernel: See DotProductAttention.
      atten_chunk_size: See DotProductAttention.
      context_parallel: See DotProductAttention.
      weight_split_dims_mapping: Sharding of the projections to and from heads, [D or L, N, K]. The
        projections to latents use its first entry.
      activation_split_dims_mapping: Sharding of queries, keys and values, [B, T, N, K]. The cache
        has no heads dim; the cache's time dim is sharded like N.
      output_split_dims_mapping: Sharding of the outputs, [B, T, D].

    Raises:
      ConfigError: A size is not positive. When called: an atten_mask is passed, or segment_ids
        together with a cache.
    """

    cache_skips_padding = True

    splits = HEAD_SPLITS | splits(output=RESIDUAL)
    output_split_dims_mapping: SplitDims
    preset_settings = {"context_parallel": "attention_context"}

    def __init__(
        self,
        input_dim: int,
        num_heads: int = 1,
        *,
        dim_per_head: int | None = None,
        q_lora_rank: int | None = None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        query_scale: float | None = None,
        use_bias: bool = False,
        rope_interleave: bool = True,
        ln_tpl: Callable[..., Any] = RmsNorm,
        rotary_position_emb_tpl: Callable[..., Any] = RotaryPositionalEmbedding,
        atten_dropout_prob: float = 0.0,
        atten_kernel: str = "auto",
        atten_chunk_size: int = 512,
        context_parallel: str | None = None,
        rngs: nnx.Rngs,
        weight_split_dims_mapping: SplitSetting = None,
        activation_split_dims_mapping: SplitSetting = None,
        output_split_dims_mapping: SplitSetting = None,
    ):
        del dim_per_head
        L, K, R, V = kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        require_positive(
            self,
            num_heads=num_heads,
            kv_lora_rank=L,
            qk_nope_head_dim=K,
            qk_rope_head_dim=R,
            v_head_dim=V,
            atten_chunk_size=atten_chunk_size,
        )
        uses = {"atten_dropout_prob": atten_dropout_prob > 0.0}
        check_kernel(atten_kernel, uses)
        D, N, of_head = self.dims(input_dim, num_heads, K)

        # Latents are replicated; the heads that are computed from them are sharded.
        def latent_projection(dims: int) -> Linear:
            return Linear(D, dims, rngs=rngs)

        def head_projection(dims: int, per_head: int) -> AttentionProjection:
            return AttentionProjection(
                sized(D, dims), N, sized(of_head, per_head), use_bias=False, rngs=rngs
            )

        Q = q_lora_rank
        self.query_latent = None if Q is None else latent_projection(Q)
        self.query_latent_norm = None if Q is None else ln_tpl(Q, rngs=rngs)
        self.query = head_projection(D, K + R) if Q is None else None
        self.query_up = None if Q is None else head_projection(Q, K + R)
        self.key_value_latent = latent_projection(L + R)
        self.key_value_latent_norm = ln_tpl(L, rngs=rngs)
        self.query_latent_bias = None if Q is None or not use_bias else Bias(Q, rngs=rngs)
        self.key_value_latent_bias = Bias(L + R, rngs=rngs) if use_bias else None
        self.key_value = head_projection(L, K + V)
        self.post = AttentionProjection(
            D, N, sized(of_head, V), is_output_projection=True, use_bias=use_bias, rngs=rngs
        )
        self.rotary_position_emb = rotary_position_emb_tpl(R)
        self.query_scale = (K + R) ** -0.5 if query_scale is None else query_scale
        self.rope_interleave = rope_interleave
        self.sizes = (num_heads, K, R, V, L)
        self.atten_dropout = Dropout(atten_dropout_prob)
        self.attention_settings = AttentionSettings(
            atten_kernel, atten_chunk_size, context_parallel
        )
        check_context_parallel(self, self.attention_settings, uses)

    def init_cache(self, batch_size: int, max_seq_length: int, dtype: Any) -> Cache:
        """Returns an empty cache of latents followed by positional keys, [B, S, L + R]."""
        _, _, R, _, L = self.sizes
        cache = {"key": jnp.zeros((batch_size, max_seq_length, L + R), stored_dtype(dtype))}
        return constrain_cache(cache, self._split_of_cache())

    def __call__(
        self,
        inputs: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        paddings: jax.Array | None = None,
        atten_mask: jax.Array | None = None,
        key: jax.Array | None = None,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Returns outputs [B, T, D] and the updated cache.

        For the arguments, see `DotProductAttention.__call__`.
        """
        if atten_mask is not None:
            raise ConfigError(
                "MultiHeadLatentAttention is always causal and does not support an atten_mask. "
                "Pass segment_ids or paddings instead, or use DotProductAttention."
            )
        require_one_segment(self, cache, segment_ids)
        if positions is None:
            positions = jnp.arange(inputs.shape[1], dtype=jnp.int32)[None, :]
        q_BTNK, q_BTNR = self._queries(inputs, positions)
        latents = _plus(self.key_value_latent(inputs), self.key_value_latent_bias)
        _, _, _, _, L = self.sizes
        # The first L dims are the latent; the rest is the rotary part of the keys, which all heads
        # share.
        new = {
            "latent": self.key_value_latent_norm(latents[..., :L]),
            "key": self._rotate(latents[..., None, L:], positions)[:, :, 0],
        }
        # Without a cache, keys and values are computed for each head. With a cache, queries are
        # projected into the latent space instead, and attend directly to the cached latents.
        if cache is None:
            mask = AttentionMask(
                None,
                0,
                q_segments_BT=segment_ids,
                kv_segments_BS=segment_ids,
                kv_visible_BS=not_padding(paddings),
                is_to_itself=True,
            )
            encoded_BTNV = self._over_heads(q_BTNK, q_BTNR, new, mask, key)
        else:
            new = round_to_cache(
                {"key": jnp.concatenate([new["latent"], new["key"]], -1)}, inputs.dtype
            )
            split = self._split_of_cache()
            cache = constrain_cache(append(cache, new, positions, split), split)
            mask = AttentionMask(None, 0, q_index_BT=positions)
            encoded_BTNV = self._over_latents(q_BTNK, q_BTNR, cache, mask, key)
        encoded_BTNV = self._constrain(encoded_BTNV.astype(inputs.dtype))
        outputs = constrain(self.post(encoded_BTNV), self.output_split_dims_mapping)
        return named(outputs, "out_proj"), cache

    def _queries(self, inputs: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns scaled queries [B, T, N, K] and rotated, scaled queries [B, T, N, R]."""
        if self.query is not None:
            q = self.query(inputs)
        else:
            assert self.query_latent is not None
            assert self.query_latent_norm is not None and self.query_up is not None
            latent = _plus(self.query_latent(inputs), self.query_latent_bias)
            q = self.query_up(self.query_latent_norm(latent))
        _, K, *_ = self.sizes
        q = named(self._constrain(q), "query_proj") * self.query_scale
        return q[..., :K], self._rotate(q[..., K:], positions)

    def _over_heads(
        self,
        q_BTNK: jax.Array,
        q_BTNR: jax.Array,
        new: Cache,
        mask: AttentionMask,
        key: jax.Array | None,
    ) -> jax.Array:
        """Returns outputs [B, T, N, V], with keys and values computed for each head."""
        N, K, R, V, _ = self.sizes
        kv = named(self._constrain(self.key_value(new["latent"])), "key_proj")
        k_BSNK, v_BSNV = kv[..., :K], kv[..., K:]
        k_BSNR = jnp.broadcast_to(new["key"][:, :, None], (*k_BSNK.shape[:3], R))
        k_BSNR = typed_as(k_BSNR, k_BSNK)
        # Kernels require keys and values of the same size.
        q, k, v = (
            pad_to(x, max(K + R, V), dim=3)
            for x in (
                jnp.concatenate([q_BTNK, q_BTNR], -1),
                jnp.concatenate([k_BSNK, k_BSNR], -1),
                v_BSNV,
            )
        )
        return self._attend(q, k, v, V, mask, key)

    def _over_latents(
        self,
        q_BTNK: jax.Array,
        q_BTNR: jax.Array,
        cache: Cache,
        mask: AttentionMask,
        key: jax.Array | None,
    ) -> jax.Array:
        """Returns outputs [B, T, N, V], with the latents as keys and values of all heads."""
        _, K, _, _, L = self.sizes
        w = self.key_value.kernel(q_BTNK.dtype)
        if self.key_value.product != Product():  # The weight has an adapter or is quantized.
            w = self.key_value(jnp.eye(L, dtype=q_BTNK.dtype))
        w_LNK, w_LNV = jnp.split(w, [K], axis=-1)
        q = jnp.concatenate([jnp.einsum("btnk,lnk->btnl", q_BTNK, w_LNK), q_BTNR], -1)
        # Convert the query: the cache may have a wider dtype, and converting the cache for each
        # token would be slow.
        q = q.astype(jnp.promote_types(q.dtype, cache["key"].dtype))
        if self.split_of_time() is not None:
            # Replicate the heads, because each device has some of the keys for all heads.
            q = constrain(q, (self.activation_split_dims_mapping or ())[:2])
        # Positional keys are also values; `value_dims` slices off their outputs.
        kv = cache["key"].astype(q.dtype)[:, :, None]
        outputs_BTNL = self._attend(q, kv, kv, L, mask, key, has_cache=True)
        return jnp.einsum("btnl,lnv->btnv", outputs_BTNL, w_LNV)

    def _attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        value_dims: int,
        mask: AttentionMask,
        key: jax.Array | None,
        has_cache: bool = False,
    ) -> jax.Array:
        return attend(
            self.attention_settings,
            q,
            k,
            v.astype(q.dtype),
            mask,
            has_cache=has_cache,
            dropout=self.atten_dropout,
            key=key,
            split=self.activation_split_dims_mapping,
            value_dims=value_dims,
        )

    def _rotate(self, heads: jax.Array, positions: jax.Array) -> jax.Array:
        if self.rope_interleave:  # Logits do not depend on the order of dims within a head.
            pairs = heads.reshape(*heads.shape[:-1], -1, 2)
            heads = pairs.swapaxes(-1, -2).reshape(heads.shape)
        return self.rotary_position_emb(heads, positions)

    def _constrain(self, x_BTNK: jax.Array) -> jax.Array:
        return constrain(x_BTNK, self.activation_split_dims_mapping)

    def split_of_time(self) -> DimSplit:
        """Returns the mesh axes of the heads dim, which shard the cache along time, or None."""
        _, S, N = (*(self.activation_split_dims_mapping or ()), None, None, None)[:3]
        return N if S is None and num_shards_of(N) > 1 else None

    def _split_of_cache(self) -> SplitDims:
        if self.activation_split_dims_mapping is None:
            return None
        B, S = (*self.activation_split_dims_mapping, None, None)[:2]
        return B, self.split_of_time() or S, None


def _plus(x: jax.Array, bias: Bias | None) -> jax.Array:
    return x if bias is None else bias(x)
