"""Sharding presets: a whole model's split, by a word. Data, to be read, copied and changed.

A layer's `splits` name the dims of its arrays. `SHARDING_PRESETS` has by word the mesh axes that
these names split over; a name that a preset lacks is not split. `set_sharding_params` puts the two
together. A preset with a change is a dict,

    {**SHARDING_PRESETS["megatron"], "mlp": ("data", "mdl")}

and a layer of your own splits as this library's do once it says what its dims are:

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

# `mdl` splits time everywhere (context parallelism); weights as in fsdp.
_CONTEXT: dict[str, DimSplit] = {
    "batch": _OVER_DATA, "length": "mdl", "residual_length": "mdl", "embed": ("data", "mdl"),
    "expert": None,
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
    # For long sequences: weights as fsdp, and `mdl` splits time. Devices share heads of attention
    # as far as these divide, and are a ring beyond that.
    "fsdp+context": {**_CONTEXT, "attention_context": "all_to_all+ring"},
    # The same by one of the ways alone.
    "fsdp+context_gather": {**_CONTEXT, "attention_context": "gather"},
    "fsdp+context_ring": {**_CONTEXT, "attention_context": "ring"},
    "fsdp+context_heads": {**_CONTEXT, "attention_context": "all_to_all"},
    # Weights as fsdp+tensor, and experts on an axis of their own, over which the batch splits, too
    # (GShard, arXiv:2006.16668). For a mesh of the axes data, expert and mdl.
    "expert": {
        "batch": ("data", "expert"), "expert": "expert", "embed": "data", **_TENSOR_PARALLEL,
    },
    # For large mixtures of experts, on a mesh of the same axes: experts split over `expert`, whose
    # devices exchange tokens, and their model dims over the rest; all other weights as in fsdp.
    "fsdp+expert": {
        "batch": ("data", "expert", "mdl"), "embed": ("data", "expert", "mdl"),
        "expert": "expert", "expert_embed": ("data", "mdl"),
    },
}

# Options of the compiler by preset and platform (`MeshConfig.compiler_options`), where a step is
# faster with them: benchmarks/README.md, "Pods". A compiler without an option whose name ends in
# "?" compiles without it, and a warning says so. Without these, the compiler for TPUs passes parts
# of activations round while it multiplies, in a way that costs more than it saves.
_NO_WINDOWED_EINSUM = {
    "tpu": {
        "xla_tpu_enable_windowed_einsum_for_all_gather?": False,
        "xla_tpu_enable_windowed_einsum_for_reduce_scatter?": False,
    }
}
# Over a whole torus gradients are summed by all-reduces, which then go on beside matmuls. The
# compiler refuses these options on other chips.
_ASYNC_ALL_REDUCE = {
    "v5e": {
        "xla_enable_async_all_reduce?": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce?": True,
    }
}
# An exchange of tokens goes on beside what needs none of them, as shared experts.
_ASYNC_ALL_TO_ALL = {"tpu": {"xla_tpu_enable_async_all_to_all?": True}}
# On v6e matmuls take three quarters of their time if a fusion has more of the chip's 128 MiB of
# vector memory than the compiler gives it; Google's recipes for v6e give it as much.
_ALL = {"v6e": {"xla_tpu_scoped_vmem_limit_kib?": 98_304}}
_OF_PRESETS = {
    "fsdp": _ASYNC_ALL_REDUCE, "fsdp+tensor": _NO_WINDOWED_EINSUM,
    "fsdp+expert": _ASYNC_ALL_TO_ALL,
}
# By preset: options of the compiler that make it faster, by platform or kind of TPU.
COMPILER_OPTIONS: dict[str, CompilerOptions] = {
    preset: _OF_PRESETS.get(preset, {}) | _ALL for preset in SHARDING_PRESETS
}

# The names of weights' dims in this library's layers: model dims, hidden dims, and so on.
# Model dims of experts split as all model dims do in a preset without expert_embed.
OF_WEIGHTS = ("embed", "mlp", "heads", "head_dim", "vocab", "expert", "expert_embed")
# Of activations' dims. `residual_` are rows and time of the residual stream between the parts of
# blocks; its rows split as the batch does in a preset without residual_batch.
OF_ACTIVATIONS = (
    "batch", "length", "residual_batch", "residual_length", "activation_embed", "activation_mlp",
    "activation_heads", "activation_head_dim", "activation_vocab",
)
# Names that stand for a setting's value, not for a dim, with the values that it may have:
# tensor_parallel of attentions and of feed-forward layers, and context_parallel of attentions.
OF_SETTINGS = {
    "attention_collectives": TENSOR_PARALLEL, "mlp_collectives": TENSOR_PARALLEL,
    "attention_context": CONTEXT_PARALLEL,
}


# Their weights are so small that all presets leave them whole, without a warning.
LEFT_WHOLE = (Norm, WeightNormL2, RelativeBias)
