"""Multi-head attention, to the inputs or to others, with its cache as an explicit tree."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from praxis_lite.errors import ConfigError
from praxis_lite.layers.attention import cache as attention_cache
from praxis_lite.layers.attention.cache import Cache
from praxis_lite.layers.attention.checks import check_call, check_settings, head_sizes
from praxis_lite.layers.attention.einsum import LogitOptions
from praxis_lite.layers.attention.kernels import attend, check_kernel
from praxis_lite.layers.attention.masks import AttentionMask, cross_attention_mask, is_true
from praxis_lite.layers.attention.projections import (
    AttentionProjection,
    CombinedQKVProjectionLayer,
    OneHeadedAttentionProjection,
    PerDimScale,
)
from praxis_lite.layers.base_layer import BaseLayer
from praxis_lite.layers.embedding.positional_embeddings import RotaryPositionalEmbedding
from praxis_lite.layers.stochastics import Dropout
from praxis_lite.sharding import SplitDims, constrain

# B batch, T queries, S keys, D model dims, N heads, G heads of keys and values, K dims per head.


class DotProductAttention(BaseLayer):
    """Returns attention of [B, T, D] to itself or to `encoded` [B, S, D], and the cache.

    Vaswani et al. 2017, arXiv:1706.03762; names, defaults and numerics are Pax's. Softmax in
    float32.

    Args:
      input_dim: D, or one each of "query", "key" and "value" for inputs and `encoded` of
        different dims.
      num_heads: N.
      hidden_dim: K is hidden_dim / N unless dim_per_head is set; None: D.
      dim_per_head: K. As in Pax, the plain scale of queries (without the per-dim scale) stays
        that of hidden_dim / N, unless scale_query_by_dim_per_head.
      num_kv_heads: G, heads of keys and values, each read by N / G heads of queries
        (arXiv:2305.13245; 1: arXiv:1911.02150); None: N.
      is_causal: True: a token sees itself and what is before it in its row. False: it sees all.
        None: True, unless the call hands an atten_mask, which then says all, as in Pax; a window
        holds beside it. Of attention to itself only.
      is_cross_attention: keys and values come from `encoded`.
      window: a token sees itself and the window - 1 tokens before it: Pax's left_context.
      right_context: of attention that is not causal, how many tokens after it a token sees; None:
        all, or window - 1.
      use_bias: of the projections.
      internal_gshard_gaussian_init: draw the separate projections as Gaussians of the variances
        1 / (D K) of queries, 1 / D of keys and values, 1 / (N K) of outputs (GShard's).
      combine_qkv: one weight for queries, keys and values.
      internal_enable_query_scale, internal_enable_per_dim_scale: scale queries, by a learned
        scale per dim.
      scale_query_by_dim_per_head: see dim_per_head.
      scale_logits_by_head_dims: multiply logits by 1 / sqrt(K).
      atten_logit_cap: cap logits by tanh; 0.0: not.
      attention_extra_logit: a logit beside the keys' that takes weight and gives nothing.
      zero_fully_masked: zeros for a query that sees no key, instead of an average.
      use_rotary_position_emb: rotate queries and keys by their positions.
      ln_tpl: norm of queries and keys, after rotation as in Pax, called with (K, rngs=).
      relative_bias_tpl: bias by distance, called with (N, rngs=).
      atten_dropout_prob: on the attention probabilities.
      output_proj_use_nhd_shape: keep the output weight as [N, K, D].
      atten_kernel: "auto", "einsum", "dot_product", "cudnn", "splash" or "chunked"; see
        `choose_kernel`. What was chosen, and why, is logged once.
      atten_chunk_size: queries, and keys, of a chunk of the chunked kernel.
      weight_split_dims_mapping: of the projections' weights, as [D, N, K].
      activation_split_dims_mapping: of queries, keys, values and the cache, [B, T, N, K].
      kv_split_dims_mapping: of keys, values and the cache, [B, S, G, K], if not the same; one
        head stays whole.
      output_split_dims_mapping: of the outputs, [B, T, D].
    """

    def __init__(
        self,
        input_dim: int | Mapping[str, int],
        num_heads: int = 1,
        *,
        hidden_dim: int | None = None,
        dim_per_head: int | None = None,
        num_kv_heads: int | None = None,
        is_causal: bool | None = None,
        is_cross_attention: bool = False,
        window: int | None = None,
        right_context: int | None = None,
        use_bias: bool = True,
        internal_gshard_gaussian_init: bool = False,
        combine_qkv: bool = False,
        internal_enable_query_scale: bool = True,
        internal_enable_per_dim_scale: bool = True,
        scale_query_by_dim_per_head: bool = False,
        scale_logits_by_head_dims: bool = False,
        atten_logit_cap: float = 0.0,
        attention_extra_logit: float | None = None,
        zero_fully_masked: bool = False,
        use_rotary_position_emb: bool = False,
        atten_dropout_prob: float = 0.0,
        output_proj_use_nhd_shape: bool = False,
        atten_kernel: str = "auto",
        atten_chunk_size: int = 512,
        proj_tpl: Callable[..., Any] = AttentionProjection,
        combined_qkv_proj_tpl: Callable[..., Any] = CombinedQKVProjectionLayer,
        headless_proj_tpl: Callable[..., Any] = OneHeadedAttentionProjection,
        per_dim_scale_tpl: Callable[..., Any] = PerDimScale,
        rotary_position_emb_tpl: Callable[..., Any] = RotaryPositionalEmbedding,
        relative_bias_tpl: Callable[..., Any] | None = None,
        ln_tpl: Callable[..., Any] | None = None,
        dropout_tpl: Callable[..., Any] = Dropout,
        weight_split_dims_mapping: SplitDims = None,
        activation_split_dims_mapping: SplitDims = None,
        kv_split_dims_mapping: SplitDims = None,
        output_split_dims_mapping: SplitDims = None,
        rngs: nnx.Rngs,
    ):
        sizes = head_sizes(self, input_dim, hidden_dim, num_heads, dim_per_head, num_kv_heads)
        N, G, K = sizes.N, sizes.G, sizes.K
        logit_options = LogitOptions(
            scale=K**-0.5 if scale_logits_by_head_dims else 1.0,
            cap=atten_logit_cap,
            extra=attention_extra_logit,
            zero_fully_masked=zero_fully_masked,
        )
        # What a caller's mask is to be counted beside, or not.
        self.mask_is_all = is_causal is None and window is None
        self.refuses_mask = is_causal is True and window is None
        is_causal = is_causal is not False
        check_settings(
            self,
            sizes,
            is_causal=is_causal,
            is_cross_attention=is_cross_attention,
            window=window,
            right_context=right_context,
            combine_qkv=combine_qkv,
            atten_logit_cap=atten_logit_cap,
            atten_chunk_size=atten_chunk_size,
        )
        check_kernel(
            atten_kernel,
            {
                "atten_dropout_prob": atten_dropout_prob > 0.0,
                "num_kv_heads": G != N,
                "relative_bias_tpl": relative_bias_tpl is not None,
                "window": window is not None,
                "window without is_causal": window is not None and not is_causal,
                **logit_options.needs,
            },
        )
        splits = weight_split_dims_mapping
        common = {"use_bias": use_bias, "rngs": rngs}

        def projection(
            template: Callable[..., Any], dim: int, heads: int, *fans: int, **kwargs: Any
        ) -> Any:
            if internal_gshard_gaussian_init and fans:
                kwargs["params_init"] = jax.nn.initializers.normal(math.prod(fans) ** -0.5)
            if heads == 1 < N:  # Pax's multi-query attention has no dim of heads there.
                split = None if splits is None else (*splits[:1], *splits[2:])
                return headless_proj_tpl(
                    dim, K, weight_split_dims_mapping=split, **common, **kwargs
                )
            return template(dim, heads, K, weight_split_dims_mapping=splits, **common, **kwargs)

        D, key_D, value_D = (sizes.input_dims[name] for name in ("query", "key", "value"))
        self.combined_qkv = projection(combined_qkv_proj_tpl, D, N) if combine_qkv else None
        self.query = None if combine_qkv else projection(proj_tpl, D, N, D, K)
        self.key = None if combine_qkv else projection(proj_tpl, key_D, G, key_D)
        self.value = None if combine_qkv else projection(proj_tpl, value_D, G, value_D)
        shape = {"use_nhd_shape": True} if output_proj_use_nhd_shape else {}
        self.post = projection(proj_tpl, D, N, N, K, is_output_projection=True, **shape)
        learns_scale = internal_enable_query_scale and internal_enable_per_dim_scale
        self.per_dim_scale = per_dim_scale_tpl(K, rngs=rngs) if learns_scale else None
        self.query_scale = 1.0
        if internal_enable_query_scale and not learns_scale:
            has_own_dim = scale_query_by_dim_per_head and dim_per_head is not None
            self.query_scale = float((K if has_own_dim else sizes.hidden_per_head) ** -0.5)
        self.rotary_position_emb = rotary_position_emb_tpl(K) if use_rotary_position_emb else None
        self.relative_bias = None if relative_bias_tpl is None else relative_bias_tpl(N, rngs=rngs)
        self.layer_norm_q = None if ln_tpl is None else ln_tpl(K, rngs=rngs)
        self.layer_norm_k = None if ln_tpl is None else ln_tpl(K, rngs=rngs)
        self.atten_dropout = dropout_tpl(atten_dropout_prob)
        self.num_kv_heads, self.dim_per_head = G, K
        self.is_causal, self.is_cross_attention = is_causal, is_cross_attention
        self.left_context, self.right_context = window, right_context
        if is_causal:
            self.right_context = 0
        elif right_context is None and window is not None:
            self.right_context = window - 1
        self.logit_options, self.atten_kernel = logit_options, atten_kernel
        self.atten_chunk_size = atten_chunk_size
        self.activation_split_dims_mapping = activation_split_dims_mapping
        if kv_split_dims_mapping is None and activation_split_dims_mapping is not None:
            kv_split_dims_mapping = (*activation_split_dims_mapping, None, None, None, None)[:4]
            if G == 1 < N:
                kv_split_dims_mapping = (*kv_split_dims_mapping[:2], None, None)
        self.kv_split_dims_mapping = kv_split_dims_mapping
        self.output_split_dims_mapping = output_split_dims_mapping

    def init_cache(
        self,
        batch_size: int,
        max_seq_length: int,
        dtype: Any,
        *,
        encoded_length: int | None = None,
    ) -> Cache:
        """Returns an empty cache: keys and values [B, S, G, K].

        Of cross-attention S is `encoded_length`, and `encoded_visible` bool [B, S] comes with it.

        Raises:
          ConfigError: cross-attention without encoded_length, or bidirectional attention, where
            a later token would change what earlier ones gave.
        """
        if self.is_cross_attention and encoded_length is None:
            raise ConfigError(
                "DotProductAttention.init_cache of cross-attention needs encoded_length, the "
                "length of the longest `encoded` that it will keep."
            )
        if not self.is_causal and not self.is_cross_attention:
            raise ConfigError(
                "DotProductAttention with is_causal=False has no cache: a later token changes "
                "what earlier ones see. Run the whole sequence, or set is_causal=True."
            )
        length = encoded_length if self.is_cross_attention else max_seq_length
        shape_BSGK = (batch_size, length, self.num_kv_heads, self.dim_per_head)
        return self._split_kv(
            attention_cache.empty(shape_BSGK, dtype, is_cross_attention=self.is_cross_attention)
        )

    def __call__(
        self,
        inputs: jax.Array,
        *,
        encoded: jax.Array | None = None,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        paddings: jax.Array | None = None,
        encoded_paddings: jax.Array | None = None,
        encoded_segment_ids: jax.Array | None = None,
        atten_mask: jax.Array | None = None,
        key: jax.Array | None = None,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Returns outputs [B, T, D] and the cache with these tokens in it.

        With a cache the tokens are written at their positions and attend to every position of the
        cache up to their own; rows may be at different positions, and a row is one segment.
        Cross-attention keeps the keys and values of `encoded` in the cache; later calls read them
        there, without `encoded`.

        Args:
          inputs: [B, T, D].
          encoded: [B, S, D], what to attend to; None: the inputs, or what the cache has.
          positions: int [B or 1, T], consecutive in T; None: 0 to T - 1.
          segment_ids: int [B, T]; tokens see their own segment.
          paddings: [B, T], 1.0 for padding, which no token sees.
          encoded_paddings, encoded_segment_ids: the same of `encoded`, [B, S].
          atten_mask: float [B or 1, 1 or N, 1 or T, S]; below half of LARGE_NEGATIVE a key is
            unseen, and any other number is as good as 0: it is not added to the logits.
          key: turns dropout on.
        """
        check_call(self, inputs, encoded, cache, atten_mask)
        if positions is None:
            # Made here, a constant of the program: XLA then folds the rotary sines and cosines,
            # which from positions handed into a scan it computes for every head of every layer.
            positions = _arange(inputs.shape[1])
        is_cross = self.is_cross_attention or encoded is not None
        if is_cross:
            kv_positions = None if encoded is None else _arange(encoded.shape[1])
            # With a cache a row is one segment, and its padding is segment 0.
            own_segments = None if cache is not None else segment_ids
            mask = cross_attention_mask(own_segments, encoded_paddings, encoded_segment_ids)
        else:
            encoded, kv_positions = inputs, positions
            is_all = atten_mask is not None and self.mask_is_all
            mask = AttentionMask(
                self.left_context,
                None if is_all else self.right_context,
                q_segments_BT=segment_ids,
                kv_segments_BS=segment_ids,
                kv_visible_BS=is_true(paddings),
            )
        q_BTNK, kv = self._heads(inputs, encoded, positions, kv_positions)
        if cache is not None:
            if not is_cross:
                start_B = jnp.broadcast_to(positions, inputs.shape[:2])[:, 0]
                cache = attention_cache.append(cache, kv, start_B)
                mask = AttentionMask(self.left_context, 0, q_index_BT=positions)
            else:
                if kv is not None:
                    cache = attention_cache.keep_encoded(cache, kv, mask.kv_visible_BS)
                mask = AttentionMask(kv_visible_BS=cache["encoded_visible"])
            kv = cache = self._split_kv(cache)
            kv_positions = _arange(cache["key"].shape[1])
        bias = None
        if self.relative_bias is not None:
            bias = self.relative_bias(positions, kv_positions)
        encoded_BTNK = attend(
            self.atten_kernel,
            q_BTNK,
            kv["key"].astype(q_BTNK.dtype),
            kv["value"].astype(q_BTNK.dtype),
            mask,
            self.logit_options,
            has_cache=cache is not None,
            bias=bias,
            atten_mask=atten_mask,
            dropout=self.atten_dropout,
            key=key,
            chunk_size=self.atten_chunk_size,
            split=self.activation_split_dims_mapping,
        )
        # Rotary positions may give float32.
        encoded_BTNK = checkpoint_name(self._split(encoded_BTNK.astype(inputs.dtype)), "context")
        outputs = constrain(self.post(encoded_BTNK), self.output_split_dims_mapping)
        return checkpoint_name(outputs, "out_proj"), cache

    def _heads(
        self,
        inputs: jax.Array,
        source: jax.Array | None,
        positions: jax.Array,
        kv_positions: jax.Array | None,
    ) -> tuple[jax.Array, Cache | None]:
        """Returns queries of inputs, and keys and values of source, or None where it is None."""

        def placed(heads: jax.Array, positions: jax.Array, norm: Any) -> jax.Array:
            if self.rotary_position_emb is not None:
                heads = self.rotary_position_emb(heads, positions)
            return heads if norm is None else norm(heads)

        if self.combined_qkv is not None:
            q_BTNK, k_BSGK, v_BSGK = checkpoint_name(self.combined_qkv(inputs), "combined_qkv_proj")
        else:
            q_BTNK = self.query(inputs)
        # Their layout as they are made, too: where time is split outside, it is gathered before the
        # projections, and not the projections' weights.
        q_BTNK = checkpoint_name(self._split(q_BTNK), "query_proj")
        q_BTNK = placed(q_BTNK, positions, self.layer_norm_q)
        if self.per_dim_scale is not None:
            q_BTNK = self.per_dim_scale(q_BTNK)
        q_BTNK = self._split(q_BTNK * self.query_scale)
        if source is None:
            return q_BTNK, None
        if self.combined_qkv is None:
            k_BSGK, v_BSGK = self.key(source), self.value(source)
        kv = self._split_kv({"key": k_BSGK, "value": v_BSGK})
        k_BSGK = placed(checkpoint_name(kv["key"], "key_proj"), kv_positions, self.layer_norm_k)
        v_BSGK = checkpoint_name(kv["value"], "value_proj")
        return q_BTNK, self._split_kv({"key": k_BSGK, "value": v_BSGK})

    def _split(self, x_BTNK: jax.Array) -> jax.Array:
        return constrain(x_BTNK, self.activation_split_dims_mapping)

    def _split_kv(self, kv: Cache) -> Cache:
        split = self.kv_split_dims_mapping
        heads = {name: constrain(kv[name], split) for name in ("key", "value")}
        if "encoded_visible" not in kv:
            return heads
        rows = None if split is None else tuple(split)[:2]
        return heads | {"encoded_visible": constrain(kv["encoded_visible"], rows)}


def _arange(length: int) -> jax.Array:
    return jnp.arange(length, dtype=jnp.int32)[None, :]
