"""A transformer's feed-forward layer in which each token is processed by a few of many experts."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.errors import ConfigError, require, require_choice
from praxis_lite.core.models.tallies import Tally
from praxis_lite.core.sharding.split_dims import SplitDims, constrain
from praxis_lite.layers.activations import ActivationFn, activation_fn
from praxis_lite.layers.base.base_layer import BaseLayer, zeros
from praxis_lite.layers.base.calls import inherit_params, require_positive
from praxis_lite.layers.base.dims import NONE, RESIDUAL, Matrix, sized, splits
from praxis_lite.layers.base.result_types import einsum, reshaped
from praxis_lite.layers.base.variables import AuxLoss, Summary
from praxis_lite.layers.linears import Linear
from praxis_lite.layers.moe.dropless import dropless
from praxis_lite.layers.moe.experts import (
    Experts,
    apply_experts,
    expert_initializer,
    first_dim,
    glu,
)
from praxis_lite.layers.moe.gating import Gating, Tokens
from praxis_lite.layers.moe.grouped_matmul import check_kernel
from praxis_lite.layers.moe.routing import BiasUpdate, sentence_means
from praxis_lite.layers.stacking.residual_branches import ResidualBranch, split_keys
from praxis_lite.layers.stochastics import Dropout

# B batch, T time, D model dims, F hidden dims, G groups, S tokens per group, E experts, K experts
# per token, C slots per expert and group.
_EXPERT_WEIGHTS = ("wi_0", "wi_gate_0", "wo_0", "bi_0", "bi_gate_0", "bo_0")
EMBEDDING_LEVELS = ("token", "sentence")


class TransformerFeedForwardMoe(ResidualBranch):
    """Computes `x + experts(norm(x))`: [B, T, D] -> [B, T, D], with a few experts per token.

    GShard, arXiv:2006.16668. Tokens are routed in groups. An expert processes at most
    `routing.expert_capacity` tokens from each group, and contributes nothing to the remaining
    tokens that chose it. Documents packed into a row therefore compete for slots, unless nothing is
    dropped (dropless=True, gating_func="dense_top2"). Padding is not routed, and rows that contain
    only padding do not affect the reported values:

      aux_moe_load_balance_loss, aux_moe_router_z_loss: terms that are added to the training loss.
      over_capacity_ratio: fraction of the tokens' choices that were dropped.
      max_expert_load, min_expert_load: largest and smallest number of choices of an expert, before
      dropping, relative to the mean.

    Decoding processes one token per sequence at a time and drops no choices. With a capacity,
    decoding therefore keeps choices that a pass over the complete sequence would drop, and the
    log-probs differ (by 0.3 in a small model that drops many choices). The log-probs are equal with
    dropless=True, or with unadjusted_expert_capacity_factor=num_experts, which drops nothing.

    On a mesh, groups are sharded like the first dim of the outputs. Experts can be sharded over
    other axes or over some of the same axes. In the second case, such as with activations sharded
    as (("data", "expert"), None, None) and weights as ("expert", None, "mdl"), one all-to-all sends
    tokens to the experts and a second returns their outputs. Gradients need two more all-to-alls,
    and remat repeats the first one.

    Args:
      input_dims: D.
      hidden_dims: F, unless expert_hidden_dims is set. Models pass it to all of their layers.
      expert_hidden_dims: F, if it differs from hidden_dims.
      num_experts: E.
      num_experts_per_token: K for gating_func "top_k".
      gating_func: "top2" or "top_k"; "expert_choice" or "expert_choice_v2", in which experts choose
        tokens (arXiv:2202.09368), including later tokens, but "expert_choice_v2" never chooses
        padding; or "dense_top2", which computes all experts for each token but uses only two.
      num_groups: G, as in Pax. If 0, which Pax does not allow, each sequence is a group.
      min_group_size: Minimum number of tokens per group; if necessary, fewer groups are used.
      expert_capacity_dim: See `routing.expert_capacity`.
      unadjusted_expert_capacity_factor: See `routing.expert_capacity`.
      dropless: Whether experts have no capacity, so that each token reaches all of its experts. See
        `dropless` for the memory that this needs.
      expert_kernel: Kernel for dropless matmuls, a name in `grouped_matmul.EXPERT_KERNELS`.
      normalize_gates: Whether to normalize a token's gates to sum to 1. If False (only for
        gating_func "top2" and "top_k"), gates are the router's probabilities.
      score_func: For gating_func "top_k": "softmax"; "softmax_of_chosen", a softmax over the logits
        of only the chosen experts, as in GPT-OSS; or "sigmoid", as in DeepSeek-V3's router, which
        adds a correction [E] to the scores for choosing experts. The correction has no gradient:
        exclude it from training (".*/gate_correction"), or set `bias_update_rate`.
      bias_update_rate: For "sigmoid": the amount by which each step changes the correction, to
        balance loads without a loss (`routing.BiasUpdate`). Use it with
        moe_load_balance_loss_weight=0. If 0, the correction does not change.
      num_expert_groups: For "sigmoid"; see `routing.experts_by_group`.
      num_expert_groups_per_token: For "sigmoid"; see `routing.experts_by_group`.
      gates_scale: For "sigmoid"; see `routing.experts_by_group`.
      has_bias: Whether the experts and the router have biases.
      swiglu_limit: Limit on a gated activation, or None; see `experts.glu`.
      swiglu_alpha: See `experts.glu`.
      num_shared_experts: Number of additional experts that process every token. They form one
        feed-forward layer with this many times the hidden dims.
      second_expert_policy: For top2 in training: "all" uses each token's second expert; "sampling"
        samples it; "random" uses it with probability min(1, gate / second_expert_threshold).
      second_expert_threshold: See second_expert_policy.
      gating_logit_cap: Limit on the router logits, applied with a tanh. If 0, there is no limit.
      moe_gating_embedding_level: "token" to route each token separately, or "sentence" to route all
        tokens of a segment by their mean.
      moe_load_balance_loss_weight: Weight of the load-balancing loss; ST-MoE (arXiv:2202.08906)
        uses 1e-2.
      moe_router_z_loss_weight: Weight of the router's z-loss; ST-MoE uses 1e-3.
      internal_gshard_variance_scaling_fan_in_init: Whether to initialize weights uniformly in
        +-sqrt(3 / fan_in). If False, Xavier initialization is used, which treats E as a receptive
        field unless explicit_fan_in_fan_out_axes is set.
      explicit_fan_in_fan_out_axes: Whether the fan-in and fan-out for Xavier exclude E.
      activation: See TransformerFeedForward.
      use_gated_activation: See TransformerFeedForward.
      apply_padding_first: See TransformerFeedForward.
      relu_dropout_prob: See TransformerFeedForward.
      settings: Settings of the norm, dropout and skip connection; see ResidualBranch.
      weight_split_dims_mapping: Sharding of the experts' input weights, [E, D, F]. Output weights
        are sharded like their transpose.
      gate_split_dims_mapping: Sharding of the router's weight, [D, E].
      activation_split_dims_mapping: Sharding of the outputs, [B, T, D].
      dispatch_split_dims_mapping: Sharding of the experts' inputs and outputs, [G, E, C, D]. If
        None, E is sharded like the weights, and G like the first dim of the outputs, without the
        axes of E.
      hidden_split_dims_mapping: Sharding of the hidden activations, [G, E, C, F]. If None, G and E
        are sharded as in dispatch_split_dims_mapping, and F like the last dim of the weights.

    Raises:
      ConfigError: Settings conflict with each other. When called: the number of tokens is not
        divisible by the number of groups.
    """

    splits = splits(
        weight=("expert", "embed", "mlp"),
        gate=("embed", None),
        activation=RESIDUAL,
        dispatch=(),
        hidden=(),
    )
    gate_split_dims_mapping: SplitDims
    dispatch_split_dims_mapping: SplitDims
    hidden_split_dims_mapping: SplitDims
    couples_rows = "experts' balance"

    @property
    def couples_tokens(self) -> str | None:  # type: ignore[override]  # Depends on the settings.
        return None if self.gating.has_slots_for_all else "experts with a capacity"

    @inherit_params(Gating, ResidualBranch, exclude=("output_dims",))
    def __init__(
        self,
        input_dims: int,
        hidden_dims: int,
        *,
        expert_hidden_dims: int | None = None,
        has_bias: bool = False,
        swiglu_limit: float | None = None,
        swiglu_alpha: float = 1.702,
        num_shared_experts: int = 0,
        bias_update_rate: float = 0.0,
        expert_kernel: str = "auto",
        moe_gating_embedding_level: str = "token",
        activation: str | ActivationFn = "relu",
        use_gated_activation: bool = False,
        apply_padding_first: bool = False,
        relu_dropout_prob: float = 0.0,
        internal_gshard_variance_scaling_fan_in_init: bool = True,
        explicit_fan_in_fan_out_axes: bool = False,
        rngs: nnx.Rngs,
        **settings: Any,
    ):
        hidden_dims = expert_hidden_dims or hidden_dims
        require_positive(self, input_dims=input_dims, hidden_dims=hidden_dims)
        # Divide `settings` between Gating and ResidualBranch.
        names = {field.name for field in dataclasses.fields(Gating)} & settings.keys()
        self.gating = Gating(**{name: settings.pop(name) for name in names})
        super().__init__(input_dims, input_dims, rngs=rngs, **settings)
        name = type(self).__name__
        require_choice(
            f"{name}.moe_gating_embedding_level", moe_gating_embedding_level, EMBEDDING_LEVELS
        )
        if self.gating.dropless and relu_dropout_prob:
            raise ConfigError(
                f"{name}.relu_dropout_prob {relu_dropout_prob} cannot be combined with "
                "dropless=True, because dropout would depend on the mesh. Set relu_dropout_prob=0, "
                "and use residual_dropout_prob instead."
            )
        activation_fn(activation, self)
        check_kernel(expert_kernel)
        self.expert_kernel = expert_kernel
        is_valid = bias_update_rate >= 0 and (
            not bias_update_rate or self.gating.score_func == "sigmoid"
        )
        require(
            is_valid,
            f"{name}.bias_update_rate",
            bias_update_rate,
            "0, or a positive number with score_func 'sigmoid'",
        )
        self.is_by_sentence = moe_gating_embedding_level == "sentence"
        self.activation, self.apply_padding_first = activation, apply_padding_first
        self.relu_dropout = Dropout(relu_dropout_prob)
        num_experts = self.gating.num_experts
        E, D, F = self.dims(num_experts, input_dims, hidden_dims)
        self.weight_split_dims_mapping = (E.split, D.split, F.split)

        init = functools.partial(expert_initializer, internal_gshard_variance_scaling_fan_in_init)
        gate = self.dims(input_dims, num_experts, setting_prefix="gate")
        self.gate = self.weight(gate, init=init(False, input_dims), rngs=rngs)
        self.gate_correction = (
            self.weight((num_experts,), init=zeros, rngs=rngs)
            if self.gating.score_func == "sigmoid"
            else None
        )
        # Shard D like the router's weight and other layers do, even over the expert axis.
        self.shared_experts = (
            SharedExperts(
                gate[0] if gate[0].is_explicit else D,
                sized(F, num_shared_experts * hidden_dims),
                activation,
                use_gated_activation,
                rngs,
            )
            if num_shared_experts
            else None
        )

        self.has_bias, self.swiglu_limit = has_bias, swiglu_limit
        self.swiglu_alpha = swiglu_alpha

        def bias(*dims: int) -> nnx.Param | None:
            return self.weight(dims, init=zeros, matrix=NONE, rngs=rngs) if has_bias else None

        self.gate_bias = bias(num_experts)
        self.bi_0 = bias(E, F)
        self.bi_gate_0 = bias(E, F) if use_gated_activation else None
        self.bo_0 = bias(E, D)

        def expert_weight(fan_in: int, fan_out: int) -> nnx.Param:
            initializer = init(explicit_fan_in_fan_out_axes, int(fan_in))
            dims, matrix = (E, fan_in, fan_out), Matrix((1,), (2,))
            return self.weight(dims, init=initializer, matrix=matrix, rngs=rngs)

        self.wi_gate_0 = expert_weight(D, F) if use_gated_activation else None
        self.wi_0, self.wo_0 = expert_weight(D, F), expert_weight(F, D)

        # Variables for the values that `Gating.top_k` reports, with the same names. None disables
        # the value.
        self.aux_moe_load_balance_loss = AuxLoss(jnp.zeros(()))
        has_z_loss = self.gating.moe_router_z_loss_weight > 0.0
        self.aux_moe_router_z_loss = AuxLoss(jnp.zeros(())) if has_z_loss else None
        self.expert_choices = (
            Tally(
                jnp.zeros(num_experts), moves="gate_correction", rule=BiasUpdate(bias_update_rate)
            )
            if bias_update_rate
            else None
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
        """Returns the outputs, [B, T, D].

        Args:
          inputs: [B, T, D].
          paddings: [B, T], 1.0 for padding. If None, tokens with segment id 0 are padding.
          segment_ids: Int [B, T], or None.
          key: Random key for routing and dropout in training, otherwise None.
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

        if self.apply_padding_first:
            inputs = jnp.where(is_token_BT[..., None], inputs, 0)
        outputs = self._with_branch(inputs, experts, residual_key, droppath_key, key)
        return constrain(outputs, self.activation_split_dims_mapping)

    def _experts(
        self,
        x_BTD: jax.Array,
        is_token_BT: jax.Array,
        segment_ids_BT: jax.Array | None,
        routing_key: jax.Array | None,
        relu_key: jax.Array | None,
    ) -> jax.Array:
        """Returns the gated sum of each token's expert outputs, [B, T, D]."""
        gating, groups = self.gating, self.gating.groups_of(*x_BTD.shape[:2])
        x_GSD = self._constrain_tokens(reshaped(x_BTD, (*groups, x_BTD.shape[-1])))
        router_input = x_GSD
        # With sentence routing, all tokens of a segment get the same logits.
        if self.is_by_sentence:
            segments = is_token_BT.astype(int) if segment_ids_BT is None else segment_ids_BT
            router_input = reshaped(sentence_means(x_BTD, segments), x_GSD.shape)
        # Replicate the router's small weight; otherwise XLA would communicate shards of the weight
        # and of the logits.
        gate_DE = constrain(self.gate[...].astype(x_BTD.dtype), (None, None))
        logits_GSE = einsum(
            "gsd,de->gse", router_input, gate_DE, preferred_element_type=jnp.float32
        )
        if self.gate_bias is not None:
            logits_GSE += self.gate_bias[...].astype(jnp.float32)[None, None, :]
        weights = {name: getattr(self, name) for name in _EXPERT_WEIGHTS}
        experts = Experts(
            {name: w[...].astype(x_BTD.dtype) for name, w in weights.items() if w is not None},
            glu(activation_fn(self.activation, self), self.swiglu_limit, self.swiglu_alpha),
            tokens_split=self.activation_split_dims_mapping,
            weights_split=self.weight_split_dims_mapping,
        )
        # The experts have two implementations, `in_slots` and `dropless`.
        in_slots = functools.partial(
            apply_experts,
            experts,
            dropout=lambda hidden_GECF: self.relu_dropout(hidden_GECF, relu_key),
            dispatch_split=self.dispatch_split_dims_mapping,
            hidden_split=self.hidden_split_dims_mapping,
        )
        # Rows that contain only padding are excluded from the losses.
        has_token_B1 = is_token_BT.any(axis=1, keepdims=True)
        is_in_row_BT = jnp.broadcast_to(has_token_B1, is_token_BT.shape)
        is_token_GS, is_in_row_GS = (
            reshaped(mask_BT, groups) for mask_BT in (is_token_BT, is_in_row_BT)
        )
        tokens = Tokens(x_GSD, logits_GSE, is_token_GS, is_in_row_GS)
        if gating.is_top_k:
            outputs, report = gating.top_k(
                tokens,
                routing_key,
                functools.partial(dropless, experts, self.expert_kernel),
                in_slots,
                # With one token per sequence, as in decoding, sequences do not compete for slots.
                is_capped=x_BTD.shape[1] > 1,
                correction_E=None if self.gate_correction is None else self.gate_correction[...],
            )
            for name, value in report.items():
                if (variable := getattr(self, name)) is not None:
                    variable.set_value(value)
        elif gating.gating_func == "dense_top2":
            outputs = gating.dense_top2(tokens, in_slots)
        else:
            outputs = gating.expert_choice(tokens, in_slots)
        outputs = reshaped(self._constrain_tokens(outputs), x_BTD.shape)
        return outputs if self.shared_experts is None else outputs + self.shared_experts(x_BTD)

    def _constrain_tokens(self, x: jax.Array) -> jax.Array:
        return constrain(x, first_dim(self.activation_split_dims_mapping))


class SharedExperts(BaseLayer):
    """A feed-forward layer without a norm or a skip connection: [B, T, D] -> [B, T, D].

    Args:
      input_dims: D.
      hidden_dims: F.
      activation: Activation function of the gate, or of the hidden activations without a gate.
      is_gated: Whether hidden activations are multiplied by an activated gate.
      rngs: The random streams for initialization.
    """

    def __init__(
        self,
        input_dims: int,
        hidden_dims: int,
        activation: str | ActivationFn,
        is_gated: bool,
        rngs: nnx.Rngs,
    ):
        self.ffn_layer1_gate = Linear(input_dims, hidden_dims, rngs=rngs) if is_gated else None
        self.ffn_layer1 = Linear(input_dims, hidden_dims, rngs=rngs)
        self.ffn_layer2 = Linear(hidden_dims, input_dims, rngs=rngs)
        self.activation = activation

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        activate, hidden = activation_fn(self.activation, self), self.ffn_layer1(x_BTD)
        if self.ffn_layer1_gate is None:
            return self.ffn_layer2(activate(hidden))
        return self.ffn_layer2(hidden * activate(self.ffn_layer1_gate(x_BTD)))
