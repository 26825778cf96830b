"""Sharding presets: a whole model's split, by a word. Data, to be read, copied and changed.

`LOGICAL_DIMS` names, once per class, the dims of each array whose split a layer declares.
`SHARDING_PRESETS` has by word the mesh axes that these names split over; a name that a preset lacks
is not split. `set_sharding_params` puts the two together. A preset with a change is a dict,

    {**SHARDING_PRESETS["megatron"], "mlp": ("data", "mdl")}

and a layer of your own splits as this library's do once it has a row:

    LOGICAL_DIMS[MyMlp] = {"weight_split_dims_mapping": ("embed", "mlp")}
"""

from collections.abc import Mapping
from typing import Any

from praxis_lite.core.sharding.mesh_config import CompilerOptions
from praxis_lite.core.sharding.split_dims import DimSplit
from praxis_lite.layers.attention.attentions import DotProductAttention
from praxis_lite.layers.attention.latent import MultiHeadLatentAttention
from praxis_lite.layers.attention.relative_bias import RelativeBias
from praxis_lite.layers.embedding.embeddings import Embedding
from praxis_lite.layers.embedding.positional_embeddings import TrainablePositionalEmbedding
from praxis_lite.layers.embedding.softmaxes import FullSoftmax, SharedEmbeddingSoftmax
from praxis_lite.layers.moe.mixture_of_experts import TransformerFeedForwardMoe
from praxis_lite.layers.normalizations import LayerNorm, RmsNorm, WeightNormL2
from praxis_lite.layers.recurrent.recurrents import RgLruBlock
from praxis_lite.layers.stacking.pipelines import Pipeline
from praxis_lite.layers.stacking.repeats import Repeat
from praxis_lite.layers.transformer.transformers import Transformer, TransformerFeedForward
from praxis_lite.layers.vision.batch_norms import BatchNorm, GroupNorm
from praxis_lite.layers.vision.classifiers import ClassificationModel
from praxis_lite.layers.vision.vit_entry_exit import VitEntryLayers, VitExitLayers
from praxis_lite.layers.vision.vits import VisionTransformer

# Mesh axes: `replica` holds whole copies of the weights, `data` and `mdl` divide them. For a mesh
# whose axes have other names, write dicts as these.
_OVER_DATA, _OVER_ALL = ("replica", "data"), ("replica", "data", "mdl")

# The first matmul of a pair splits what it makes, the second what it takes: one sum over `mdl`
# after each pair (Megatron, arXiv:1909.08053).
_TENSOR_PARALLEL: dict[str, DimSplit] = {
    "heads": "mdl",
    "mlp": "mdl",
    "vocab": "mdl",
    "activation_heads": "mdl",
    "activation_mlp": "mdl",
    "activation_vocab": "mdl",
}

_RING: dict[str, DimSplit] = {
    "batch": _OVER_DATA, "residual_batch": _OVER_ALL, "embed": "data", "expert": None,
    **_TENSOR_PARALLEL,
}

# By preset: the mesh axes of each logical dim, for `set_sharding_params`.
SHARDING_PRESETS: dict[str, Mapping[str, DimSplit]] = {
    # Data parallel: each device has all weights and a part of the batch.
    "replicated": {"batch": _OVER_ALL, "expert": None},
    # ZeRO-3 (arXiv:1910.02054): weights split over all devices but replicas, and gathered where
    # they are used.
    "fsdp": {"batch": _OVER_ALL, "embed": ("data", "mdl"), "expert": None},
    # Tensor parallel over `mdl`, data parallel over the rest: weights are whole along `data`.
    "megatron": {"batch": _OVER_DATA, "expert": None, **_TENSOR_PARALLEL},
    # Both, two dims of each weight; and between the pairs `mdl` splits time (sequence parallelism,
    # arXiv:2205.05198). It leaves experts as they are, as Pax's set_sharding_params_v1.
    "fsdp+tensor": {
        "batch": _OVER_DATA, "embed": "data", "residual_length": "mdl", **_TENSOR_PARALLEL,
    },
    # As megatron, and between the pairs `mdl` splits time.
    "sequence": {
        "batch": _OVER_DATA, "expert": None, "residual_length": "mdl", **_TENSOR_PARALLEL,
    },
    # Weights as fsdp+tensor; between the parts of blocks `mdl` splits the batch, and its rows go
    # round a ring of the devices along `mdl` while these compute (a collective matmul). The fastest
    # with 2 to 8 devices along `mdl` where a gather of weights hides behind nothing (TPU v4, v5p).
    "fsdp+ring": {
        **_RING, "attention_collectives": "ring", "mlp_collectives": "ring",
    },
    # The same, but attention's weights are gathered over `mdl`, not its tokens: the fastest where a
    # gather of weights hides behind the matmuls (TPU v5e).
    "fsdp+mlp_ring": {
        **_RING, "attention_collectives": "weights", "mlp_collectives": "ring",
    },
    # Weights as fsdp+tensor, and experts on an axis of their own, over which the batch splits, too
    # (GShard, arXiv:2006.16668). For a mesh of the axes data, expert and mdl.
    "expert": {
        "batch": ("data", "expert"), "expert": "expert", "embed": "data", **_TENSOR_PARALLEL,
    },
}

# Options of the compiler by preset and platform (`MeshConfig.compiler_options`), where a step is
# faster with them: benchmarks/README.md, "Pods". Without these, the compiler for TPUs passes parts
# of activations round while it multiplies, in a way that costs more than it saves.
_NO_WINDOWED_EINSUM = {
    "tpu": {
        "xla_tpu_enable_windowed_einsum_for_all_gather": False,
        "xla_tpu_enable_windowed_einsum_for_reduce_scatter": False,
    }
}
# By preset: options of the compiler that make it faster, by platform.
COMPILER_OPTIONS: dict[str, CompilerOptions] = {
    "fsdp+tensor": _NO_WINDOWED_EINSUM,
}

# Names of weights' dims: embed (model dims), mlp (hidden dims), heads, head_dim, vocab, expert. Of
# activations': batch, length, the same with activation_; residual_batch and residual_length, rows
# and time of the residual stream between the parts of blocks. Its rows split as the batch does in a
# preset without residual_batch. None is a dim that no preset splits. A name in place of dims stands
# for a setting's value: attention_collectives and mlp_collectives for that of tensor_parallel.
_RESIDUAL = ("residual_batch", "residual_length", "activation_embed")
_LOGITS = ("batch", "length", "activation_vocab")
_SOFTMAX = {
    "weight_split_dims_mapping": ("embed", "vocab"),
    "activation_split_dims_mapping": _LOGITS,
}
_ATTENTION = {
    "weight_split_dims_mapping": ("embed", "heads", "head_dim"),
    "activation_split_dims_mapping": (
        "batch", "length", "activation_heads", "activation_head_dim",
    ),
    "output_split_dims_mapping": _RESIDUAL,
}

# `{class: {field: logical dims}}`, by MRO. A key that names a template overrides the fields of the
# layers built from it.
LOGICAL_DIMS: dict[type, dict[str, Any]] = {
    SharedEmbeddingSoftmax: {**_SOFTMAX, "lookup_split_dims_mapping": _RESIDUAL},
    FullSoftmax: _SOFTMAX,
    Embedding: {
        "weight_split_dims_mapping": ("vocab", "embed"),
        "activation_split_dims_mapping": _RESIDUAL,
    },
    TrainablePositionalEmbedding: {"weight_split_dims_mapping": (None, "embed")},
    DotProductAttention: {**_ATTENTION, "tensor_parallel": "attention_collectives"},
    MultiHeadLatentAttention: _ATTENTION,
    RgLruBlock: _ATTENTION,
    TransformerFeedForward: {
        "weight_split_dims_mapping": ("embed", "mlp"),
        "hidden_split_dims_mapping": ("batch", "length", "activation_mlp"),
        "activation_split_dims_mapping": _RESIDUAL,
        "tensor_parallel": "mlp_collectives",
    },
    TransformerFeedForwardMoe: {
        "weight_split_dims_mapping": ("expert", "embed", "mlp"),
        "gate_split_dims_mapping": ("embed", None),
        "activation_split_dims_mapping": _RESIDUAL,
    },
    Pipeline: {"activation_split_dims_mapping": _RESIDUAL},
    VitEntryLayers: {
        "weight_split_dims_mapping": (None, "embed"),
        "activation_split_dims_mapping": _RESIDUAL,
    },
    VisionTransformer: {"activation_split_dims_mapping": _RESIDUAL},
    # Features may be of an image or of each token.
    VitExitLayers: {
        "weight_split_dims_mapping": ("embed", None),
        "activation_split_dims_mapping": ("batch",),
    },
    ClassificationModel: {
        "softmax_tpl": {"activation_split_dims_mapping": ("batch", "activation_vocab")}
    },
    # No splits, but --set reaches their settings once they are configs.
    Repeat: {},
    Transformer: {},
}

# Their weights are so small that all presets leave them whole, without a warning.
LEFT_WHOLE = (LayerNorm, RmsNorm, BatchNorm, GroupNorm, WeightNormL2, RelativeBias)
