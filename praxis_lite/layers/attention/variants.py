"""Pax's classes of attention whose heads share keys and values, as settings of ours."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from praxis_lite.layers.attention.attentions import DotProductAttention
from praxis_lite.layers.attention.projections import (
    AttentionProjection,
    OneHeadedAttentionProjection,
)
from praxis_lite.layers.embedding.positional_embeddings import RotaryPositionalEmbedding
from praxis_lite.layers.stochastics import Dropout
from praxis_lite.sharding import SplitDims

# B batch, T queries, N heads, G heads of keys and values, K dims per head, D model dims.


class MultiQueryDotProductAttention(DotProductAttention):
    """DotProductAttention with one head of keys and values, or few, and no learned scale.

    Shazeer 2019, arXiv:1911.02150; with 1 < G < N arXiv:2305.13245. Settings: see there.
    """

    def __init__(
        self,
        input_dim: int | Mapping[str, int],
        num_heads: int = 1,
        *,
        hidden_dim: int | None = None,
        dim_per_head: int | None = None,
        num_kv_heads: int = 1,
        is_causal: bool | None = None,
        is_cross_attention: bool = False,
        window: int | None = None,
        use_bias: bool = True,
        internal_enable_query_scale: bool = True,
        scale_query_by_dim_per_head: bool = False,
        atten_logit_cap: float = 0.0,
        attention_extra_logit: float | None = None,
        use_rotary_position_emb: bool = False,
        atten_dropout_prob: float = 0.0,
        output_proj_use_nhd_shape: bool = False,
        atten_kernel: str = "auto",
        atten_chunk_size: int = 512,
        proj_tpl: Callable[..., Any] = AttentionProjection,
        headless_proj_tpl: Callable[..., Any] = OneHeadedAttentionProjection,
        rotary_position_emb_tpl: Callable[..., Any] = RotaryPositionalEmbedding,
        relative_bias_tpl: Callable[..., Any] | None = None,
        dropout_tpl: Callable[..., Any] = Dropout,
        weight_split_dims_mapping: SplitDims = None,
        activation_split_dims_mapping: SplitDims = None,
        kv_split_dims_mapping: SplitDims = None,
        output_split_dims_mapping: SplitDims = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            input_dim,
            num_heads,
            hidden_dim=hidden_dim,
            dim_per_head=dim_per_head,
            num_kv_heads=num_kv_heads,
            is_causal=is_causal,
            is_cross_attention=is_cross_attention,
            window=window,
            use_bias=use_bias,
            internal_enable_query_scale=internal_enable_query_scale,
            internal_enable_per_dim_scale=False,
            scale_query_by_dim_per_head=scale_query_by_dim_per_head,
            atten_logit_cap=atten_logit_cap,
            attention_extra_logit=attention_extra_logit,
            use_rotary_position_emb=use_rotary_position_emb,
            atten_dropout_prob=atten_dropout_prob,
            output_proj_use_nhd_shape=output_proj_use_nhd_shape,
            atten_kernel=atten_kernel,
            atten_chunk_size=atten_chunk_size,
            proj_tpl=proj_tpl,
            headless_proj_tpl=headless_proj_tpl,
            rotary_position_emb_tpl=rotary_position_emb_tpl,
            relative_bias_tpl=relative_bias_tpl,
            dropout_tpl=dropout_tpl,
            weight_split_dims_mapping=weight_split_dims_mapping,
            activation_split_dims_mapping=activation_split_dims_mapping,
            kv_split_dims_mapping=kv_split_dims_mapping,
            output_split_dims_mapping=output_split_dims_mapping,
            rngs=rngs,
        )


class GroupedQueryAttention(DotProductAttention):
    """DotProductAttention with G heads of keys and values and queries scaled by 1 / sqrt(K).

    Ainslie et al. 2023, arXiv:2305.13245. Settings: see there, and

    Args:
      atten_temp: queries are divided by it.
      rope_min_max_timescales: rotate queries and keys, with these timescales; None: do not.
    """

    def __init__(
        self,
        input_dim: int,
        num_heads: int = 1,
        *,
        dim_per_head: int | None = None,
        num_kv_heads: int = 1,
        is_causal: bool | None = None,
        is_cross_attention: bool = False,
        window: int | None = None,
        use_bias: bool = True,
        atten_temp: float = 1.0,
        atten_logit_cap: float = 0.0,
        atten_dropout_prob: float = 0.0,
        rope_min_max_timescales: tuple[int, int] | None = None,
        atten_kernel: str = "auto",
        atten_chunk_size: int = 512,
        weight_split_dims_mapping: SplitDims = None,
        activation_split_dims_mapping: SplitDims = None,
        kv_split_dims_mapping: SplitDims = None,
        output_split_dims_mapping: SplitDims = None,
        rngs: nnx.Rngs,
    ):
        shortest, longest = rope_min_max_timescales or (1, 10_000)
        # Its weights are drawn by their true fans, unlike DotProductAttention's.
        projection = functools.partial(AttentionProjection, explicit_fan_in_fan_out_axes=True)
        super().__init__(
            input_dim,
            num_heads,
            dim_per_head=dim_per_head,
            num_kv_heads=num_kv_heads,
            is_causal=is_causal,
            is_cross_attention=is_cross_attention,
            window=window,
            use_bias=use_bias,
            internal_enable_per_dim_scale=False,
            scale_query_by_dim_per_head=True,
            atten_logit_cap=atten_logit_cap,
            use_rotary_position_emb=rope_min_max_timescales is not None,
            rotary_position_emb_tpl=functools.partial(
                RotaryPositionalEmbedding, min_timescale=shortest, max_timescale=longest
            ),
            atten_dropout_prob=atten_dropout_prob,
            atten_kernel=atten_kernel,
            atten_chunk_size=atten_chunk_size,
            proj_tpl=projection,
            weight_split_dims_mapping=weight_split_dims_mapping,
            activation_split_dims_mapping=activation_split_dims_mapping,
            kv_split_dims_mapping=kv_split_dims_mapping,
            output_split_dims_mapping=output_split_dims_mapping,
            rngs=rngs,
        )
        self.query_scale = self.query_scale / atten_temp
