"""Chooses each token's experts, and computes the router's losses; pure functions of arrays.

Each group of tokens is routed separately. GShard, arXiv:2006.16668; Switch, arXiv:2101.03961;
ST-MoE, arXiv:2202.08906; expert choice, arXiv:2202.09368. The numerics are Pax's.
"""

import dataclasses

import jax
import jax.numpy as jnp

# G groups, S tokens per group, E experts, K experts per token, C slots per expert and group.


def expert_capacity(
    group_size: int, num_experts: int, capacity_factor: float, capacity_dim: int
) -> int:
    """Returns C, the maximum number of tokens that an expert processes from each group.

    As in Pax, C is the larger of `capacity_dim` and factor x S / E, rounded up to a multiple of 4.
    Unlike in Pax, C is at least 1, and at most S, because a token chooses an expert only once.
    """
    automatic = int(group_size * capacity_factor / num_experts)
    if automatic > capacity_dim:
        capacity_dim = -(-automatic // 4) * 4
    return min(max(capacity_dim, 1), group_size)


def choose_experts(
    logits_GSE: jax.Array,
    is_token_GS: jax.Array,
    key: jax.Array | None,
    num_chosen: int,
    second_expert_policy: str,
    second_expert_threshold: float,
    normalize_gates: bool = True,
    over_chosen: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Chooses each token's experts.

    Args:
      logits_GSE: Router logits.
      is_token_GS: False for padding, which is not routed.
      key: Random key in training. If None, the most probable experts are chosen.
      num_chosen: K.
      second_expert_policy: Pax's "all", "sampling" or "random".
      second_expert_threshold: See `is_second_expert_used`.
      normalize_gates: Whether to normalize a token's gates to sum to 1. If False, the gates are the
        probabilities.
      over_chosen: Whether to compute the gates as a softmax over the chosen experts' logits. The
        result equals normalized gates, but other experts get gradients of exactly 0 instead of
        rounding errors, which Adam would turn into steps.

    Returns:
      (experts, gates, whether each choice is used), all [G, S, K].
    """
    probs_GSE = jax.nn.softmax(logits_GSE, axis=-1)
    if key is not None and second_expert_policy == "sampling":
        experts_GSK, gates_GSK = sampled_second_expert(logits_GSE, probs_GSE, is_token_GS, key)
    else:
        experts_GSK, gates_GSK = top_k_experts(probs_GSE, is_token_GS, num_chosen)
    # Two settings replace these gates.
    if not normalize_gates:
        gates_GSK = jnp.take_along_axis(probs_GSE, experts_GSK, axis=-1)
        gates_GSK = jnp.where(is_token_GS[..., None], gates_GSK, 0.0)
    elif over_chosen:
        chosen_GSK = jnp.take_along_axis(logits_GSE, experts_GSK, axis=-1)
        gates_GSK = jnp.where(is_token_GS[..., None], jax.nn.softmax(chosen_GSK, axis=-1), 0.0)
    is_routed_GSK = jnp.broadcast_to(is_token_GS[..., None], gates_GSK.shape)
    if key is not None and second_expert_policy == "random":
        is_routed_GSK &= is_second_expert_used(gates_GSK, second_expert_threshold, key)
    return experts_GSK, gates_GSK, is_routed_GSK


def top_k_experts(
    probs_GSE: jax.Array, is_token_GS: jax.Array, num_chosen: int
) -> tuple[jax.Array, jax.Array]:
    """Returns int32 experts [G, S, K], most probable first, and their gates [G, S, K].

    A token's gates sum to 1. For K = 1, the gate is the probability, as in Switch, because a gate
    of 1 would give the router no gradient. Gates for padding are 0.
    """
    experts_GSK, gates_GSK = _best_of(probs_GSE, probs_GSE, num_chosen)
    return experts_GSK, _normalized(gates_GSK, is_token_GS)


def experts_by_group(
    logits_GSE: jax.Array,
    correction_E: jax.Array,
    is_token_GS: jax.Array,
    num_chosen: int,
    num_groups: int,
    num_chosen_groups: int,
    gates_scale: float,
    normalize_gates: bool,
) -> tuple[jax.Array, jax.Array]:
    """Chooses experts and gates [G, S, K] like DeepSeek-V3 (arXiv:2412.19437, section 2.1).

    Experts are scored by sigmoids. To balance loads, a correction is added to the scores by which
    experts are chosen, but not to the gates. First the best groups of experts are selected by the
    sum of the two best scores in each group, then the best experts within these groups.

    Args:
      logits_GSE: Router logits.
      correction_E: Correction of the scores.
      is_token_GS: False for padding, which is not routed.
      num_chosen: K.
      num_groups: Number of groups of consecutive experts.
      num_chosen_groups: Number of groups to select.
      gates_scale: Factor that multiplies the gates, after normalization.
      normalize_gates: Whether to divide the gates by their sum.
    """
    scores_GSE = jax.nn.sigmoid(logits_GSE)
    correction_E = jax.lax.stop_gradient(correction_E.astype(jnp.float32))
    choice_GSE = scores_GSE + correction_E[None, None, :]
    if num_chosen_groups < num_groups:
        in_groups = choice_GSE.reshape(*choice_GSE.shape[:2], num_groups, -1)
        _, best, rest = _best(in_groups, in_groups)
        # `rest` is -inf for the best expert, so this adds the second-best score.
        score_of_group = best + jnp.max(rest, axis=-1)
        is_selected = jnp.zeros(score_of_group.shape, bool)
        for _ in range(num_chosen_groups):
            chosen = jnp.argmax(jnp.where(is_selected, -jnp.inf, score_of_group), axis=-1)
            is_selected |= jax.nn.one_hot(chosen, num_groups, dtype=bool)
        is_selected = is_selected[..., None]
        choice_GSE = jnp.where(is_selected, in_groups, -jnp.inf).reshape(choice_GSE.shape)
    experts_GSK, gates_GSK = _best_of(scores_GSE, choice_GSE, num_chosen)
    if normalize_gates:
        gates_GSK /= jnp.sum(gates_GSK, axis=-1, keepdims=True) + 1e-20
    return experts_GSK, jnp.where(is_token_GS[..., None], gates_GSK * gates_scale, 0.0)


def sampled_second_expert(
    logits_GSE: jax.Array, probs_GSE: jax.Array, is_token_GS: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns experts and gates like `top_k_experts` for K = 2, but samples the second expert.

    This is Pax's second_expert_policy "sampling", with the Gumbel-max trick.
    """
    first_GS, gate_GS, rest_GSE = _best(probs_GSE, probs_GSE)
    noised_GSE = logits_GSE + jax.random.gumbel(key, logits_GSE.shape, logits_GSE.dtype)
    second_GS, second_gate_GS, _ = _best(probs_GSE, jnp.where(rest_GSE < 0.0, -jnp.inf, noised_GSE))
    gates_GSK = jnp.stack([gate_GS, second_gate_GS], -1)
    return jnp.stack([first_GS, second_GS], -1), _normalized(gates_GSK, is_token_GS)


def _best_of(
    probs_GSE: jax.Array, scores_GSE: jax.Array, num_chosen: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the experts with the highest scores [G, S, K], best first, and their gates."""
    experts, gates = [], []
    # Avoid jax.lax.top_k, a sort that some backends do not partition; K is small.
    for _ in range(num_chosen):
        expert_GS, gate_GS, scores_GSE = _best(probs_GSE, scores_GSE)
        experts.append(expert_GS)
        gates.append(gate_GS)
    return jnp.stack(experts, -1), jnp.stack(gates, -1)


def _best(probs_GSE: jax.Array, scores_GSE: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the best expert [G, S], its probability, and the scores without this expert.

    In the returned scores [G, S, E], the expert's score is -inf.
    """
    expert_GS = jnp.argmax(scores_GSE, axis=-1).astype(jnp.int32)
    is_best_GSE = jax.nn.one_hot(expert_GS, probs_GSE.shape[-1], dtype=bool)
    gate_GS = jnp.sum(jnp.where(is_best_GSE, probs_GSE, 0.0), axis=-1)
    return expert_GS, gate_GS, jnp.where(is_best_GSE, -jnp.inf, scores_GSE)


def _normalized(gates_GSK: jax.Array, is_token_GS: jax.Array) -> jax.Array:
    if gates_GSK.shape[-1] > 1:
        gates_GSK /= jnp.sum(gates_GSK, axis=-1, keepdims=True) + 1e-9
    return jnp.where(is_token_GS[..., None], gates_GSK, 0.0)


def is_second_expert_used(gates_GSK: jax.Array, threshold: float, key: jax.Array) -> jax.Array:
    """Returns bool [G, S, 2]: True for first experts, sampled for second experts.

    A second expert is used with probability min(1, gate / threshold). This is Pax's
    second_expert_policy "random", whose threshold is 0, so that nearly all second experts are used.
    """
    gate_GS = gates_GSK[..., 1]
    used_GS = jax.random.uniform(key, gate_GS.shape) < gate_GS / max(threshold, 1e-9)
    return jnp.stack([jnp.ones_like(used_GS), used_GS], -1)


def top_two_gates(probs_GSE: jax.Array) -> jax.Array:
    """Returns gates [G, S, E] that sum to 1 over the two most probable experts; others are 0."""
    best = jnp.max(probs_GSE, axis=-1, keepdims=True)
    second = jnp.max(jnp.where(probs_GSE < best, probs_GSE, 0.0), axis=-1, keepdims=True)
    gates_GSE = jnp.where(probs_GSE >= second, probs_GSE, 0.0)
    return gates_GSE / (jnp.sum(gates_GSE, axis=-1, keepdims=True) + 1e-12)


def tokens_by_expert_choice(scores_GSE: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Returns the C tokens [G, E, C] with the highest scores for each expert, and their scores."""
    scores_GEC, tokens_GEC = jax.lax.top_k(scores_GSE.swapaxes(1, 2), capacity)
    return tokens_GEC, scores_GEC


def load_balance_loss(
    probs_GSE: jax.Array,
    first_expert_GS: jax.Array,
    is_token_GS: jax.Array,
    is_in_row_GS: jax.Array,
) -> jax.Array:
    """Returns Switch's load-balancing loss (arXiv:2101.03961, eq. 4), a float32 scalar.

    It is E x sum over experts of (fraction of first choices x mean probability), averaged over
    groups. It is 1, the minimum, if experts are chosen equally often. As in Pax, means include
    padding tokens. They exclude rows that contain only padding, because the loss would otherwise
    depend on the number of these rows.

    Args:
      probs_GSE: Router probabilities.
      first_expert_GS: First choice of each token.
      is_token_GS: False for padding.
      is_in_row_GS: False in rows that contain only padding.
    """
    num_experts = probs_GSE.shape[-1]
    is_token = is_token_GS[..., None].astype(jnp.float32)
    num_positions_G = jnp.sum(is_in_row_GS.astype(jnp.float32), axis=1)
    positions_G1 = jnp.maximum(num_positions_G, 1.0)[:, None]
    choices_GSE = jax.nn.one_hot(first_expert_GS, num_experts) * is_token
    share_GE = jnp.sum(choices_GSE, axis=1) / positions_G1
    prob_GE = jnp.sum(probs_GSE * is_token, axis=1) / positions_G1
    # The mean over E, times E^2, is the sum over E, times E.
    loss_G = jnp.mean(share_GE * prob_GE, axis=1) * num_experts**2
    return jnp.sum(loss_G * num_positions_G) / jnp.maximum(jnp.sum(num_positions_G), 1.0)


def router_z_loss(logits_GSE: jax.Array, is_token_GS: jax.Array) -> jax.Array:
    """Returns the mean over tokens of logsumexp(logits)^2 (arXiv:2202.08906, eq. 5)."""
    z_GS = jnp.square(jax.nn.logsumexp(logits_GSE, axis=-1))
    is_token = is_token_GS.astype(jnp.float32)
    return jnp.sum(z_GS * is_token) / jnp.maximum(jnp.sum(is_token), 1.0)


def expert_choices(experts_GSK: jax.Array, is_routed_GSK: jax.Array, num_experts: int) -> jax.Array:
    """Returns how often each expert was chosen, float32 [E], before any choice is dropped."""
    one_hot = jax.nn.one_hot(experts_GSK, num_experts) * is_routed_GSK[..., None]
    return jnp.sum(one_hot, axis=(0, 1, 2))


def expert_load(choices_E: jax.Array) -> jax.Array:
    """Returns how often each expert was chosen, relative to the mean over experts, [E]."""
    return choices_E * choices_E.size / jnp.maximum(jnp.sum(choices_E), 1.0)


@dataclasses.dataclass(frozen=True)
class BiasUpdate:
    """Balances expert loads without a loss (arXiv:2408.15664).

    After each step, an expert's correction increases by `rate` if the expert was chosen less often
    than the mean in the step's batch, and decreases by `rate` if it was chosen more often.

    Attributes:
      rate: Change per step; 0.001 in DeepSeek-V3.
    """

    rate: float

    def __call__(self, correction_E: jax.Array, choices_E: jax.Array) -> jax.Array:
        """Returns the correction after a step; both arguments are [..., E]."""
        # Avoid the mean: if loads are equal, its rounding error would decide the sign.
        deficit_E = jnp.sum(choices_E, -1, keepdims=True) - choices_E * choices_E.shape[-1]
        return correction_E + self.rate * jnp.sign(deficit_E).astype(correction_E.dtype)


def sentence_means(inputs_BTD: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Returns the mean over each token's segment, [B, T, D]; 0 for segment 0.

    See arXiv:2110.03742, section 3.1. Segment ids must be at most T.
    """

    def means_of_row(x_TD: jax.Array, segment_ids_T: jax.Array) -> jax.Array:
        num_segments = x_TD.shape[0] + 1
        total = jax.ops.segment_sum(x_TD, segment_ids_T, num_segments=num_segments)
        count = jnp.bincount(segment_ids_T, length=num_segments)[:, None]
        mean = total / jnp.maximum(count, 1).astype(total.dtype)
        return jnp.where(segment_ids_T[:, None] == 0, 0, mean[segment_ids_T])

    return jax.vmap(means_of_row)(inputs_BTD, segment_ids_BT)
