"""Sharding presets: the splits of a whole model under one name, as data to read, copy and change.

The `splits` of a layer name the dims of its arrays. A preset in `SHARDING_PRESETS` maps these names
to the mesh axes that split them; a name that a preset lacks is not split. `set_sharding_params`
applies a preset. A changed preset is a dict,

    {**SHARDING_PRESETS["megatron"], "mlp": ("data", "mdl")}

and presets apply to your own layers when these name their dims:

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

# Mesh axes: weights are replicated over `replica`, and split over `data` and `mdl`. For a mesh with
# other axis names, write dicts like these.
_OVER_DATA, _OVER_ALL = ("replica", "data"), ("replica", "data", "mdl")

# The first matmul of a pair splits its outputs, the second its inputs, with one sum over `mdl`
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

# `mdl` splits time everywhere (context parallelism). Weights are split as in fsdp.
_CONTEXT: dict[str, DimSplit] = {
    "batch": _OVER_DATA, "length": "mdl", "residual_length": "mdl", "embed": ("data", "mdl"),
    "expert": None,
}

# The mesh axes of each logical dim by preset, for `set_sharding_params`.
SHARDING_PRESETS: dict[str, Mapping[str, DimSplit]] = {
    # Data parallel: each device has all weights and a part of the batch.
    "replicated": {"batch": _OVER_ALL, "expert": None},
    # ZeRO-3 (arXiv:1910.02054): weights are split over all devices except replicas, and gathered
    # when they are used.
    "fsdp": {"batch": _OVER_ALL, "embed": ("data", "mdl"), "expert": None},
    # Tensor parallel over `mdl`, data parallel over the other axes; `data` does not split weights.
    "megatron": {"batch": _OVER_DATA, "expert": None, **_TENSOR_PARALLEL},
    # Both of them: two dims of each weight are split. Between the pairs, `mdl` splits time
    # (sequence parallelism, arXiv:2205.05198). As in Pax's set_sharding_params_v1, experts are not
    # changed.
    "fsdp+tensor": {
        "batch": _OVER_DATA, "embed": "data", "residual_length": "mdl", **_TENSOR_PARALLEL,
    },
    # As megatron; between the pairs, `mdl` splits time.
    "sequence": {
        "batch": _OVER_DATA, "expert": None, "residual_length": "mdl", **_TENSOR_PARALLEL,
    },
    # Weights as in fsdp+tensor. Between the parts of blocks, `mdl` splits the batch, and devices
    # along `mdl` pass its rows around a ring while they compute (a collective matmul). The fastest
    # for 2 to 8 devices along `mdl` if nothing hides a gather of weights (TPU v4, v5p).
    "fsdp+ring": {
        **_RING, "attention_collectives": "ring", "mlp_collectives": "ring",
    },
    # The same, but `mdl` gathers attention's weights instead of its tokens. The fastest if matmuls
    # hide a gather of weights (TPU v5e).
    "fsdp+mlp_ring": {
        **_RING, "attention_collectives": "weights", "mlp_collectives": "ring",
    },
    # For long sequences: weights as in fsdp, and `mdl` splits time. Devices split the heads of
    # attention as far as these are divisible, and form rings for the rest.
    "fsdp+context": {**_CONTEXT, "attention_context": "all_to_all+ring"},
    # The same with only one of the methods.
    "fsdp+context_gather": {**_CONTEXT, "attention_context": "gather"},
    "fsdp+context_ring": {**_CONTEXT, "attention_context": "ring"},
    "fsdp+context_heads": {**_CONTEXT, "attention_context": "all_to_all"},
    # Weights as in fsdp+tensor, and experts over an axis of their own, which also splits the batch
    # (GShard, arXiv:2006.16668). For a mesh with the axes data, expert and mdl.
    "expert": {
        "batch": ("data", "expert"), "expert": "expert", "embed": "data", **_TENSOR_PARALLEL,
    },
    # For large mixtures of experts on such a mesh: experts are split over `expert`, whose devices
    # exchange tokens, and their model dims over the other axes; other weights are as in fsdp.
    "fsdp+expert": {
        "batch": ("data", "expert", "mdl"), "embed": ("data", "expert", "mdl"),
        "expert": "expert", "expert_embed": ("data", "mdl"),
    },
}

# Compiler options by preset and platform (`MeshConfig.compiler_options`) that make steps faster:
# benchmarks/README.md, "Pods". If an option's name ends in "?", a compiler that lacks it warns and
# compiles without it. By default, the compiler for TPUs passes parts of activations around while it
# multiplies, in a way that costs more than it saves.
_NO_WINDOWED_EINSUM = {
    "tpu": {
        "xla_tpu_enable_windowed_einsum_for_all_gather?": False,
        "xla_tpu_enable_windowed_einsum_for_reduce_scatter?": False,
    }
}
# Over a whole torus, gradients are summed by all-reduces, which can then run in parallel to
# matmuls. The compiler rejects these options on other chips.
_ASYNC_ALL_REDUCE = {
    "v5e": {
        "xla_enable_async_all_reduce?": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce?": True,
    }
}
# An exchange of tokens overlaps with computations that need none of them, such as shared experts.
_ASYNC_ALL_TO_ALL = {"tpu": {"xla_tpu_enable_async_all_to_all?": True}}
# On v6e, matmuls take three quarters of the time if a fusion gets more of the chip's 128 MiB of
# vector memory than by default; Google's recipes for v6e set the same limit.
_ALL_PRESETS = {"v6e": {"xla_tpu_scoped_vmem_limit_kib?": 98_304}}
_OPTIONS_BY_PRESET: dict[str, CompilerOptions] = {
    "fsdp": _ASYNC_ALL_REDUCE, "fsdp+tensor": _NO_WINDOWED_EINSUM,
    "fsdp+expert": _ASYNC_ALL_TO_ALL,
}
# Compiler options that make a preset faster, by platform or kind of TPU.
COMPILER_OPTIONS: dict[str, CompilerOptions] = {
    preset: {**_OPTIONS_BY_PRESET.get(preset, {}), **_ALL_PRESETS} for preset in SHARDING_PRESETS
}

# The names of weights' dims in this library's layers: model dims, hidden dims, and so on. If a
# preset lacks expert_embed, model dims of experts are split like all model dims.
WEIGHT_DIMS = ("embed", "mlp", "heads", "head_dim", "vocab", "expert", "expert_embed")
# The names of activations' dims. `residual_` are rows and time of the residual stream between the
# parts of blocks; if a preset lacks residual_batch, the rows are split like the batch.
ACTIVATION_DIMS = (
    "batch", "length", "residual_batch", "residual_length", "activation_embed", "activation_mlp",
    "activation_heads", "activation_head_dim", "activation_vocab",
)
# Names of settings instead of dims, with their possible values: tensor_parallel of attention and of
# feed-forward layers, and context_parallel of attention.
PRESET_SETTINGS = {
    "attention_collectives": TENSOR_PARALLEL, "mlp_collectives": TENSOR_PARALLEL,
    "attention_context": CONTEXT_PARALLEL,
}


# Layers with such small weights that no preset splits them; there is no warning.
REPLICATED_LAYERS = (Norm, WeightNormL2, RelativeBias)
