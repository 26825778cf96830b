"""The values of a forward pass that a block keeps for its backward pass, by Pax's policy names."""

from collections.abc import Callable
from typing import Any

import jax

from praxis_lite.core.errors import require_choice

_POLICIES = jax.checkpoint_policies

# Activations are named where they are computed, by `jax.ad_checkpoint.checkpoint_name`.
_QKV = ("combined_qkv_proj", "query_proj", "value_proj", "key_proj")
SAVED_NAMES: dict[str, tuple[str, ...]] = {
    "save_qkv_out_proj": ("combined_qkv_proj", "out_proj"),
    "save_qkv_out_proj_separate": ("query_proj", "value_proj", "key_proj", "out_proj"),
    "save_context": ("context",),
    "save_out_proj": ("out_proj",),
    "save_encoded_and_out_proj": ("context", "out_proj"),
    "save_dot_for_mlperf_200b": (*_QKV, "context", "out_proj"),
    "save_dot_except_logits_ffn1": (*_QKV, "context", "out_proj", "ffn2"),
    "save_dot_except_logits": (*_QKV, "context", "out_proj", "ffn1", "ffn2"),
    "save_quantized": (
        "context", "out_proj", "combined_qkv_proj", "qlhs", "qrhs", "lhs_scale", "rhs_scale"
    ),
    "save_iteration_input": ("iteration_input",),
    "save_transformer_layer_output": ("transformer_layer_out",),
    "save_unet_conv": ("conv_out",),
    "save_unet_all_conv": ("conv_0", "conv_1", "conv_out"),
}

# Pax's AutodiffCheckpointType.
CHECKPOINT_POLICIES: dict[str, Callable[..., Any]] = {
    "save_everything": _POLICIES.everything_saveable,
    "save_nothing": _POLICIES.nothing_saveable,
    "save_dot_only": _POLICIES.checkpoint_dots,
    "save_dot_with_no_batch_dims": _POLICIES.checkpoint_dots_with_no_batch_dims,
    **{name: _POLICIES.save_only_these_names(*saved) for name, saved in SAVED_NAMES.items()},
}


def remat(
    step: Callable[..., Any], checkpoint_policy: str, *, is_scanned: bool
) -> Callable[..., Any]:
    """Returns `step`, which the backward pass computes again but for the values the policy keeps.

    Args:
      is_scanned: it is the body of a scan of several turns. There XLA cannot merge the two
        computations into one, which else must be prevented at the cost of fusions.
    """
    if checkpoint_policy == "save_everything":
        return step
    policy = CHECKPOINT_POLICIES[checkpoint_policy]
    return jax.checkpoint(step, policy=policy, prevent_cse=not is_scanned)


def check_policy(checkpoint_policy: str, layer: object) -> None:
    """Raises ConfigError if there is no policy of that name; names the layer's class."""
    name = f"{type(layer).__name__}.checkpoint_policy"
    require_choice(name, checkpoint_policy, CHECKPOINT_POLICIES)
