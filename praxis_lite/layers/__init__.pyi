# Where each public name is defined; `__init__.py` loads it on first use.

from praxis_lite.layers.attention.attentions import DotProductAttention as DotProductAttention
from praxis_lite.layers.attention.latent import MultiHeadLatentAttention as MultiHeadLatentAttention
from praxis_lite.layers.attention.projections import AttentionProjection as AttentionProjection
from praxis_lite.layers.attention.projections import (
    CombinedQKVProjectionLayer as CombinedQKVProjectionLayer,
)
from praxis_lite.layers.attention.projections import (
    OneHeadedAttentionProjection as OneHeadedAttentionProjection,
)
from praxis_lite.layers.attention.projections import PerDimScale as PerDimScale
from praxis_lite.layers.attention.relative_bias import RelativeBias as RelativeBias
from praxis_lite.layers.attention.variants import GroupedQueryAttention as GroupedQueryAttention
from praxis_lite.layers.attention.variants import (
    MultiQueryDotProductAttention as MultiQueryDotProductAttention,
)
from praxis_lite.layers.base.base_layer import BaseLayer as BaseLayer
from praxis_lite.layers.base.dense import Dense as Dense
from praxis_lite.layers.base.dense import Product as Product
from praxis_lite.layers.base.dims import splits as splits
from praxis_lite.layers.base.variables import AuxLoss as AuxLoss
from praxis_lite.layers.base.variables import Summary as Summary
from praxis_lite.layers.base.variables import aux_loss as aux_loss
from praxis_lite.layers.base.variables import intermediates as intermediates
from praxis_lite.layers.embedding.embeddings import Embedding as Embedding
from praxis_lite.layers.embedding.positional_embeddings import (
    PositionalEmbedding as PositionalEmbedding,
)
from praxis_lite.layers.embedding.positional_embeddings import (
    RotaryPositionalEmbedding as RotaryPositionalEmbedding,
)
from praxis_lite.layers.embedding.positional_embeddings import (
    TrainablePositionalEmbedding as TrainablePositionalEmbedding,
)
from praxis_lite.layers.embedding.rotary_scaling import DynamicRotary as DynamicRotary
from praxis_lite.layers.embedding.rotary_scaling import LinearScaledRotary as LinearScaledRotary
from praxis_lite.layers.embedding.rotary_scaling import Llama3Rotary as Llama3Rotary
from praxis_lite.layers.embedding.rotary_scaling import LongRope as LongRope
from praxis_lite.layers.embedding.rotary_scaling import ProportionalRotary as ProportionalRotary
from praxis_lite.layers.embedding.rotary_scaling import YarnRotary as YarnRotary
from praxis_lite.layers.embedding.softmaxes import FullSoftmax as FullSoftmax
from praxis_lite.layers.embedding.softmaxes import (
    NClassMajorSharedEmbeddingSoftmax as NClassMajorSharedEmbeddingSoftmax,
)
from praxis_lite.layers.embedding.softmaxes import SharedEmbeddingSoftmax as SharedEmbeddingSoftmax
from praxis_lite.layers.initializers import WeightInit as WeightInit
from praxis_lite.layers.linears import Bias as Bias
from praxis_lite.layers.linears import Einsum as Einsum
from praxis_lite.layers.linears import FeedForward as FeedForward
from praxis_lite.layers.linears import Linear as Linear
from praxis_lite.layers.linears import Mlp as Mlp
from praxis_lite.layers.moe.mixture_of_experts import (
    TransformerFeedForwardMoe as TransformerFeedForwardMoe,
)
from praxis_lite.layers.normalizations import IdentityNorm as IdentityNorm
from praxis_lite.layers.normalizations import LayerNorm as LayerNorm
from praxis_lite.layers.normalizations import RmsNorm as RmsNorm
from praxis_lite.layers.normalizations import RmsNormNoScale as RmsNormNoScale
from praxis_lite.layers.normalizations import WeightNormL2 as WeightNormL2
from praxis_lite.layers.recurrent import RgLru as RgLru
from praxis_lite.layers.recurrent import RgLruBlock as RgLruBlock
from praxis_lite.layers.stacking.pipelines import Pipeline as Pipeline
from praxis_lite.layers.stacking.pipelining.one_forward_one_backward import (
    OneForwardOneBackward as OneForwardOneBackward,
)
from praxis_lite.layers.stacking.repeats import Repeat as Repeat
from praxis_lite.layers.stacking.repeats import StackedTransformer as StackedTransformer
from praxis_lite.layers.stochastics import Dropout as Dropout
from praxis_lite.layers.stochastics import StochasticResidual as StochasticResidual
from praxis_lite.layers.transformer.encoder_decoders import (
    TransformerEncoderDecoder as TransformerEncoderDecoder,
)
from praxis_lite.layers.transformer.feed_forwards import (
    TransformerFeedForward as TransformerFeedForward,
)
from praxis_lite.layers.transformer.models import TransformerLm as TransformerLm
from praxis_lite.layers.transformer.recipes import rotary_lm as rotary_lm
from praxis_lite.layers.transformer.transformers import Transformer as Transformer
from praxis_lite.layers.vision.batch_norms import BatchNorm as BatchNorm
from praxis_lite.layers.vision.batch_norms import GroupNorm as GroupNorm
from praxis_lite.layers.vision.classifiers import ClassificationModel as ClassificationModel
from praxis_lite.layers.vision.convolutions import Conv2D as Conv2D
from praxis_lite.layers.vision.convolutions import ConvBNAct as ConvBNAct
from praxis_lite.layers.vision.convolutions import DepthwiseConv1D as DepthwiseConv1D
from praxis_lite.layers.vision.poolings import GlobalPooling as GlobalPooling
from praxis_lite.layers.vision.poolings import Pooling as Pooling
from praxis_lite.layers.vision.poolings import Pooling1D as Pooling1D
from praxis_lite.layers.vision.resnets import ResNet as ResNet
from praxis_lite.layers.vision.resnets import ResNetBasicBlock as ResNetBasicBlock
from praxis_lite.layers.vision.resnets import ResNetBlock as ResNetBlock
from praxis_lite.layers.vision.vits import ClassTokenPooling as ClassTokenPooling
from praxis_lite.layers.vision.vits import VisionTransformer as VisionTransformer
from praxis_lite.layers.vision.vits import VitEntryLayers as VitEntryLayers
from praxis_lite.layers.vision.vits import VitExitLayers as VitExitLayers
from praxis_lite.layers.vision.vits import build_vision_transformer as build_vision_transformer
from praxis_lite.layers.whole_model.adapters import adapted as adapted
from praxis_lite.layers.whole_model.adapters import lora as lora
from praxis_lite.layers.whole_model.adapters import merge_adapters as merge_adapters
from praxis_lite.layers.whole_model.adapters import reference_of as reference_of
from praxis_lite.layers.whole_model.adapters import with_reference as with_reference
from praxis_lite.layers.whole_model.quantization import (
    QUANTIZATION_RECIPES as QUANTIZATION_RECIPES,
)
from praxis_lite.layers.whole_model.quantization import QuantizationRule as QuantizationRule
from praxis_lite.layers.whole_model.quantization import quantized as quantized
from praxis_lite.layers.whole_model.quantization import with_recipe as with_recipe
from praxis_lite.layers.whole_model.rounded_products import quantized_einsum as quantized_einsum
from praxis_lite.layers.whole_model.sharding_presets import COMPILER_OPTIONS as COMPILER_OPTIONS
from praxis_lite.layers.whole_model.sharding_presets import SHARDING_PRESETS as SHARDING_PRESETS
from praxis_lite.layers.whole_model.transformer_sharding import (
    set_sharding_params as set_sharding_params,
)
