"""Sharding presets: named dicts that define how a model is sharded.

The `splits` of a layer name the dims of its arrays. A preset in `SHARDING_PRESETS` maps these names
to mesh axes; dims whose names are missing from a preset are replicated. `set_sharding_params`
applies a preset. To change a preset, copy it:

    {**SHARDING_PRESETS["megatron"], "mlp": ("data", "mdl")}

Presets also apply to custom layers that name their dims:

    class MyMlp(BaseLayer):
        splits = splits(weight=("embed", "mlp"))
"""

from collections.abc import Mapping

from praxis_lite.core.sharding.mesh_config import CompilerOptions
from praxis_lite.core.sharding.split_dims import DimSplit
from praxis_lite.layers.attention.kernels.context_parallel import CONTEXT_PARALLEL
from praxis_lite.layers.attention.relative_bias import RelativeBias
from praxis_lite.layers.normalizations import Norm, WeightNormL2
from praxis_lite.layers.stacking.tensor_parallel import TENSOR_PARALLEL

# Weights are replicated over the mesh axis `replica`, and sharded over `data` and `mdl`. For a mesh
# with other axis names, write similar dicts.
_OVER_DATA, _OVER_ALL = ("replica", "data"), ("replica", "data", "mdl")

# Shards the outputs of the first and the inputs of the second matmul in each pair, with one sum
# over `mdl` after the pair (Megatron, arXiv:1909.08053).
_TENSOR_PARALLEL: dict[str, DimSplit] = {
    "heads": "mdl",
    "mlp": "mdl",
    "vocab": "mdl",
    "activation_heads": "mdl",
    "activation_mlp": "mdl",
    "activation_vocab": "mdl",
}

_RING: dict[str, DimSplit] = {
    "batch": _OVER_DATA,
    "residual_batch": _OVER_ALL,
    "embed": "data",
    "expert": None,
    **_TENSOR_PARALLEL,
}

# Time is sharded over `mdl` everywhere (context parallelism). Weights are sharded as in fsdp.
_CONTEXT: dict[str, DimSplit] = {
    "batch": _OVER_DATA,
    "length": "mdl",
    "residual_length": "mdl",
    "embed": ("data", "mdl"),
    "expert": None,
}

# Maps preset names to the mesh axes of each logical dim, for `set_sharding_params`.
SHARDING_PRESETS: dict[str, Mapping[str, DimSplit]] = {
    # Data parallel: each device has all weights and a part of the batch.
    "replicated": {"batch": _OVER_ALL, "expert": None},
    # ZeRO-3 (arXiv:1910.02054): weights are sharded over all devices except replicas, and gathered
    # when they are used.
    "fsdp": {"batch": _OVER_ALL, "embed": ("data", "mdl"), "expert": None},
    # Tensor parallel over `mdl`, data parallel over the other axes, without sharding weights over
    # `data`.
    "megatron": {"batch": _OVER_DATA, "expert": None, **_TENSOR_PARALLEL},
    # Combines fsdp and megatron: two dims of each weight are sharded. Between the pairs of matmuls,
    # time is sharded over `mdl` (sequence parallelism, arXiv:2205.05198). As in Pax's
    # set_sharding_params_v1, experts are not changed.
    "fsdp+tensor": {
        "batch": _OVER_DATA,
        "embed": "data",
        "residual_length": "mdl",
        **_TENSOR_PARALLEL,
    },
    # Like megatron, but between the pairs of matmuls, time is sharded over `mdl`.
    "sequence": {
        "batch": _OVER_DATA,
        "expert": None,
        "residual_length": "mdl",
        **_TENSOR_PARALLEL,
    },
    # Weights are sharded as in fsdp+tensor. Between sublayers, the batch is also sharded over
    # `mdl`, and devices along `mdl` pass examples around a ring while they compute (collective
    # matmul). This is the fastest preset for 2 to 8 devices along `mdl` if weight gathers are not
    # hidden by matmuls (TPU v4, v5p).
    "fsdp+ring": {
        **_RING,
        "attention_collectives": "ring",
        "mlp_collectives": "ring",
    },
    # Like fsdp+ring, but attention gathers its weights over `mdl` instead of its tokens. This is
    # the fastest preset if weight gathers are hidden by matmuls (TPU v5e).
    "fsdp+mlp_ring": {
        **_RING,
        "attention_collectives": "weights",
        "mlp_collectives": "ring",
    },
    # For long sequences: weights are sharded as in fsdp, and time over `mdl`. In attention, heads
    # are sharded as far as their number is divisible, and rings are used for the remaining factor.
    "fsdp+context": {**_CONTEXT, "attention_context": "all_to_all+ring"},
    # Like fsdp+context, but with a single method.
    "fsdp+context_gather": {**_CONTEXT, "attention_context": "gather"},
    "fsdp+context_ring": {**_CONTEXT, "attention_context": "ring"},
    "fsdp+context_heads": {**_CONTEXT, "attention_context": "all_to_all"},
    # Weights are sharded as in fsdp+tensor, and experts over a separate axis, which also shards the
    # batch (GShard, arXiv:2006.16668). For a mesh with the axes data, expert and mdl.
    "expert": {
        "batch": ("data", "expert"),
        "expert": "expert",
        "embed": "data",
        **_TENSOR_PARALLEL,
    },
    # For large mixtures of experts on such a mesh: experts are sharded over `expert`, with
    # all-to-alls, and their model dims over the other axes. Other weights are sharded as in fsdp.
    "fsdp+expert": {
        "batch": ("data", "expert", "mdl"),
        "embed": ("data", "expert", "mdl"),
        "expert": "expert",
        "expert_embed": ("data", "mdl"),
    },
}

# Compiler options that make steps faster, keyed by platform (`MeshConfig.compiler_options`);
# see benchmarks/README.md, "Pods". If an option's name ends in "?", a compiler that lacks it warns
# and compiles without it. By default, the TPU compiler uses windowed einsums, which send parts of
# activations during matmuls and cost more than they save.
_NO_WINDOWED_EINSUM = {
    "tpu": {
        "xla_tpu_enable_windowed_einsum_for_all_gather?": False,
        "xla_tpu_enable_windowed_einsum_for_reduce_scatter?": False,
    }
}
# On a complete torus, gradients are summed with all-reduces. These options let the all-reduces
# overlap with matmuls. The compiler rejects the options on other chips.
_ASYNC_ALL_REDUCE = {
    "v5e": {
        "xla_enable_async_all_reduce?": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce?": True,
    }
}
# Lets the experts' all-to-alls overlap with independent computations, such as shared experts.
_ASYNC_ALL_TO_ALL = {"tpu": {"xla_tpu_enable_async_all_to_all?": True}}
# On v6e, matmuls take 25 % less time if a fusion may use more of the chip's 128 MiB of vector
# memory than by default. Google's recipes for v6e set the same limit.
_ALL_PRESETS = {"v6e": {"xla_tpu_scoped_vmem_limit_kib?": 98_304}}
_OPTIONS_BY_PRESET: dict[str, CompilerOptions] = {
    "fsdp": _ASYNC_ALL_REDUCE,
    "fsdp+tensor": _NO_WINDOWED_EINSUM,
    "fsdp+expert": _ASYNC_ALL_TO_ALL,
}
# Compiler options that make steps faster, keyed by preset, then by platform or TPU type.
COMPILER_OPTIONS: dict[str, CompilerOptions] = {
    preset: {**_OPTIONS_BY_PRESET.get(preset, {}), **_ALL_PRESETS} for preset in SHARDING_PRESETS
}

# Names of weight dims in this library's layers: model dims, hidden dims, and so on. If a preset
# lacks expert_embed, the experts' model dims are sharded like all other model dims.
WEIGHT_DIMS = ("embed", "mlp", "heads", "head_dim", "vocab", "expert", "expert_embed")
# Names of activation dims. `residual_` marks batch and time in the residual stream between
# sublayers. If a preset lacks residual_batch, that dim is sharded like the batch.
ACTIVATION_DIMS = (
    "batch",
    "length",
    "residual_batch",
    "residual_length",
    "activation_embed",
    "activation_mlp",
    "activation_heads",
    "activation_head_dim",
    "activation_vocab",
)
# Names that stand for settings instead of dims, with their valid values: tensor_parallel of
# attention and feed-forward layers, and context_parallel of attention.
PRESET_SETTINGS = {
    "attention_collectives": TENSOR_PARALLEL,
    "mlp_collectives": TENSOR_PARALLEL,
    "attention_context": CONTEXT_PARALLEL,
}


# Layers with small weights, which no preset shards, and for which no warning is logged.
REPLICATED_LAYERS = (Norm, WeightNormL2, RelativeBias)
