"""A transformer's feed-forward block whose tokens each go to a few of many experts."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.errors import require, require_choice
from praxis_lite.core.models.tallies import Tally
from praxis_lite.core.sharding.split_dims import constrain
from praxis_lite.layers.activations import ActivationFn, activation_fn
from praxis_lite.layers.base.base_layer import BaseLayer, zeros
from praxis_lite.layers.base.calls import inherit_params, require_positive
from praxis_lite.layers.base.dims import NONE, RESIDUAL, Matrix, sized, splits
from praxis_lite.layers.base.result_types import einsum, reshaped
from praxis_lite.layers.base.variables import AuxLoss, Summary
from praxis_lite.layers.linears import Linear
from praxis_lite.layers.moe.dropless import dropless
from praxis_lite.layers.moe.experts import at_experts, expert_initializer, first_dim, glu
from praxis_lite.layers.moe.gating import Gating, Tokens
from praxis_lite.layers.moe.grouped_matmul import check_kernel
from praxis_lite.layers.moe.routing import BiasUpdate, sentence_means
from praxis_lite.layers.stacking.residual_branches import ResidualBranch, split_keys
from praxis_lite.layers.stochastics import Dropout

# B batch, T time, D model dims, F hidden dims, G groups, S tokens of a group, E experts, K experts
# of a token, C slots of an expert for a group.
_OF_EXPERTS = ("wi_0", "wi_gate_0", "wo_0", "bi_0", "bi_gate_0", "bo_0")
EMBEDDING_LEVELS = ("token", "sentence")


class TransformerFeedForwardMoe(ResidualBranch):
    """Returns `x + experts(norm(x))`: [B, T, D] -> [B, T, D], each token through a few experts.

    GShard, arXiv:2006.16668. Tokens are routed in groups; an expert takes at most its capacity of
    each (`routing.expert_capacity`) and adds nothing to the tokens beyond. Documents packed into a
    row compete for its slots: what one gets depends on the others, unless nothing is dropped
    (dropless=True, gating_func="dense_top2"). Padding is not routed, and rows of nothing but
    padding enter none of what a pass reports:

      aux_moe_load_balance_loss, aux_moe_router_z_loss: what is added to the training loss;
      over_capacity_ratio: the share of choices dropped;
      max_expert_load, min_expert_load: choices of the busiest and the idlest expert, before any is
        dropped, relative to the mean.

    Decoding consists of passes over one token of each row, which drop nothing. So a model with a
    capacity decodes with experts that a pass over whole rows would have dropped, and the log-probs
    of the two differ (by 0.3 in a small model that drops much). They are the same with
    dropless=True, or if nothing is dropped: unadjusted_expert_capacity_factor=num_experts.

    On a mesh the groups split as the outputs' first dim does, and experts over axes of their own.
    If these are among the groups' axes, for instance activations split
    (("data", "expert"), None, None) and weights ("expert", None, "mdl"), one all-to-all takes
    tokens to the experts and one takes outputs back; two more do so for the gradients, and the
    first is repeated where the forward pass is (remat).

    Args:
      expert_hidden_dims: F, if it is not hidden_dims, which a model hands to all its layers.
      num_experts: E.
      num_experts_per_token: K of gating_func "top_k".
      gating_func: "top2"; "top_k"; "expert_choice" and "expert_choice_v2" (experts choose tokens,
        arXiv:2202.09368, also later ones; the second no padding); "dense_top2" (each token goes
        through every expert, and two are used).
      num_groups: G, as in Pax; 0, which Pax refuses: a group per row of the batch.
      min_group_size: take fewer groups if they would have fewer tokens.
      expert_capacity_dim, unadjusted_expert_capacity_factor: see `routing.expert_capacity`.
      dropless: no capacity: each token reaches all its experts; `dropless` says what memory it
        takes.
      expert_kernel: of dropless products, a name in `grouped_matmul.EXPERT_KERNELS`.
      normalize_gates: the gates of a token add up to 1; False: they are the router's probabilities
        (of gating_func "top2" and "top_k").
      score_func: of gating_func "top_k": "softmax"; "softmax_of_chosen", of the logits of a token's
        experts alone, as in GPT-OSS; "sigmoid", DeepSeek-V3's router, which has a correction [E] of
        the scores that experts are chosen by. The loss does not teach it: leave it out of training
        (".*/gate_correction"), or let `bias_update_rate` move it.
      bias_update_rate: of "sigmoid": moves the correction after each step, so that loads become
        even without a loss (`routing.BiasUpdate`); set moe_load_balance_loss_weight=0. 0: off.
      num_expert_groups, num_expert_groups_per_token, gates_scale: of "sigmoid", see
        `routing.experts_by_group`.
      has_bias: biases of experts and of the router.
      swiglu_limit, swiglu_alpha: of a gated activation, see `experts.glu`; a limit of None: none.
      num_shared_experts: experts that every token goes through besides, together one of so many
        times the hidden dims.
      second_expert_policy: of top2, in a training pass: "all"; "sampling": the second expert is
        drawn; "random": it is used in a share min(1, gate / second_expert_threshold) of cases.
      gating_logit_cap: keeps logits within +-cap by a tanh; 0: no cap.
      moe_gating_embedding_level: route by each "token", or all alike by the mean of the
        "sentence" (its segment).
      moe_load_balance_loss_weight, moe_router_z_loss_weight: of the losses; ST-MoE
        (arXiv:2202.08906) has 1e-2 and 1e-3.
      internal_gshard_variance_scaling_fan_in_init: draw weights uniformly in
        +-sqrt(3 / fan in); False: by Xavier, with E as a receptive field unless
        explicit_fan_in_fan_out_axes.
      activation, apply_padding_first, ...: as TransformerFeedForward; norms, dropout and the skip
        connection: as ResidualBranch.
      weight_split_dims_mapping: of the experts' weights into F, [E, D, F]; those out of F split as
        their transpose.
      gate_split_dims_mapping: of the router's weight, [D, E].
      activation_split_dims_mapping: of the outputs, [B, T, D].
      dispatch_split_dims_mapping: of the experts' inputs and outputs, [G, E, C, D]; None: G as the
        outputs' first dim without the experts' axes, E as the weights' first.
      hidden_split_dims_mapping: of the hidden activations, [G, E, C, F]; None: as the former, and
        F as the weights' last.

    Raises:
      ConfigError: settings that do not fit one another; when called, groups that do not divide the
        tokens.
    """

    splits = splits(
        weight=("expert", "embed", "mlp"), gate=("embed", None), activation=RESIDUAL, dispatch=(),
        hidden=(),
    )
    couples_rows = "experts' balance"

    @property
    def couples_tokens(self) -> str | None:
        return None if self.gating.has_slots_for_all else "experts with a capacity"

    @inherit_params(Gating, ResidualBranch, but=("output_dims",))
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
        names = {field.name for field in dataclasses.fields(Gating)} & settings.keys()
        self.gating = Gating(**{name: settings.pop(name) for name in names})
        super().__init__(input_dims, input_dims, rngs=rngs, **settings)
        name = type(self).__name__
        require_choice(
            f"{name}.moe_gating_embedding_level", moe_gating_embedding_level, EMBEDDING_LEVELS
        )
        require(
            not (self.gating.dropless and relu_dropout_prob), f"{name}.relu_dropout_prob",
            relu_dropout_prob, "0 with dropless=True, where what it drops would depend on the mesh",
            "Set residual_dropout_prob.",
        )
        activation_fn(activation, self)
        check_kernel(expert_kernel)
        self.expert_kernel = expert_kernel
        is_right = bias_update_rate >= 0 and (
            not bias_update_rate or self.gating.score_func == "sigmoid"
        )
        require(
            is_right, f"{name}.bias_update_rate", bias_update_rate,
            "0, or more with score_func 'sigmoid', whose correction it moves",
        )
        self.is_by_sentence = moe_gating_embedding_level == "sentence"
        self.activation, self.apply_padding_first = activation, apply_padding_first
        self.relu_dropout = Dropout(relu_dropout_prob)
        num_experts = self.gating.num_experts
        E, D, F = self.dims(num_experts, input_dims, hidden_dims)
        self.weight_split_dims_mapping = (E.split, D.split, F.split)

        init = functools.partial(expert_initializer, internal_gshard_variance_scaling_fan_in_init)
        gate = self.dims(input_dims, num_experts, of="gate")
        self.gate = self.weight(gate, init=init(False, input_dims), rngs=rngs)
        self.gate_correction = (
            self.weight((num_experts,), init=zeros, rngs=rngs)
            if self.gating.score_func == "sigmoid" else None
        )
        # As the router's, model dims of all layers: they may split over the experts' axis, too.
        self.shared_experts = SharedExperts(
            gate[0] if gate[0].is_explicit else D, sized(F, num_shared_experts * hidden_dims),
            activation, use_gated_activation, rngs,
        ) if num_shared_experts else None

        self.has_bias, self.swiglu_limit = has_bias, swiglu_limit
        self.swiglu_alpha = swiglu_alpha

        def bias(*dims: int) -> nnx.Param | None:
            return self.weight(dims, init=zeros, matrix=NONE, rngs=rngs) if has_bias else None

        self.gate_bias = bias(num_experts)
        self.bi_0 = bias(E, F)
        self.bi_gate_0 = bias(E, F) if use_gated_activation else None
        self.bo_0 = bias(E, D)

        def of_experts(fan_in: int, fan_out: int) -> nnx.Param:
            drawn = init(explicit_fan_in_fan_out_axes, int(fan_in))
            dims, matrix = (E, fan_in, fan_out), Matrix((1,), (2,))
            return self.weight(dims, init=drawn, matrix=matrix, rngs=rngs)

        self.wi_gate_0 = of_experts(D, F) if use_gated_activation else None
        self.wi_0, self.wo_0 = of_experts(D, F), of_experts(F, D)

        self.aux_moe_load_balance_loss = AuxLoss(jnp.zeros(()))
        has_z_loss = self.gating.moe_router_z_loss_weight > 0.0
        self.aux_moe_router_z_loss = AuxLoss(jnp.zeros(())) if has_z_loss else None
        self.expert_choices = Tally(
            jnp.zeros(num_experts), moves="gate_correction", rule=BiasUpdate(bias_update_rate)
        ) if bias_update_rate else None
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

        if self.apply_padding_first:
            inputs = jnp.where(is_token_BT[..., None], inputs, 0)
        outputs = self._with_branch(inputs, experts, residual_key, droppath_key, key)
        return constrain(outputs, self.activation_split_dims_mapping)

    def _experts(
        self, x_BTD: jax.Array, is_token_BT: jax.Array, segment_ids_BT: jax.Array | None,
        routing_key: jax.Array | None, relu_key: jax.Array | None,
    ) -> jax.Array:
        """Returns the gated sum of what each token's experts make of it, [B, T, D]."""
        gating, groups = self.gating, self.gating.groups_of(*x_BTD.shape[:2])
        x_GSD = self._at_tokens(reshaped(x_BTD, (*groups, x_BTD.shape[-1])))
        routed_by = x_GSD
        if self.is_by_sentence:
            segments = is_token_BT.astype(int) if segment_ids_BT is None else segment_ids_BT
            routed_by = reshaped(sentence_means(x_BTD, segments), x_GSD.shape)
        # Whole on every device, small as it is: XLA would move parts of it and of the logits.
        gate_DE = constrain(self.gate[...].astype(x_BTD.dtype), (None, None))
        logits_GSE = einsum(
            "gsd,de->gse", routed_by, gate_DE, preferred_element_type=jnp.float32
        )
        if self.gate_bias is not None:
            logits_GSE += self.gate_bias[...].astype(jnp.float32)[None, None, :]
        weights = {name: getattr(self, name) for name in _OF_EXPERTS}
        shared = {
            "weights": {n: w[...].astype(x_BTD.dtype) for n, w in weights.items() if w is not None},
            "activation": glu(
                activation_fn(self.activation, self), self.swiglu_limit, self.swiglu_alpha
            ),
            "tokens_split": self.activation_split_dims_mapping,
            "weights_split": self.weight_split_dims_mapping,
        }
        in_slots = functools.partial(
            at_experts,
            **shared,
            dropout=lambda hidden_GECF: self.relu_dropout(hidden_GECF, relu_key),
            dispatch_split=self.dispatch_split_dims_mapping,
            hidden_split=self.hidden_split_dims_mapping,
        )
        has_token_B1 = is_token_BT.any(axis=1, keepdims=True)
        is_in_row_BT = jnp.broadcast_to(has_token_B1, is_token_BT.shape)
        is_token_GS, is_in_row_GS = (
            reshaped(is_it_BT, groups) for is_it_BT in (is_token_BT, is_in_row_BT)
        )
        tokens = Tokens(x_GSD, logits_GSE, is_token_GS, is_in_row_GS)
        if gating.is_top_k:
            outputs, report = gating.top_k(
                tokens,
                routing_key,
                functools.partial(dropless, **shared, kernel=self.expert_kernel),
                in_slots,
                # With one token per row, as in decoding, no row may take another's slot.
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
        outputs = reshaped(self._at_tokens(outputs), x_BTD.shape)
        return outputs if self.shared_experts is None else outputs + self.shared_experts(x_BTD)

    def _at_tokens(self, x: jax.Array) -> jax.Array:
        return constrain(x, first_dim(self.activation_split_dims_mapping))


class SharedExperts(BaseLayer):
    """A feed-forward without norm and skip connection: [B, T, D] -> [B, T, D].

    Args:
      input_dims, hidden_dims: D, F.
      activation: of the hidden activations, or of the gate.
      is_gated: the hidden activations are multiplied by an activated gate.
    """

    def __init__(
        self, input_dims: int, hidden_dims: int, activation: str | ActivationFn, is_gated: bool,
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
