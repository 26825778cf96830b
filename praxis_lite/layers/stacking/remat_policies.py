"""Remat policies: which activations are saved for the backward pass, and in which memory.

A policy is one of Pax's names, or a mapping from each checkpoint name to the place where the
activation is saved.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from praxis_lite.core.errors import ConfigError, did_you_mean, require_choice
from praxis_lite.core.jaxprs import all_eqns, open_jaxpr
from praxis_lite.layers.base.activation_names import named, offloaded

__all__ = ("CHECKPOINT_POLICIES",)

_POLICIES = jax.checkpoint_policies

# The checkpoint names are assigned where activations are computed, by `activation_names.named`.
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
        "context",
        "out_proj",
        "combined_qkv_proj",
        "qlhs",
        "qrhs",
        "lhs_scale",
        "rhs_scale",
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


# As in MaxText, an activation is saved on the device, offloaded to host memory (with copies that
# overlap with computation), or recomputed. Activations that are not in the policy are recomputed.
SAVED, OFFLOADED, _ = PLACES = ("device", "offload", "remat")

# A name in CHECKPOINT_POLICIES, or a mapping from checkpoint names to elements of PLACES.
CheckpointPolicy = str | Mapping[str, str]
# A hashable CheckpointPolicy, for module attributes.
CheckedPolicy = str | tuple[tuple[str, str], ...]

# Checkpoint name of the input of a rematerialized region: a layer of a Repeat, or a pipeline tick.
ITERATION_INPUT = "iteration_input"


@contextlib.contextmanager
def remat(
    step: Callable[..., Any],
    checkpoint_policy: CheckedPolicy,
    layer: object,
    *,
    is_scanned: bool,
) -> Iterator[Callable[..., Any]]:
    """Yields `step` wrapped in `jax.checkpoint` with a policy.

    Args:
      step: A function of x and other arguments. x gets the checkpoint name "iteration_input".
      checkpoint_policy: Result of `checked_policy`.
      layer: The layer with this policy, for error messages.
      is_scanned: Whether `step` is the body of a scan over several steps, where XLA cannot merge
        the recomputation with the forward pass. Otherwise `prevent_cse` prevents merging, at the
        cost of some fusions.

    Raises:
      ConfigError: On exit, if the policy contains a name that matches no activation of the step.
    """
    if checkpoint_policy == "save_everything":
        yield step
        return
    names: set[str] = set()
    places = {} if isinstance(checkpoint_policy, str) else dict(checkpoint_policy)
    to_host = {name for name, place in places.items() if place == OFFLOADED}

    def step_with_offloading(x: Any, *more: Any) -> Any:
        with offloaded(to_host):
            return step(named(x, ITERATION_INPUT), *more)

    rematted = jax.checkpoint(
        step_with_offloading, policy=_policy(checkpoint_policy), prevent_cse=not is_scanned
    )
    if isinstance(checkpoint_policy, str):
        yield rematted
        return

    # Record the names of the step's activations, so that unknown names in the policy are found on
    # exit.
    def step_with_names(*args: Any) -> Any:
        names.update(_names(step_with_offloading, args))
        return rematted(*args)

    yield step_with_names
    for name in places:
        if names and name not in names:
            raise ConfigError(
                f"{_setting(layer)} contains {name!r}, but no activation has this name; expected "
                f"one of {', '.join(sorted(names))}.{did_you_mean(name, names)}"
            )


def checked_policy(checkpoint_policy: CheckpointPolicy, layer: object) -> CheckedPolicy:
    """Checks a policy and converts it to the hashable form that `remat` accepts.

    Raises:
      ConfigError: The policy is unknown, or maps a name to an unknown place.
    """
    setting = _setting(layer)
    if not isinstance(checkpoint_policy, Mapping):
        require_choice(setting, checkpoint_policy, CHECKPOINT_POLICIES)
        return checkpoint_policy
    for name, place in checkpoint_policy.items():
        require_choice(f"{setting}[{name!r}]", place, PLACES)
    return tuple(sorted(checkpoint_policy.items()))


def _setting(layer: object) -> str:
    return f"{type(layer).__name__}.checkpoint_policy"


def _policy(checkpoint_policy: CheckedPolicy) -> Callable[..., Any]:
    if isinstance(checkpoint_policy, str):
        return CHECKPOINT_POLICIES[checkpoint_policy]
    names = {
        place: [name for name, value in checkpoint_policy if value == place] for place in PLACES
    }
    return _POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=names[SAVED],
        names_which_can_be_offloaded=names[OFFLOADED],
        offload_src="device",
        offload_dst="pinned_host",
    )


def _names(step: Callable[..., Any], args: tuple) -> Iterator[str]:
    """Yields the checkpoint names of all activations that a step computes."""
    for eqn in all_eqns(open_jaxpr(jax.make_jaxpr(step)(*args)).eqns):
        if eqn.primitive.name == "name":
            yield eqn.params["name"]
        elif eqn.primitive.name == "call_hi_primitive":  # With jax_remat3.
            yield eqn.params["_prim"].params["name"]
