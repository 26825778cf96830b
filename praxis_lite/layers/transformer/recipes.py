"""Configs of complete models, with settings that Pax leaves to each experiment."""

from collections.abc import Callable, Mapping
from typing import Any

import fiddle as fdl

from praxis_lite.layers.attention.attentions import DotProductAttention
from praxis_lite.layers.attention.projections import AttentionProjection
from praxis_lite.layers.embedding.softmaxes import SharedEmbeddingSoftmax
from praxis_lite.layers.initializers import WeightInit
from praxis_lite.layers.normalizations import RmsNorm
from praxis_lite.layers.transformer.feed_forwards import TransformerFeedForward
from praxis_lite.layers.transformer.models import TransformerLm
from praxis_lite.layers.transformer.transformers import Transformer


def rotary_lm(
    *,
    tr_fflayer_tpl: Callable[..., Any] = TransformerFeedForward,
    attention: Mapping[str, Any] | None = None,
    **settings: Any,
) -> "fdl.Partial[TransformerLm]":
    """Returns the config of a decoder-only LM with rotary positions and RMS norms.

    It is a TransformerLm with Pax's defaults, except for the following settings, which experiments
    in Pax usually change as well:

    - Positions are rotary (RoPE, arXiv:2104.09864), and nothing is added to the embeddings.
    - Norms are RMS norms (arXiv:1910.07467), before each sublayer and at the end. Attention and
      softmax have no biases.
    - Queries are divided by sqrt(dim_per_head) instead of multiplied by a learned scale per dim.
    - Attention weights are initialized with the fan-in and fan-out of their matmuls. Pax's default
      treats the weights as convolutions, so that they start several times smaller and learn more
      slowly.
    - The softmax weight, which also embeds ids, is initialized as a normal with variance 1 / D, and
      embeddings are multiplied by sqrt(D). The elements of embeddings and logits then start with a
      magnitude of about one.

    Args:
      tr_fflayer_tpl: Builds the feed-forward layer of each block.
      attention: Settings of DotProductAttention, such as {"num_kv_heads": 2}; they override those
        above.
      settings: Settings of TransformerLm: its sizes, and overrides of any other setting.
    """
    block = fdl.Partial(
        Transformer,
        ln_tpl=RmsNorm,
        tr_fflayer_tpl=tr_fflayer_tpl,
        tr_atten_tpl=fdl.Partial(
            DotProductAttention,
            **{
                "use_bias": False,
                "internal_enable_per_dim_scale": False,
                "scale_query_by_dim_per_head": True,
                "use_rotary_position_emb": True,
                "proj_tpl": fdl.Partial(AttentionProjection, explicit_fan_in_fan_out_axes=True),
                **(attention or {}),
            },
        ),
    )
    softmax = fdl.Partial(
        SharedEmbeddingSoftmax,
        scale_sqrt_depth=True,
        has_bias=False,
        weight_init=fdl.Config(WeightInit.GaussianSqrtFanIn),
    )
    return fdl.Partial(
        TransformerLm,
        **{
            "softmax_tpl": softmax,
            "position_emb_tpl": None,
            "final_ln_tpl": RmsNorm,
            "transformer_layer_tpl": block,
            **settings,
        },
    )
