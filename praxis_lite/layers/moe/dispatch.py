"""Moves tokens into the experts' slots and back; pure functions of arrays.

An expert has C slots (its capacity) for each group of tokens. Choices beyond the capacity are
dropped.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

# G groups, S tokens per group, D model dims, E experts, K experts per token, C slots per expert and
# group, N = E x C slots per group.

# Takes tokens in slots [G, E, C, D], and returns the experts' outputs [G, E, C, D].
ApplyExperts = Callable[[jax.Array], jax.Array]


def slots_of(
    experts_GSK: jax.Array, is_routed_GSK: jax.Array, num_experts: int, capacity: int
) -> jax.Array:
    """Returns the slot for each choice, [G, S, K]: expert x C + position, or N if dropped."""
    position = positions_in_expert(experts_GSK, is_routed_GSK, num_experts)
    has_slot = is_routed_GSK & (position < capacity)
    return jnp.where(has_slot, experts_GSK * capacity + position, num_experts * capacity)


def positions_in_expert(
    experts_GSK: jax.Array, is_routed_GSK: jax.Array, num_experts: int
) -> jax.Array:
    """Returns each choice's position among all choices of the same expert, [G, S, K].

    All first choices precede all second choices; within these, tokens keep their order.
    """
    num_groups, group_size, num_chosen = experts_GSK.shape
    # Swap to [G, K x S], so that all first choices precede all second choices.
    flat_shape = (num_groups, num_chosen * group_size)
    expert = experts_GSK.swapaxes(1, 2).reshape(flat_shape)
    is_routed = is_routed_GSK.swapaxes(1, 2).reshape(flat_shape)
    one_hot = jax.nn.one_hot(expert, num_experts, dtype=jnp.int32) * is_routed[..., None]
    position = jnp.sum((jnp.cumsum(one_hot, axis=1) - one_hot) * one_hot, axis=-1)
    return position.reshape(num_groups, num_chosen, group_size).swapaxes(1, 2)


def dispatch(x_GSD: jax.Array, slots_GSK: jax.Array, num_slots: int) -> jax.Array:
    """Gathers tokens into their slots, [G, N, D]; empty slots are filled with zeros."""
    choice_GN = _choice_in_slot(slots_GSK, num_slots)
    return _gather_rows(x_GSD, choice_GN // slots_GSK.shape[-1], slots_GSK)


def combine(y_GND: jax.Array, slots_GSK: jax.Array, gates_GSK: jax.Array) -> jax.Array:
    """Returns the gate-weighted sum of each token's expert outputs, [G, S, D]."""
    num_groups, group_size, num_chosen = slots_GSK.shape
    choice_GN = _choice_in_slot(slots_GSK, y_GND.shape[1])
    y = _gather_rows(y_GND, slots_GSK.reshape(num_groups, -1), choice_GN[..., None])
    y_GSKD = y.reshape(num_groups, group_size, num_chosen, -1)
    return jnp.einsum("gskd,gsk->gsd", y_GSKD, gates_GSK.astype(y_GND.dtype))


def _choice_in_slot(slots_GSK: jax.Array, num_slots: int) -> jax.Array:
    """Returns the choice in each slot, [G, N]: token x K + k, or S x K for empty slots."""

    def scatter_choices(slots_SK: jax.Array) -> jax.Array:
        empty = jnp.full(num_slots, slots_SK.size, jnp.int32)
        choices = jnp.arange(slots_SK.size, dtype=jnp.int32)
        return empty.at[slots_SK.reshape(-1)].set(choices, mode="drop")

    return jax.vmap(scatter_choices)(slots_GSK)


@jax.custom_vjp
def _gather_rows(x_GRD: jax.Array, index_GM: jax.Array, index_back_GRJ: jax.Array) -> jax.Array:
    """Gathers rows of x by index, [G, M, D]; an index of R or more gives zeros.

    `index_back` lists the positions (at most J) in M to which each row of x is copied. With it, the
    gradient is a sum of J gathers instead of a scatter, which is slow and nondeterministic.
    """
    del index_back_GRJ
    return jnp.take_along_axis(x_GRD, index_GM[..., None], axis=1, mode="fill", fill_value=0)


def _gather_rows_fwd(x_GRD: jax.Array, index_GM: jax.Array, index_back_GRJ: jax.Array) -> tuple:
    return _gather_rows(x_GRD, index_GM, index_back_GRJ), index_back_GRJ


def _gather_rows_bwd(index_back_GRJ: jax.Array, grad_GMD: jax.Array) -> tuple:
    grads = (
        jnp.take_along_axis(grad_GMD, index[..., None], axis=1, mode="fill", fill_value=0)
        for index in jnp.moveaxis(index_back_GRJ, -1, 0)
    )
    return sum(grads), None, None


_gather_rows.defvjp(_gather_rows_fwd, _gather_rows_bwd)


def route_through_slots(
    x_GSD: jax.Array,
    experts_GSK: jax.Array,
    gates_GSK: jax.Array,
    is_routed_GSK: jax.Array,
    slots: tuple[int, int],
    apply_experts: ApplyExperts,
) -> tuple[jax.Array, jax.Array]:
    """Sends tokens through their experts' slots.

    Args:
      x_GSD: Tokens.
      experts_GSK: Chosen experts, from `routing.choose_experts`.
      gates_GSK: Gates of the chosen experts.
      is_routed_GSK: Whether each choice is used.
      slots: (number of experts E, slots per expert C).
      apply_experts: Computes the outputs of experts for tokens in slots.

    Returns:
      The gated sum over each token's experts, [G, S, D], and the fraction of choices that were
      dropped.
    """
    num_slots = math.prod(slots)
    slots_GSK = slots_of(experts_GSK, is_routed_GSK, *slots)
    num_routed = jnp.sum(is_routed_GSK)
    num_dropped = num_routed - jnp.sum(slots_GSK < num_slots)
    x_GND = dispatch(x_GSD, slots_GSK, num_slots)
    y_GECD = apply_experts(x_GND.reshape(x_GND.shape[0], *slots, -1))
    outputs = combine(y_GECD.reshape(x_GND.shape), slots_GSK, gates_GSK)
    return outputs, num_dropped / jnp.maximum(num_routed, 1)


def route_expert_choice(
    x_GSD: jax.Array, tokens_GEC: jax.Array, gates_GEC: jax.Array, apply_experts: ApplyExperts
) -> jax.Array:
    """Sends tokens through the experts that chose them.

    Args:
      x_GSD: Tokens.
      tokens_GEC: Chosen tokens, from `routing.tokens_by_expert_choice`.
      gates_GEC: Gates of the chosen tokens.
      apply_experts: Computes the outputs of experts for tokens in slots.

    Returns:
      The gated sum over the experts that chose each token, [G, S, D].
    """
    tokens_GN, gates_GN = (x.reshape(x.shape[0], -1) for x in (tokens_GEC, gates_GEC))
    x_GND = jnp.take_along_axis(x_GSD, tokens_GN[..., None], axis=1)
    y_GND = apply_experts(x_GND.reshape(*tokens_GEC.shape, -1)).reshape(x_GND.shape)

    # A token that several experts chose receives the sum of their outputs.
    def scatter_add(y_ND: jax.Array, tokens_N: jax.Array) -> jax.Array:
        return jnp.zeros(x_GSD.shape[1:], y_ND.dtype).at[tokens_N].add(y_ND)

    return jax.vmap(scatter_add)(y_GND * gates_GN[..., None].astype(y_GND.dtype), tokens_GN)
