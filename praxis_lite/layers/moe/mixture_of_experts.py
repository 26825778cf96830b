"""A transformer's feed-forward block whose tokens each go to a few of many experts."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.layers.activations import ActivationFn, activation_fn
from praxis_lite.layers.base_layer import AuxLoss, BaseLayer, Summary, require_positive
from praxis_lite.layers.moe import routing as moe_routing
from praxis_lite.layers.moe.dispatch import (
    combine,
    combine_chosen,
    dispatch,
    dispatch_chosen,
    slots_of,
)
from praxis_lite.layers.moe.dropless import dropless
from praxis_lite.layers.moe.experts import at_experts, first_dim
from praxis_lite.layers.moe.settings import check_settings, expert_initializer, groups_of
from praxis_lite.layers.normalizations import LayerNorm
from praxis_lite.layers.stacking.residual_branches import (
    check_norm_policy,
    normed_branch,
    split_keys,
)
from praxis_lite.layers.stochastics import Dropout, StochasticResidual
from praxis_lite.sharding import SplitDims, constrain

# B batch, T time, D model dims, F hidden dims, G groups, S tokens of a group, E experts, K experts
# of a token, C slots of an expert for a group, R rows of tokens sorted by expert.


class TransformerFeedForwardMoe(BaseLayer):
    """Returns `x + experts(norm(x))`: [B, T, D] -> [B, T, D], each token through a few experts.

    GShard, arXiv:2006.16668. Tokens are routed in groups; an expert takes at most its capacity of
    each (`moe_routing.expert_capacity`), and what is beyond is dropped: no expert adds anything to
    it. Padded tokens are not routed, and rows of nothing but padding enter none of what a pass
    reports. A pass sets

      aux_moe_load_balance_loss, aux_moe_router_z_loss: what is added to the training loss;
      over_capacity_ratio: the share of choices dropped;
      max_expert_load, min_expert_load: choices of the busiest and the idlest expert, before any is
        dropped, relative to the mean.

    A pass over one token of each row drops nothing, and decoding consists of such passes: a model
    with a capacity so decodes with experts that a pass over whole rows would have dropped, and the
    log-probabilities of the two differ (by 0.3 in a small model that drops much). They are the same
    with dropless=True, or where nothing is dropped: unadjusted_expert_capacity_factor=num_experts.

    On a mesh the tokens' groups split as the outputs' first dim does, and experts over axes of
    their own. Where these are among the groups' axes, for instance activations split
    (("data", "expert"), None, None) and weights ("expert", None, "mdl"), one all-to-all takes
    tokens to the experts and one takes outputs back; two more do so for the gradients, and the
    first is repeated where the forward pass is (remat).

    Args:
      num_experts: E.
      num_experts_per_token: K of gating_func "top_k".
      gating_func: "top2"; "top_k"; "expert_choice" and "expert_choice_v2" (experts choose tokens,
        arXiv:2202.09368, among later ones too; the second not padding); "dense_top2" (each token
        goes through every expert, and two are used).
      num_groups: G, as in Pax; 0, which Pax refuses: a group per row of the batch.
      min_group_size: take fewer groups where they would have fewer tokens.
      expert_capacity_dim, unadjusted_expert_capacity_factor: see `moe_routing.expert_capacity`.
      dropless: no capacity: each token reaches all its experts; see `moe_dropless` for the memory.
      second_expert_policy: of top2, in a training pass: "all"; "sampling": the second expert is
        drawn; "random": it is used in a share min(1, gate / second_expert_threshold) of cases.
      gating_logit_cap: keeps logits within +-cap by a tanh; 0: not.
      moe_gating_embedding_level: route by each "token", or all alike by the mean of the
        "sentence" (its segment).
      moe_load_balance_loss_weight, moe_router_z_loss_weight: of the losses; ST-MoE
        (arXiv:2202.08906) has 1e-2 and 1e-3.
      internal_gshard_variance_scaling_fan_in_init: draw weights uniformly in
        +-sqrt(3 / fan in); False: by Xavier, with E as a receptive field unless
        explicit_fan_in_fan_out_axes.
      activation, norm_policy, ...: as TransformerFeedForward.
      weight_split_dims_mapping: of the experts' weights into F, [E, D, F]; those out of F, [E, F,
        D], split as their transpose.
      gate_split_dims_mapping: of the router's weight, [D, E].
      activation_split_dims_mapping: of the outputs, [B, T, D].
      dispatch_split_dims_mapping: of the experts' inputs and outputs, [G, E, C, D]; None: G as the
        outputs' first dim without the experts' axes, E as the weights' first.
      hidden_split_dims_mapping: of the hidden activations, [G, E, C, F]; None: as the former, and
        F as the weights' last.

    Raises:
      ConfigError: fewer experts than a token goes to, no capacity, an unknown name, ...; and, when
        called, groups that do not divide the tokens.
    """

    def __init__(
        self,
        input_dims: int,
        hidden_dims: int,
        *,
        num_experts: int,
        num_experts_per_token: int = 2,
        gating_func: str = "top2",
        num_groups: int = 0,
        min_group_size: int | None = None,
        expert_capacity_dim: int = 0,
        unadjusted_expert_capacity_factor: float = 2.0,
        dropless: bool = False,
        second_expert_policy: str = "all",
        second_expert_threshold: float = 0.0,
        gating_logit_cap: float = 0.0,
        moe_gating_embedding_level: str = "token",
        moe_load_balance_loss_weight: float = 1.0,
        moe_router_z_loss_weight: float = 0.0,
        activation: str | ActivationFn = "relu",
        use_gated_activation: bool = False,
        apply_padding_first: bool = False,
        norm_policy: str = "pre",
        add_skip_connection: bool = True,
        residual_weight: float = 1.0,
        relu_dropout_prob: float = 0.0,
        residual_dropout_prob: float = 0.0,
        residual_droppath_prob: float = 0.0,
        internal_gshard_variance_scaling_fan_in_init: bool = True,
        explicit_fan_in_fan_out_axes: bool = False,
        ln_tpl: Callable[..., Any] = LayerNorm,
        weight_split_dims_mapping: SplitDims = None,
        gate_split_dims_mapping: SplitDims = None,
        activation_split_dims_mapping: SplitDims = None,
        dispatch_split_dims_mapping: SplitDims = None,
        hidden_split_dims_mapping: SplitDims = None,
        rngs: nnx.Rngs,
    ):
        require_positive(
            self,
            input_dims=input_dims,
            hidden_dims=hidden_dims,
            num_experts=num_experts,
            num_experts_per_token=num_experts_per_token,
            **({} if min_group_size is None else {"min_group_size": min_group_size}),
            **({"num_groups": num_groups} if num_groups != 0 else {}),
        )
        check_norm_policy(norm_policy, self)
        self.num_experts, self.num_experts_per_token = num_experts, num_experts_per_token
        self.gating_func, self.dropless = gating_func, dropless
        self.num_groups, self.min_group_size = num_groups, min_group_size
        self.expert_capacity_dim = expert_capacity_dim
        self.unadjusted_expert_capacity_factor = unadjusted_expert_capacity_factor
        self.second_expert_policy = second_expert_policy
        self.second_expert_threshold = second_expert_threshold
        self.gating_logit_cap = gating_logit_cap
        self.moe_gating_embedding_level = moe_gating_embedding_level
        self.moe_load_balance_loss_weight = moe_load_balance_loss_weight
        self.moe_router_z_loss_weight = moe_router_z_loss_weight
        self.activation, self.norm_policy = activation, norm_policy
        self.add_skip_connection = add_skip_connection
        self.apply_padding_first = apply_padding_first
        self.relu_dropout = Dropout(relu_dropout_prob)
        self.residual_dropout = Dropout(residual_dropout_prob)
        self.residual_droppath = StochasticResidual(
            survival_prob=1.0 - residual_droppath_prob,
            residual_weight=1.0 if residual_droppath_prob else residual_weight,
        )
        check_settings(self)

        split_E, split_D, split_F = (*(weight_split_dims_mapping or ()), None, None, None)[:3]
        self.weight_split_dims_mapping = (split_E, split_D, split_F)
        self.activation_split_dims_mapping = activation_split_dims_mapping
        self.dispatch_split_dims_mapping = dispatch_split_dims_mapping
        self.hidden_split_dims_mapping = hidden_split_dims_mapping

        is_uniform = internal_gshard_variance_scaling_fan_in_init
        init = functools.partial(expert_initializer, is_uniform, explicit_fan_in_fan_out_axes)
        shape, into = (num_experts, input_dims, hidden_dims), (split_E, split_D, split_F)
        has_two = norm_policy == "primer_hybrid"
        self.layer_norm = None if has_two else ln_tpl(input_dims, rngs=rngs)
        self.pre_layer_norm = ln_tpl(input_dims, rngs=rngs) if has_two else None
        self.post_layer_norm = ln_tpl(input_dims, rngs=rngs) if has_two else None
        self.gate = self.weight(
            (input_dims, num_experts),
            gate_split_dims_mapping,
            init=expert_initializer(is_uniform, False, input_dims),
            rngs=rngs,
        )
        self.wi_gate_0 = (
            self.weight(shape, into, init=init(input_dims), rngs=rngs)
            if use_gated_activation
            else None
        )
        self.wi_0 = self.weight(shape, into, init=init(input_dims), rngs=rngs)
        self.wo_0 = self.weight(
            (num_experts, hidden_dims, input_dims),
            (split_E, split_F, split_D),
            init=init(hidden_dims),
            rngs=rngs,
        )

        self.aux_moe_load_balance_loss = AuxLoss(jnp.zeros(()))
        self.aux_moe_router_z_loss = (
            AuxLoss(jnp.zeros(())) if moe_router_z_loss_weight else None
        )
        self.over_capacity_ratio = Summary(jnp.zeros(()))
        self.max_expert_load = Summary(jnp.zeros(()))
        self.min_expert_load = Summary(jnp.zeros(()))

    def __call__(
        self,
        inputs: jax.Array,
        *,
        paddings: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Args: inputs [B, T, D]; paddings [B, T], 1.0 where nothing is added to the inputs.

        Without paddings the tokens of segment 0 are padding.
        """
        routing_key, relu_key, residual_key, droppath_key = split_keys(key, 4)
        is_token_BT = jnp.ones(inputs.shape[:2], bool)
        if paddings is not None:
            is_token_BT = paddings < 0.5
        elif segment_ids is not None:
            is_token_BT = segment_ids != 0

        def experts(x_BTD: jax.Array) -> jax.Array:
            outputs = self._experts(x_BTD, is_token_BT, segment_ids, routing_key, relu_key)
            return jnp.where(is_token_BT[..., None], outputs, 0)

        def join(inputs: jax.Array, outputs: jax.Array) -> jax.Array:
            outputs = self.residual_dropout(outputs, residual_key)
            if not self.add_skip_connection:
                return outputs
            return self.residual_droppath(inputs, outputs, droppath_key)

        if self.apply_padding_first:
            inputs = jnp.where(is_token_BT[..., None], inputs, 0)
        norms = (self.layer_norm, self.pre_layer_norm, self.post_layer_norm)
        outputs = normed_branch(self.norm_policy, norms, inputs, experts, join, key)
        return constrain(outputs, self.activation_split_dims_mapping)

    def _experts(
        self,
        x_BTD: jax.Array,
        is_token_BT: jax.Array,
        segment_ids_BT: jax.Array | None,
        routing_key: jax.Array | None,
        relu_key: jax.Array | None,
    ) -> jax.Array:
        """Returns the gated sum of what each token's experts make of it, [B, T, D]."""
        groups = groups_of(*x_BTD.shape[:2], self.num_groups, self.min_group_size)
        x_GSD = self._at_tokens(x_BTD.reshape(*groups, -1))
        is_token_GS = is_token_BT.reshape(groups)
        has_token_BT = jnp.broadcast_to(is_token_BT.any(axis=1, keepdims=True), is_token_BT.shape)
        is_in_row_GS = has_token_BT.reshape(groups)
        routed_by = x_GSD
        if self.moe_gating_embedding_level == "sentence":
            segments = is_token_BT.astype(int) if segment_ids_BT is None else segment_ids_BT
            routed_by = moe_routing.sentence_means(x_BTD, segments).reshape(x_GSD.shape)
        # Gathered whole, small as it is: XLA would move parts of it and of the logits about.
        gate_DE = constrain(self.gate[...].astype(x_BTD.dtype), (None, None))
        logits_GSE = jnp.einsum(
            "gsd,de->gse", routed_by, gate_DE, preferred_element_type=jnp.float32
        )
        if self.gating_func in ("top2", "top_k"):
            # Of one token of each row, as in decoding, no row may take the place of another.
            is_capped = x_BTD.shape[1] > 1
            outputs = self._top_k(
                x_GSD, logits_GSE, is_token_GS, is_in_row_GS, is_capped, routing_key, relu_key
            )
        elif self.gating_func == "dense_top2":
            gates_GSE = moe_routing.top_two_gates(jax.nn.softmax(logits_GSE, axis=-1))
            shape_GESD = (groups[0], self.num_experts, *x_GSD.shape[1:])
            y_GESD = self._at_experts(jnp.broadcast_to(x_GSD[:, None], shape_GESD), relu_key)
            outputs = jnp.einsum("gesd,gse->gsd", y_GESD, gates_GSE.astype(y_GESD.dtype))
        else:
            outputs = self._chosen_by_experts(x_GSD, logits_GSE, is_token_GS, relu_key)
        return self._at_tokens(outputs).reshape(x_BTD.shape)

    def _top_k(
        self,
        x_GSD: jax.Array,
        logits_GSE: jax.Array,
        is_token_GS: jax.Array,
        is_in_row_GS: jax.Array,
        is_capped: bool,
        routing_key: jax.Array | None,
        relu_key: jax.Array | None,
    ) -> jax.Array:
        logits_GSE = moe_routing.soft_cap(logits_GSE, self.gating_logit_cap)
        experts_GSK, gates_GSK, is_routed_GSK = moe_routing.choose_experts(
            logits_GSE,
            is_token_GS,
            routing_key,
            self.num_experts_per_token,
            self.second_expert_policy,
            self.second_expert_threshold,
        )
        self._report(logits_GSE, experts_GSK, is_token_GS, is_in_row_GS, is_routed_GSK)
        if self.dropless:
            return dropless(
                x_GSD,
                experts_GSK,
                jnp.where(is_routed_GSK, gates_GSK, 0.0),
                self._weights(x_GSD.dtype),
                activation_fn(self.activation, self),
                tokens_split=self.activation_split_dims_mapping,
                weights_split=self.weight_split_dims_mapping,
            )
        group_size = x_GSD.shape[1]
        capacity = group_size
        if is_capped:
            capacity = moe_routing.expert_capacity(
                group_size,
                self.num_experts,
                self.unadjusted_expert_capacity_factor,
                self.expert_capacity_dim,
            )
        num_slots = self.num_experts * capacity
        slots_GSK = slots_of(experts_GSK, is_routed_GSK, self.num_experts, capacity)
        num_routed = jnp.sum(is_routed_GSK)
        num_dropped = num_routed - jnp.sum(slots_GSK < num_slots)
        self.over_capacity_ratio.set_value(num_dropped / jnp.maximum(num_routed, 1))
        x_GND = dispatch(x_GSD, slots_GSK, num_slots)
        y_GND = self._in_slots(x_GND, capacity, relu_key)
        return combine(y_GND, slots_GSK, gates_GSK)

    def _chosen_by_experts(
        self,
        x_GSD: jax.Array,
        logits_GSE: jax.Array,
        is_token_GS: jax.Array,
        relu_key: jax.Array | None,
    ) -> jax.Array:
        group_size, factor = x_GSD.shape[1], self.unadjusted_expert_capacity_factor
        probs_GSE = jax.nn.softmax(logits_GSE, axis=-1)
        if self.gating_func == "expert_choice":
            # As Pax's: padding is chosen too, and left out of the outputs only.
            capacity = int(group_size // self.num_experts * factor)
            capacity = min(max(capacity, 1), group_size)
        else:
            probs_GSE *= is_token_GS[..., None].astype(probs_GSE.dtype)
            capacity = moe_routing.expert_capacity(
                group_size, self.num_experts, factor, self.expert_capacity_dim
            )
        tokens_GEC, gates_GEC = moe_routing.tokens_by_expert_choice(probs_GSE, capacity)
        tokens_GN, gates_GN = (x.reshape(x.shape[0], -1) for x in (tokens_GEC, gates_GEC))
        y_GND = self._in_slots(dispatch_chosen(x_GSD, tokens_GN), capacity, relu_key)
        return combine_chosen(y_GND, tokens_GN, gates_GN, group_size)

    def _report(
        self,
        logits_GSE: jax.Array,
        experts_GSK: jax.Array,
        is_token_GS: jax.Array,
        is_in_row_GS: jax.Array,
        is_routed_GSK: jax.Array,
    ) -> None:
        probs_GSE = jax.nn.softmax(logits_GSE, axis=-1)
        balance = moe_routing.load_balance_loss(
            probs_GSE, experts_GSK[..., 0], is_token_GS, is_in_row_GS
        )
        self.aux_moe_load_balance_loss.set_value(self.moe_load_balance_loss_weight * balance)
        if self.aux_moe_router_z_loss is not None:
            z_loss = moe_routing.router_z_loss(logits_GSE, is_token_GS)
            self.aux_moe_router_z_loss.set_value(self.moe_router_z_loss_weight * z_loss)
        load_E = moe_routing.expert_load(experts_GSK, is_routed_GSK, self.num_experts)
        self.max_expert_load.set_value(jnp.max(load_E))
        self.min_expert_load.set_value(jnp.min(load_E))

    def _in_slots(
        self, x_GND: jax.Array, capacity: int, relu_key: jax.Array | None
    ) -> jax.Array:
        """Returns the experts' outputs of the tokens in their slots, [G, E x C, D]."""
        shape_GECD = (x_GND.shape[0], self.num_experts, capacity, x_GND.shape[-1])
        return self._at_experts(x_GND.reshape(shape_GECD), relu_key).reshape(x_GND.shape)

    def _at_experts(self, x_GECD: jax.Array, relu_key: jax.Array | None) -> jax.Array:
        return at_experts(
            x_GECD,
            self._weights(x_GECD.dtype),
            activation_fn(self.activation, self),
            lambda hidden_GECF: self.relu_dropout(hidden_GECF, relu_key),
            tokens_split=self.activation_split_dims_mapping,
            weights_split=self.weight_split_dims_mapping,
            dispatch_split=self.dispatch_split_dims_mapping,
            hidden_split=self.hidden_split_dims_mapping,
        )

    def _at_tokens(self, x: jax.Array) -> jax.Array:
        return constrain(x, first_dim(self.activation_split_dims_mapping))

    def _weights(self, dtype: Any) -> dict[str, jax.Array]:
        weights = {"wi_0": self.wi_0, "wi_gate_0": self.wi_gate_0, "wo_0": self.wo_0}
        return {name: w[...].astype(dtype) for name, w in weights.items() if w is not None}
