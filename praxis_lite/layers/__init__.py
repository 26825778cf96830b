"""Layers: single-device maths over weights and activations that declare how they split."""

from praxis_lite.layers.attentions import AttentionProjection, DotProductAttention
from praxis_lite.layers.embeddings import (
    Embedding,
    RotaryPositionalEmbedding,
    SharedEmbeddingSoftmax,
    TrainablePositionalEmbedding,
)
from praxis_lite.layers.linears import Bias, FeedForward, Linear, Mlp
from praxis_lite.layers.normalizations import LayerNorm, RmsNorm
from praxis_lite.layers.repeats import Repeat
from praxis_lite.layers.stochastics import Dropout
from praxis_lite.layers.transformer_models import TransformerLm, set_sharding_params
from praxis_lite.layers.transformers import Transformer, TransformerFeedForward

__all__ = [
    "AttentionProjection",
    "Bias",
    "DotProductAttention",
    "Dropout",
    "Embedding",
    "FeedForward",
    "LayerNorm",
    "Linear",
    "Mlp",
    "Repeat",
    "RmsNorm",
    "RotaryPositionalEmbedding",
    "SharedEmbeddingSoftmax",
    "TrainablePositionalEmbedding",
    "Transformer",
    "TransformerFeedForward",
    "TransformerLm",
    "set_sharding_params",
]
