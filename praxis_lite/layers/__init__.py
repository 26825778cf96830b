"""What does a model compute? Maths as of a single device; layers say how their arrays split.

Begin with `base_layer` and `linears`. Never sees a device, padding, a task or an optimizer.
"""

from praxis_lite.layers.attention.attentions import DotProductAttention
from praxis_lite.layers.attention.latent import MultiHeadLatentAttention
from praxis_lite.layers.attention.projections import (
    AttentionProjection,
    CombinedQKVProjectionLayer,
    OneHeadedAttentionProjection,
    PerDimScale,
)
from praxis_lite.layers.attention.relative_bias import RelativeBias
from praxis_lite.layers.attention.variants import (
    GroupedQueryAttention,
    MultiQueryDotProductAttention,
)
from praxis_lite.layers.base_layer import AuxLoss, BaseLayer, Summary, aux_loss, intermediates
from praxis_lite.layers.embedding.class_major_softmaxes import NClassMajorSharedEmbeddingSoftmax
from praxis_lite.layers.embedding.embeddings import Embedding
from praxis_lite.layers.embedding.positional_embeddings import (
    PositionalEmbedding,
    RotaryPositionalEmbedding,
    TrainablePositionalEmbedding,
)
from praxis_lite.layers.embedding.rotary_scaling import (
    DynamicRotary,
    LinearScaledRotary,
    Llama3Rotary,
    LongRope,
    ProportionalRotary,
    YarnRotary,
)
from praxis_lite.layers.embedding.softmaxes import FullSoftmax, SharedEmbeddingSoftmax
from praxis_lite.layers.initializers import WeightInit
from praxis_lite.layers.linears import Bias, Einsum, FeedForward, Linear, Mlp
from praxis_lite.layers.moe.mixture_of_experts import TransformerFeedForwardMoe
from praxis_lite.layers.normalizations import (
    IdentityNorm,
    LayerNorm,
    RmsNorm,
    RmsNormNoScale,
    WeightNormL2,
)
from praxis_lite.layers.recurrent.recurrents import RgLruBlock
from praxis_lite.layers.recurrent.rg_lru import RgLru
from praxis_lite.layers.stacking.pipelines import Pipeline
from praxis_lite.layers.stacking.repeats import Repeat, StackedTransformer
from praxis_lite.layers.stochastics import Dropout, StochasticResidual
from praxis_lite.layers.transformer.encoder_decoders import TransformerEncoderDecoder
from praxis_lite.layers.transformer.models import TransformerLm
from praxis_lite.layers.transformer.recipes import rotary_lm
from praxis_lite.layers.transformer.transformers import Transformer, TransformerFeedForward
from praxis_lite.layers.vision.batch_norms import BatchNorm, GroupNorm
from praxis_lite.layers.vision.classifiers import ClassificationModel
from praxis_lite.layers.vision.convolutions import Conv2D, ConvBNAct, DepthwiseConv1D
from praxis_lite.layers.vision.poolings import GlobalPooling, Pooling, Pooling1D
from praxis_lite.layers.vision.resnets import ResNet, ResNetBasicBlock, ResNetBlock
from praxis_lite.layers.vision.vit_entry_exit import (
    ClassTokenPooling,
    VitEntryLayers,
    VitExitLayers,
)
from praxis_lite.layers.vision.vits import VisionTransformer, build_vision_transformer
from praxis_lite.layers.whole_model.adapters import adapted, lora, merge_adapters
from praxis_lite.layers.whole_model.quantization import (
    QuantizationRule,
    quantized,
    quantized_einsum,
)
from praxis_lite.layers.whole_model.reference import reference_of, with_reference
from praxis_lite.layers.whole_model.sharding_presets import (
    COMPILER_OPTIONS,
    LOGICAL_DIMS,
    SHARDING_PRESETS,
)
from praxis_lite.layers.whole_model.transformer_sharding import set_sharding_params

__all__ = [
    "COMPILER_OPTIONS",
    "AttentionProjection",
    "AuxLoss",
    "BaseLayer",
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
    "DynamicRotary",
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
    "LinearScaledRotary",
    "Llama3Rotary",
    "LongRope",
    "Mlp",
    "MultiHeadLatentAttention",
    "MultiQueryDotProductAttention",
    "NClassMajorSharedEmbeddingSoftmax",
    "OneHeadedAttentionProjection",
    "PerDimScale",
    "Pipeline",
    "Pooling",
    "Pooling1D",
    "PositionalEmbedding",
    "ProportionalRotary",
    "QuantizationRule",
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
    "Summary",
    "TrainablePositionalEmbedding",
    "Transformer",
    "TransformerEncoderDecoder",
    "TransformerFeedForward",
    "TransformerFeedForwardMoe",
    "TransformerLm",
    "VisionTransformer",
    "VitEntryLayers",
    "VitExitLayers",
    "WeightInit",
    "YarnRotary",
    "WeightNormL2",
    "adapted",
    "aux_loss",
    "build_vision_transformer",
    "intermediates",
    "lora",
    "merge_adapters",
    "quantized",
    "quantized_einsum",
    "reference_of",
    "rotary_lm",
    "set_sharding_params",
    "with_reference",
]
