"""Layers: single-device maths over weights and activations that declare how they split."""

from praxis_lite.layers.adapters import adapted, lora, merge_adapters
from praxis_lite.layers.attention_projections import (
    AttentionProjection,
    CombinedQKVProjectionLayer,
    OneHeadedAttentionProjection,
    PerDimScale,
)
from praxis_lite.layers.attention_variants import (
    GroupedQueryAttention,
    MultiQueryDotProductAttention,
)
from praxis_lite.layers.attentions import DotProductAttention
from praxis_lite.layers.batch_norms import BatchNorm, GroupNorm
from praxis_lite.layers.class_major_softmaxes import NClassMajorSharedEmbeddingSoftmax
from praxis_lite.layers.classifiers import ClassificationModel
from praxis_lite.layers.convolutions import Conv2D, ConvBNAct, DepthwiseConv1D
from praxis_lite.layers.einsums import Einsum
from praxis_lite.layers.embeddings import Embedding
from praxis_lite.layers.encoder_decoders import TransformerEncoderDecoder
from praxis_lite.layers.linears import Bias, FeedForward, Linear, Mlp
from praxis_lite.layers.mixture_of_experts import TransformerFeedForwardMoe
from praxis_lite.layers.normalizations import (
    IdentityNorm,
    LayerNorm,
    RmsNorm,
    RmsNormNoScale,
    WeightNormL2,
)
from praxis_lite.layers.pipelines import Pipeline
from praxis_lite.layers.poolings import GlobalPooling, Pooling, Pooling1D
from praxis_lite.layers.positional_embeddings import (
    PositionalEmbedding,
    RotaryPositionalEmbedding,
    TrainablePositionalEmbedding,
)
from praxis_lite.layers.recurrents import RgLruBlock
from praxis_lite.layers.relative_bias import RelativeBias
from praxis_lite.layers.repeats import Repeat, StackedTransformer
from praxis_lite.layers.resnets import ResNet, ResNetBasicBlock, ResNetBlock
from praxis_lite.layers.rg_lru import RgLru
from praxis_lite.layers.sharding_presets import LOGICAL_DIMS, SHARDING_PRESETS
from praxis_lite.layers.softmaxes import FullSoftmax, SharedEmbeddingSoftmax
from praxis_lite.layers.stochastics import Dropout, StochasticResidual
from praxis_lite.layers.transformer_models import TransformerLm, set_sharding_params
from praxis_lite.layers.transformer_recipes import rotary_lm
from praxis_lite.layers.transformers import Transformer, TransformerFeedForward
from praxis_lite.layers.vit_entry_exit import ClassTokenPooling, VitEntryLayers, VitExitLayers
from praxis_lite.layers.vits import VisionTransformer, build_vision_transformer

__all__ = [
    "AttentionProjection",
    "BatchNorm",
    "Bias",
    "ClassTokenPooling",
    "ClassificationModel",
    "CombinedQKVProjectionLayer",
    "Conv2D",
    "ConvBNAct",
    "DepthwiseConv1D",
    "DotProductAttention",
    "Dropout",
    "Einsum",
    "Embedding",
    "FeedForward",
    "FullSoftmax",
    "GlobalPooling",
    "GroupNorm",
    "GroupedQueryAttention",
    "IdentityNorm",
    "LOGICAL_DIMS",
    "LayerNorm",
    "Linear",
    "Mlp",
    "MultiQueryDotProductAttention",
    "NClassMajorSharedEmbeddingSoftmax",
    "OneHeadedAttentionProjection",
    "PerDimScale",
    "Pipeline",
    "Pooling",
    "Pooling1D",
    "PositionalEmbedding",
    "RelativeBias",
    "Repeat",
    "ResNet",
    "ResNetBasicBlock",
    "ResNetBlock",
    "RgLru",
    "RgLruBlock",
    "RmsNorm",
    "RmsNormNoScale",
    "RotaryPositionalEmbedding",
    "SHARDING_PRESETS",
    "SharedEmbeddingSoftmax",
    "StackedTransformer",
    "StochasticResidual",
    "TrainablePositionalEmbedding",
    "Transformer",
    "TransformerEncoderDecoder",
    "TransformerFeedForward",
    "TransformerFeedForwardMoe",
    "TransformerLm",
    "VisionTransformer",
    "VitEntryLayers",
    "VitExitLayers",
    "WeightNormL2",
    "adapted",
    "build_vision_transformer",
    "lora",
    "merge_adapters",
    "rotary_lm",
    "set_sharding_params",
]
