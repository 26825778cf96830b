"""Which settings of a mixture of experts go together, and how its weights are drawn."""

from typing import Any

import jax

from praxis_lite.errors import ConfigError, did_you_mean
from praxis_lite.layers.activations import activation_fn
from praxis_lite.layers.base_layer import Initializer, xavier

# top2 is top_k for two; the expert_choice ones let experts choose tokens; dense_top2 sends every
# token through every expert, and uses two.
GATING_FUNCS = ("top2", "top_k", "dense_top2", "expert_choice", "expert_choice_v2")
SECOND_EXPERT_POLICIES = ("all", "sampling", "random")
EMBEDDING_LEVELS = ("token", "sentence")


def check_settings(layer: Any) -> None:
    """Checks a TransformerFeedForwardMoe's names, and settings that must fit one another.

    Raises:
      ConfigError: says which do not, and what to change.
    """
    name = type(layer).__name__
    choices = {
        "gating_func": GATING_FUNCS,
        "second_expert_policy": SECOND_EXPERT_POLICIES,
        "moe_gating_embedding_level": EMBEDDING_LEVELS,
    }
    for setting, wanted in choices.items():
        found = getattr(layer, setting)
        if found not in wanted:
            raise ConfigError(
                f"{name}.{setting} is {found!r}; wanted is one of {wanted}."
                f"{did_you_mean(str(found), wanted)}"
            )
    gating, num_chosen = layer.gating_func, layer.num_experts_per_token
    is_top_k = gating in ("top2", "top_k")
    if gating == "top2" and num_chosen != 2:
        raise ConfigError(
            f"{name}.num_experts_per_token is {num_chosen}, but gating_func 'top2' takes 2. Set "
            "gating_func='top_k'."
        )
    if (is_top_k and layer.num_experts < num_chosen) or (
        gating == "dense_top2" and layer.num_experts < 2
    ):
        raise ConfigError(
            f"{name}.num_experts is {layer.num_experts}, fewer than the {num_chosen} that each "
            "token goes to. Add experts, or lower num_experts_per_token (gating_func='top_k')."
        )
    factor, capacity_dim = layer.unadjusted_expert_capacity_factor, layer.expert_capacity_dim
    has_none = factor <= 0 and (capacity_dim <= 0 or gating == "expert_choice")
    if factor < 0 or capacity_dim < 0 or (has_none and not layer.dropless):
        raise ConfigError(
            f"{name}.unadjusted_expert_capacity_factor is {factor} and expert_capacity_dim "
            f"{capacity_dim}: an expert would take no tokens. Make one of them positive"
            f"{' (of expert_choice the factor)' if gating == 'expert_choice' else ''}, or set "
            "dropless=True."
        )
    if layer.dropless and not is_top_k:
        raise ConfigError(
            f"{name}.dropless is True, but gating_func is {gating!r}, whose experts take a number "
            "of tokens of their own. Set gating_func='top2' or 'top_k', or dropless=False."
        )
    if layer.dropless and layer.relu_dropout.dropout_prob:
        raise ConfigError(
            f"{name}.relu_dropout_prob is {layer.relu_dropout.dropout_prob}, which is not there "
            "with dropless=True: what it drops would depend on the mesh. Set residual_dropout_prob."
        )
    if layer.second_expert_policy != "all" and gating != "top2":
        raise ConfigError(
            f"{name}.second_expert_policy is {layer.second_expert_policy!r}, but gating_func is "
            f"{gating!r}. Set gating_func='top2', or second_expert_policy='all'."
        )
    for setting in ("moe_load_balance_loss_weight", "moe_router_z_loss_weight", "gating_logit_cap"):
        if getattr(layer, setting) < 0:
            raise ConfigError(
                f"{name}.{setting} is {getattr(layer, setting)}; wanted is 0 or more."
            )
    if layer.residual_droppath.survival_prob < 1.0 and not layer.add_skip_connection:
        raise ConfigError(
            f"{name}.residual_droppath_prob drops what is added to the inputs, but "
            "add_skip_connection is False. Set one of them only."
        )
    activation_fn(layer.activation, layer)


def expert_initializer(is_uniform: bool, has_explicit_fans: bool, fan_in: int) -> Initializer:
    """Returns how Pax draws a weight of experts."""
    if is_uniform:
        limit = (3.0 / fan_in) ** 0.5
        return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -limit, limit)
    if has_explicit_fans:
        return jax.nn.initializers.variance_scaling(1.0, "fan_avg", "uniform", batch_axis=0)
    return xavier


def groups_of(
    batch_size: int, length: int, num_groups: int, min_group_size: int | None
) -> tuple[int, int]:
    """Returns how many groups the tokens of a batch make, and how many tokens are in each.

    Raises:
      ConfigError: the groups do not divide the tokens.
    """
    num_tokens, wanted = batch_size * length, num_groups or batch_size
    if min_group_size is not None and num_tokens < wanted * min_group_size:
        wanted = -(-num_tokens // min_group_size)
    if num_tokens % wanted:
        raise ConfigError(
            f"TransformerFeedForwardMoe: {wanted} groups do not divide the {num_tokens} tokens of "
            f"a batch of {batch_size} rows of {length}. Change num_groups ({num_groups}) or "
            f"min_group_size ({min_group_size}); num_groups=0 makes a group of each row."
        )
    return wanted, num_tokens // wanted
