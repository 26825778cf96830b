"""Pax's attention classes with shared keys and values, as variants of DotProductAttention."""

import functools
from collections.abc import Mapping
from typing import Any

from praxis_lite.layers.attention.attentions import DotProductAttention
from praxis_lite.layers.attention.projections import AttentionProjection
from praxis_lite.layers.base.calls import inherit_params
from praxis_lite.layers.embedding.positional_embeddings import RotaryPositionalEmbedding

# Settings that do not exist in either of the two classes in Pax.
_ABSENT = (
    "right_context",
    "internal_gshard_gaussian_init",
    "combine_qkv",
    "combined_qkv_proj_tpl",
    "internal_enable_per_dim_scale",
    "per_dim_scale_tpl",
    "scale_logits_by_head_dims",
    "zero_fully_masked",
    "ln_tpl",
)


class MultiQueryDotProductAttention(DotProductAttention):
    """DotProductAttention with few key/value heads and without a learned query scale.

    Shazeer 2019, arXiv:1911.02150; with 1 < num_kv_heads < num_heads, arXiv:2305.13245. For the
    settings, see DotProductAttention.
    """

    @inherit_params(DotProductAttention, exclude=_ABSENT)
    def __init__(
        self,
        input_dim: int | Mapping[str, int],
        num_heads: int = 1,
        *,
        num_kv_heads: int = 1,
        **settings: Any,
    ):
        super().__init__(
            input_dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            internal_enable_per_dim_scale=False,
            **settings,
        )


class GroupedQueryAttention(DotProductAttention):
    """DotProductAttention with shared key/value heads and queries scaled by 1 / sqrt(K).

    Ainslie et al. 2023, arXiv:2305.13245. Unlike DotProductAttention, it initializes each weight
    using the fan-in and fan-out of its matmul. For other settings, see DotProductAttention.

    Args:
      input_dim: D.
      num_heads: N.
      num_kv_heads: G.
      atten_temp: Temperature; queries are divided by it.
      rope_min_max_timescales: Minimum and maximum timescales of the rotary embedding. If None,
        queries and keys are not rotated.
    """

    @inherit_params(
        DotProductAttention,
        exclude=(
            *_ABSENT,
            "hidden_dim",
            "internal_enable_query_scale",
            "scale_query_by_dim_per_head",
            "attention_extra_logit",
            "use_rotary_position_emb",
            "output_proj_use_nhd_shape",
            "proj_tpl",
            "headless_proj_tpl",
            "rotary_position_emb_tpl",
            "relative_bias_tpl",
            "dropout_tpl",
        ),
    )
    def __init__(
        self,
        input_dim: int,
        num_heads: int = 1,
        *,
        num_kv_heads: int = 1,
        atten_temp: float = 1.0,
        rope_min_max_timescales: tuple[int, int] | None = None,
        **settings: Any,
    ):
        shortest, longest = rope_min_max_timescales or (1, 10_000)
        super().__init__(
            input_dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            internal_enable_per_dim_scale=False,
            scale_query_by_dim_per_head=True,
            use_rotary_position_emb=rope_min_max_timescales is not None,
            rotary_position_emb_tpl=functools.partial(
                RotaryPositionalEmbedding, min_timescale=shortest, max_timescale=longest
            ),
            proj_tpl=functools.partial(AttentionProjection, explicit_fan_in_fan_out_axes=True),
            **settings,
        )
        self.query_scale = self.query_scale / atten_temp
