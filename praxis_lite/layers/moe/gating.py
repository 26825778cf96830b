"""Pax's gating functions, which use a router's logits to choose experts for tokens."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError, is_positive_int, require, require_choice
from praxis_lite.layers.activations import soft_cap
from praxis_lite.layers.moe import routing
from praxis_lite.layers.moe.dispatch import ApplyExperts, route_expert_choice, route_through_slots

# G groups, S tokens per group, D model dims, E experts, K experts per token, C slots per expert and
# group.

# top2 is top_k with two experts. In expert_choice, experts choose tokens. dense_top2 computes all
# experts for every token, but uses only two of them.
GATING_FUNCS = ("top2", "top_k", "dense_top2", "expert_choice", "expert_choice_v2")
SCORE_FUNCS = ("softmax", "softmax_of_chosen", "sigmoid")
SECOND_EXPERT_POLICIES = ("all", "sampling", "random")

# Takes (x_GSD, experts_GSK, gates_GSK), and returns outputs [G, S, D] for any load.
Dropless = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Tokens(NamedTuple):
    """The tokens to route, with their router logits and masks.

    Attributes:
      x: Tokens [G, S, D].
      logits: Router logits [G, S, E].
      is_token: Bool [G, S]; False for padding.
      is_in_row: Bool [G, S]; False in rows that contain only padding.
    """

    x: jax.Array
    logits: jax.Array
    is_token: jax.Array
    is_in_row: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gating:
    """The routing settings of a TransformerFeedForwardMoe.

    Raises:
      ConfigError: A setting is out of range or conflicts with another setting.
    """

    num_experts: int
    num_experts_per_token: int = 2
    gating_func: str = "top2"
    num_groups: int = 0
    min_group_size: int | None = None
    expert_capacity_dim: int = 0
    unadjusted_expert_capacity_factor: float = 2.0
    dropless: bool = False
    normalize_gates: bool = True
    second_expert_policy: str = "all"
    second_expert_threshold: float = 0.0
    gating_logit_cap: float = 0.0
    moe_load_balance_loss_weight: float = 1.0
    moe_router_z_loss_weight: float = 0.0
    score_func: str = "softmax"
    num_expert_groups: int = 1
    num_expert_groups_per_token: int = 1
    gates_scale: float = 1.0

    def __post_init__(self) -> None:
        layer = "TransformerFeedForwardMoe"
        require_choice(f"{layer}.gating_func", self.gating_func, GATING_FUNCS)
        policy = self.second_expert_policy
        require_choice(f"{layer}.second_expert_policy", policy, SECOND_EXPERT_POLICIES)

        def check(is_valid: bool, name: str, expected: str, change: str = "") -> None:
            require(is_valid, f"{layer}.{name}", getattr(self, name), expected, change)

        optional = {"num_groups": 0, "min_group_size": None}
        for name in ("num_experts", "num_experts_per_token", *optional):
            value = getattr(self, name)
            is_unset = name in optional and value == optional[name]
            check(is_positive_int(value) or is_unset, name, "a positive integer")
        gating, num_chosen = self.gating_func, self.num_experts_per_token
        check(
            gating != "top2" or num_chosen == 2,
            "num_experts_per_token",
            "2 with gating_func 'top2'",
            "Set gating_func='top_k'.",
        )
        min_experts = num_chosen if self.is_top_k else 2 if gating == "dense_top2" else 1
        check(
            self.num_experts >= min_experts,
            "num_experts",
            f"at least {min_experts}, the number of experts per token",
            "Add experts, or lower num_experts_per_token (gating_func='top_k').",
        )
        factor, capacity_dim = self.unadjusted_expert_capacity_factor, self.expert_capacity_dim
        has_no_capacity = factor <= 0 and (capacity_dim <= 0 or gating == "expert_choice")
        if factor < 0 or capacity_dim < 0 or (has_no_capacity and not self.dropless):
            needed = "the factor" if gating == "expert_choice" else "one of them"
            raise ConfigError(
                f"{layer}.unadjusted_expert_capacity_factor is {factor} and expert_capacity_dim is "
                f"{capacity_dim}. Neither may be negative, and with a capacity of 0, experts would "
                f"process no tokens. Make {needed} positive, or set dropless=True."
            )
        if self.dropless and not self.is_top_k:
            raise ConfigError(
                f"{layer}.dropless=True cannot be combined with gating_func {gating!r}. Set "
                "dropless=False, or gating_func='top2' or 'top_k'."
            )
        if not self.normalize_gates and not self.is_top_k:
            raise ConfigError(
                f"{layer}.normalize_gates=False cannot be combined with gating_func {gating!r}. "
                "Set normalize_gates=True, or gating_func='top2' or 'top_k'."
            )
        if policy != "all" and gating != "top2":
            raise ConfigError(
                f"{layer}.second_expert_policy {policy!r} cannot be combined with gating_func "
                f"{gating!r}. Set second_expert_policy='all' or gating_func='top2'."
            )
        for name in ("load_balance_loss_weight", "router_z_loss_weight"):
            check(getattr(self, f"moe_{name}") >= 0, f"moe_{name}", "0 or more")
        check(self.gating_logit_cap >= 0, "gating_logit_cap", "0 or more")
        require_choice(f"{layer}.score_func", self.score_func, SCORE_FUNCS)
        is_sigmoid, groups = self.score_func == "sigmoid", self.num_expert_groups
        supports_score = self.score_func == "softmax" or gating == "top_k"
        check(supports_score, "gating_func", f"'top_k' with score_func {self.score_func!r}")
        for name, default in (
            ("num_expert_groups", 1),
            ("num_expert_groups_per_token", 1),
            ("gates_scale", 1.0),
        ):
            expected = f"{default} unless score_func is 'sigmoid'"
            check(is_sigmoid or getattr(self, name) == default, name, expected)
        per_group, remainder = divmod(self.num_experts, max(groups, 1))
        check(
            groups == 1 or (groups > 1 and not remainder and per_group >= 2),
            "num_expert_groups",
            f"a divisor of the {self.num_experts} experts that gives groups of at least two",
        )
        num_selected = self.num_expert_groups_per_token
        has_enough = num_selected * per_group >= num_chosen
        check(
            not is_sigmoid or (1 <= num_selected <= groups and has_enough),
            "num_expert_groups_per_token",
            f"1 to {groups}, enough for the selected groups to contain {num_chosen} experts",
        )

    @property
    def is_top_k(self) -> bool:
        return self.gating_func in ("top2", "top_k")

    def groups_of(self, batch_size: int, length: int) -> tuple[int, int]:
        """Returns (number of groups G, tokens per group S) for a batch.

        Raises:
          ConfigError: The number of tokens is not divisible by the number of groups.
        """
        num_tokens, num_groups = batch_size * length, self.num_groups or batch_size
        smallest = self.min_group_size
        if smallest is not None and num_tokens < num_groups * smallest:
            num_groups = -(-num_tokens // smallest)
        if num_tokens % num_groups:
            raise ConfigError(
                f"TransformerFeedForwardMoe needs {num_groups} groups of equal size, but the batch "
                f"has {num_tokens} tokens ({batch_size} sequences of {length}), which is not "
                f"divisible by {num_groups}. Change num_groups ({self.num_groups}) or "
                f"min_group_size ({smallest}). With num_groups=0, each sequence is a group."
            )
        return num_groups, num_tokens // num_groups

    def top_k(
        self,
        tokens: Tokens,
        key: jax.Array | None,
        dropless: Dropless,
        apply_experts: ApplyExperts,
        *,
        is_capped: bool,
        correction_E: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Routes each token to its best experts.

        Args:
          tokens: Tokens and router logits.
          key: Random key for `second_expert_policy` in training, otherwise None.
          dropless: Computes outputs without a capacity.
          apply_experts: Computes the experts' outputs for tokens in slots.
          is_capped: Whether experts have a capacity. If False, experts have slots for all tokens of
            a group.
          correction_E: Correction for score_func "sigmoid"; see `routing.experts_by_group`.

        Returns:
          (outputs [G, S, D], values for the layer's variables, keyed by name).
        """
        x_GSD, logits_GSE, is_token_GS, is_in_row_GS = tokens
        logits_GSE = soft_cap(logits_GSE, self.gating_logit_cap)
        # Choose K experts for each token. The gates weight the experts' outputs; probs_GSE is used
        # only in the load-balancing loss.
        if self.score_func == "sigmoid":
            assert correction_E is not None
            experts_GSK, gates_GSK = routing.experts_by_group(
                logits_GSE,
                correction_E,
                is_token_GS,
                self.num_experts_per_token,
                self.num_expert_groups,
                self.num_expert_groups_per_token,
                self.gates_scale,
                self.normalize_gates,
            )
            is_routed_GSK = jnp.broadcast_to(is_token_GS[..., None], gates_GSK.shape)
            scores_GSE = jax.nn.sigmoid(logits_GSE)
            probs_GSE = scores_GSE / jnp.sum(scores_GSE, axis=-1, keepdims=True)
        else:
            experts_GSK, gates_GSK, is_routed_GSK = routing.choose_experts(
                logits_GSE,
                is_token_GS,
                key,
                self.num_experts_per_token,
                self.second_expert_policy,
                self.second_expert_threshold,
                self.normalize_gates,
                over_chosen=self.score_func == "softmax_of_chosen",
            )
            probs_GSE = jax.nn.softmax(logits_GSE, axis=-1)
        # As in Switch, only the first choice of a token counts in the load-balancing loss.
        balance = routing.load_balance_loss(
            probs_GSE, experts_GSK[..., 0], is_token_GS, is_in_row_GS
        )
        z_loss = routing.router_z_loss(logits_GSE, is_token_GS)
        # Report the load, before any choice is dropped.
        choices_E = routing.expert_choices(experts_GSK, is_routed_GSK, self.num_experts)
        load_E = routing.expert_load(choices_E)
        report = {
            "aux_moe_load_balance_loss": self.moe_load_balance_loss_weight * balance,
            "aux_moe_router_z_loss": self.moe_router_z_loss_weight * z_loss,
            "max_expert_load": jnp.max(load_E),
            "min_expert_load": jnp.min(load_E),
            "expert_choices": choices_E,
        }
        if self.dropless:
            gates_GSK = jnp.where(is_routed_GSK, gates_GSK, 0.0)
            return dropless(x_GSD, experts_GSK, gates_GSK), report
        capacity = self._capacity(x_GSD.shape[1]) if is_capped else x_GSD.shape[1]
        slots = (self.num_experts, capacity)
        outputs, report["over_capacity_ratio"] = route_through_slots(
            x_GSD, experts_GSK, gates_GSK, is_routed_GSK, slots, apply_experts
        )
        return outputs, report

    @property
    def has_slots_for_all(self) -> bool:
        """Whether tokens never compete for slots."""
        is_capped = self.is_top_k and not self.dropless
        is_enough = self.unadjusted_expert_capacity_factor >= self.num_experts
        return not self.gating_func.startswith("expert_choice") and (not is_capped or is_enough)

    def dense_top2(self, tokens: Tokens, apply_experts: ApplyExperts) -> jax.Array:
        """Runs all experts on all tokens, and combines the two best per token, [G, S, D]."""
        num_groups, *rest = tokens.x.shape
        gates_GSE = routing.top_two_gates(jax.nn.softmax(tokens.logits, axis=-1))
        shape_GESD = (num_groups, self.num_experts, *rest)
        y_GESD = apply_experts(jnp.broadcast_to(tokens.x[:, None], shape_GESD))
        return jnp.einsum("gesd,gse->gsd", y_GESD, gates_GSE.astype(y_GESD.dtype))

    def expert_choice(self, tokens: Tokens, apply_experts: ApplyExperts) -> jax.Array:
        """Sends each expert the tokens with its highest scores; returns outputs [G, S, D]."""
        group_size, factor = tokens.x.shape[1], self.unadjusted_expert_capacity_factor
        probs_GSE = jax.nn.softmax(tokens.logits, axis=-1)
        if self.gating_func == "expert_choice":
            # As in Pax, experts may choose padding, which is only removed from the outputs.
            capacity = int(group_size // self.num_experts * factor)
            capacity = min(max(capacity, 1), group_size)
        else:
            probs_GSE *= tokens.is_token[..., None].astype(probs_GSE.dtype)
            capacity = self._capacity(group_size)
        chosen = routing.tokens_by_expert_choice(probs_GSE, capacity)
        return route_expert_choice(tokens.x, *chosen, apply_experts)

    def _capacity(self, group_size: int) -> int:
        factor = self.unadjusted_expert_capacity_factor
        return routing.expert_capacity(
            group_size, self.num_experts, factor, self.expert_capacity_dim
        )
