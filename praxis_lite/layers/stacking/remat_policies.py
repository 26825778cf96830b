"""Which values of the forward pass are saved for the backward pass, and in which memory.

A policy is one of Pax's names, or maps names of activations to where each is saved.
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

# Activations are named where they are computed, by `activation_names.named`.
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


# Where an activation goes: saved on the device; offloaded to host memory, with copies while the
# device computes; or recomputed, as all that a policy does not name. The words are MaxText's.
KEPT, OFFLOADED, _ = PLACES = ("device", "offload", "remat")

# A name in CHECKPOINT_POLICIES; or places by the names of activations.
CheckpointPolicy = str | Mapping[str, str]
# The same, hashable, as an attribute of a module.
CheckedPolicy = str | tuple[tuple[str, str], ...]

# The input of a recomputed region: of a layer of a Repeat, of a stage's tick.
ITERATION_INPUT = "iteration_input"


@contextlib.contextmanager
def remat(
    step: Callable[..., Any], checkpoint_policy: CheckedPolicy, layer: object, *,
    is_scanned: bool,
) -> Iterator[Callable[..., Any]]:
    """Yields `step` with `jax.checkpoint`: the backward pass recomputes what is not saved.

    Args:
      step: a function of x and more; x gets the name "iteration_input".
      layer: has the policy; for messages.
      is_scanned: whether it is the body of a scan of several steps, where XLA cannot merge forward
        pass and recomputation. Elsewhere `prevent_cse` prevents that, at the cost of fusions.

    Raises:
      ConfigError: on exit, if the policy names an activation that no call of the step had.
    """
    if checkpoint_policy == "save_everything":
        yield step
        return
    names: set[str] = set()
    places = {} if isinstance(checkpoint_policy, str) else dict(checkpoint_policy)
    to_host = {name for name, place in places.items() if place == OFFLOADED}

    def computed(x: Any, *more: Any) -> Any:
        with offloaded(to_host):
            return step(named(x, ITERATION_INPUT), *more)

    again = jax.checkpoint(
        computed, policy=_policy(checkpoint_policy), prevent_cse=not is_scanned
    )
    if isinstance(checkpoint_policy, str):
        yield again
        return

    def noted(*args: Any) -> Any:
        names.update(_names(computed, args))
        return again(*args)

    yield noted
    for name in places:
        if names and name not in names:
            raise ConfigError(
                f"{_setting(layer)} names the activation {name!r}, which its layers do not have; "
                f"expected some of {', '.join(sorted(names))}.{did_you_mean(name, names)}"
            )


def checked_policy(checkpoint_policy: CheckpointPolicy, layer: object) -> CheckedPolicy:
    """Returns a policy in the form that `remat` takes.

    Raises:
      ConfigError: there is no such policy, or no such place; names the layer's class.
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
        place: [name for name, value in checkpoint_policy if value == place]
        for place in PLACES
    }
    return _POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=names[KEPT], names_which_can_be_offloaded=names[OFFLOADED],
        offload_src="device", offload_dst="pinned_host",
    )


def _names(step: Callable[..., Any], args: tuple) -> Iterator[str]:
    """Yields the names of activations in a step."""
    for eqn in all_eqns(open_jaxpr(jax.make_jaxpr(step)(*args)).eqns):
        if eqn.primitive.name == "name":
            yield eqn.params["name"]
        elif eqn.primitive.name == "call_hi_primitive":  # With jax_remat3.
            yield eqn.params["_prim"].params["name"]
