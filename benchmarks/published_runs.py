"""Rebuilds published training runs (shared/published/steps.jsonl) with this library's layers.

`partitioner_of(run)` returns the run's model on its mesh, ready to be compiled for the run's TPUs.
`why_not(run)` returns the reason why a run cannot be rebuilt. Differences from the published runs:

- MaxText's norms of values are omitted.
- Llama 4: experts are gated by a softmax, and expert outputs are weighted instead of expert inputs;
  queries in layers without positions have no temperature. GPT-OSS: attention has no sinks (one
  number per head). Gemma 4: the dense branch has no separate norms, and layers have no scale.
- Attention always uses JAX's splash kernel. For fused backward kernels, the matmuls of the original
  kernel are counted (plan_published.py).
- For sequences split over devices, heads are exchanged by all-to-alls; MaxText gathers keys.
- Scales for int8 and float8 matmuls are computed from the operands. MaxText's fp8_full used fixed
  scales, which require no pass over the operands.
"""

import math
import re
from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
import optax
from fiddle import selectors
from published_models import Run, model_of

from praxis_lite.core import Learner, MeshConfig, Partitioner, WeightSharding, make_mesh
from praxis_lite.layers import TransformerFeedForwardMoe, set_sharding_params
from praxis_lite.layers.whole_model.sharding_presets import COMPILER_OPTIONS, SHARDING_PRESETS
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_tools.plan.job_on_topology import PLANNING_OPTIONS

# Maps the first word of a published quantization to our recipe. MaxText's int8 (AQT) has a scale
# per channel and fp8_full has a scale per tensor; both also quantize the backward pass.
_RECIPES = {"int8": "int8", "fp8_full": "float8_per_tensor"}
# Published runs let an instruction use 96 of v6e's 128 MiB of VMEM. Above 64 MiB, the compiler
# takes three times as long to find windows: 48 s instead of 18 s for a matmul and its gradient.
# With 64 MiB, the matmul and its gradient need 9% fewer cycles than with 48 MiB.
_FAST_MEMORY, _MOST_FAST_MEMORY = "xla_tpu_scoped_vmem_limit_kib", 65536
# MaxText's HOST_OFFLOAD_FLAGS (benchmarks/xla_flags_library.py).
_HOST_OFFLOAD = {
    "xla_tpu_enable_all_experimental_scheduler_features": "true",
    "xla_tpu_enable_scheduler_memory_pressure_tracking": "true",
    "xla_tpu_host_transfer_overlap_limit": "24",
    "xla_tpu_aggressive_opt_barrier_removal": "ENABLED",
    "xla_lhs_prioritize_async_depth_over_stall": "ENABLED",
    "xla_tpu_enable_ag_backward_pipelining": "true",
    "xla_should_allow_loop_variant_parameter_in_chain": "ENABLED",
    "xla_should_add_loop_invariant_op_in_chain": "ENABLED",
    "xla_max_concurrent_host_send_recv": "100",
    "xla_tpu_scheduler_percent_shared_memory_limit": "100",
    "xla_latency_hiding_scheduler_rerun": "2",
}
# Flags in the recipes for TPU7x (AI-Hypercomputer/tpu-recipes, training/ironwood), with which
# SparseCores run all collectives. Rows refer to "the recipe" or to some of the flags. Two recipes
# (Llama in fp8, and Qwen 3) rely on the compiler's defaults at the time for most of the flags.
_SPARSE_CORES = {
    "xla_tpu_scoped_vmem_limit_kib": "65536",
    "xla_tpu_bf16_emission_mode": "NATIVE_EMISSION",
    "xla_tpu_enable_sparse_core_reduce_scatter_v2": "true",
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
    "xla_tpu_use_single_sparse_core_for_all_gather_offload": "true",
    "xla_tpu_enable_all_gather_offload_tracing": "true",
    "xla_tpu_use_tc_device_shape_on_sc": "true",
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    "xla_sc_disable_megacore_partitioning": "true",
    "xla_enable_async_all_gather": "true",
}


# Runs with MaxText's fsdp_shard_on_exp: devices store entire experts, and gather all experts of a
# layer.
_KEEP_WHOLE_EXPERTS = ("recipes-tpu7x-deepseek3-671b-bf16-4x4x8",)


def why_not(run: Run) -> str:
    """Returns the reason why a run cannot be rebuilt, or ''."""
    if run["kind"] != "measured":
        return "estimated, not measured"
    if not run["chip"].startswith(("v", "tpu")):
        return "not a TPU, so there is no compiler for it"
    if not run["completeness"]["simulable"] or not run["derived"].get("step_seconds"):
        return "incomplete: " + "; ".join(run["completeness"]["missing"])
    model = run["model"]
    if run["quantization"] and model.get("experts"):
        return f"experts in {run['quantization'].split(' ')[0]}, but our experts are not quantized"
    return ""


def mesh_of(run: Run) -> MeshConfig:
    """Returns the run's mesh: data parallelism on `replica`, FSDP on `data`, the rest on `mdl`."""

    def along(part: str, *axes: str) -> int:
        return math.prod((run["mesh"][part] or {}).get(axis) or 1 for axis in axes)

    parts = [
        (
            along(part, "data"),
            along(part, "fsdp", "fsdp_transpose"),
            along(part, "tensor", "context"),
        )
        for part in ("ici", "dcn")
    ]
    if run["model"]["name"].startswith("honeycrisp"):  # Replicated.
        parts[0] = (1, parts[0][0], 1)
    return MeshConfig(
        ici_mesh_shape=parts[0],
        dcn_mesh_shape=parts[1] if run["slices"] > 1 else None,
        allow_split_physical_axes=True,
    )


def _splits(run: Run) -> dict[str, Any]:
    if run["model"]["name"].startswith("honeycrisp"):
        return dict(SHARDING_PRESETS["replicated"])
    if run["mesh"]["ici"].get("context", 1) > 1:
        return dict(SHARDING_PRESETS["fsdp+context"])
    if run["mesh"]["ici"].get("tensor", 1) == 1:
        return dict(SHARDING_PRESETS["fsdp"])
    # As in MaxText, features of the residual stream are split over the tensor axis.
    preset = dict(SHARDING_PRESETS["fsdp+tensor"]) | {"activation_embed": "mdl", "expert": None}
    preset.pop("residual_length")
    return preset


def _learner(run: Run) -> Learner:
    optimizer = run["optimizer"]
    mu = jnp.bfloat16 if optimizer["mu_dtype"] == "bfloat16" else None
    decays = {} if optimizer["name"].startswith("adam ") else {"weight_decay": 0.1}
    result = optax.adamw if decays else optax.adam
    return Learner(
        optimizer=fdl.build(fdl.Partial(result, b1=0.9, b2=0.95, eps=1e-8, mu_dtype=mu, **decays)),
        learning_rate=optax.linear_schedule(0.0, 3e-5, 100),
        **({} if run["chip"] == "v4" else {"clip_gradient_norm_to_value": 1.0}),
    )


def partitioner_of(run: Run, devices: Any) -> Partitioner:
    """Returns a Partitioner for the run's model on its mesh of `devices`."""
    splits = _splits(run)
    config = set_sharding_params(model_of(run), splits)
    batch, weights = splits["batch"], None
    if run["id"] in _KEEP_WHOLE_EXPERTS:
        experts = selectors.select(config, TransformerFeedForwardMoe)
        experts.set(weight_split_dims_mapping=(None, None, None))
        weights = WeightSharding(strategy=[(r".*/w[io]_\w+", 'shard_dim("data", -3)')])
    task = LanguageModelTask(
        fdl.build(config),
        _learner(run),
        weight_sharding=weights,
        inputs_split_mapping={"map_1d": (batch,), "map_2d": (batch, None)},
        quantization=_RECIPES[run["quantization"].split(" ")[0]] if run["quantization"] else None,
    )
    return Partitioner(
        task,
        make_mesh(mesh_of(run), devices),
        compiler_options={"tpu": compiler_options(run)},
    )


def compiler_options(run: Run) -> dict[str, Any]:
    """Returns the run's compiler options that the installed compiler still accepts."""
    options: dict[str, Any] = dict(_SPARSE_CORES) if run["chip"] == "tpu7x" else {}
    for flag in (run.get("software") or {}).get("xla_flags") or ():
        name, _, value = flag.partition("=")
        if name.startswith("xla_") and (result := re.match(r"\w+", value)):
            options[name] = result.group()
        elif flag.startswith("host offload group"):
            options |= _HOST_OFFLOAD
    if int(options.get(_FAST_MEMORY, 0)) > _MOST_FAST_MEMORY:
        options[_FAST_MEMORY] = str(_MOST_FAST_MEMORY)
    if run["chip"] != "v5e":
        # libtpu 0.0.51 on other chips: "not supported/recommended".
        options = {k: v for k, v in options.items() if "async_collective_fusion" not in k}
    if run["mesh"]["ici"].get("tensor", 1) > 1:
        options |= COMPILER_OPTIONS["fsdp+tensor"]["tpu"]
    return options | PLANNING_OPTIONS.get(run["chip"], {})


def batch_of(run: Run) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of a batch."""
    ids = jax.ShapeDtypeStruct((run["global_batch"], run["seq_len"]), jnp.int32)
    return {"ids": ids, "labels": ids, "weights": jax.ShapeDtypeStruct(ids.shape, jnp.float32)}
