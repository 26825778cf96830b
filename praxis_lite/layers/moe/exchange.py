"""Sends tokens to the devices of their experts with all-to-alls, in one or more rounds.

Loads are unknown at compile time, but array sizes are static. Arrays for the worst load, in which
one device receives all tokens, would be X times larger than arrays for even loads. Instead, each
device has C slots for each other device, slightly more than even loads need, and sends tokens in
rounds: one round for even loads, X / SLACK rounds for the worst load. No choice is dropped. The
first round is outside the loop over rounds, so that its communication can overlap with other work.

Each round sends X C tokens of size D with the indices of their experts, and returns the same number
of outputs. The backward pass sends the tokens again, together with the gradients of their outputs,
and returns the gradients of the tokens. Rounds save no residuals: the backward pass recomputes the
experts' matmuls.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.core.jaxprs import EXTRA_ROUNDS
from praxis_lite.layers.moe.dispatch import combine, dispatch, positions_in_expert
from praxis_lite.layers.moe.experts import Weights

__all__ = ("SLACK",)

# n tokens per device, K experts per token, X devices over which experts are sharded, C slots per
# pair of devices, N = X x C, D model dims, L experts per device.
PyTree = Any
SLACK = 1.25  # Ratio of slots to choices if all loads are equal.
# Takes (rows [N, D], experts [N, 1], gates [N, 1], weights), and returns the gated outputs of this
# device's experts.
LocalExperts = Callable[[jax.Array, jax.Array, jax.Array, Weights], jax.Array]


class Exchange(NamedTuple):
    """The group of devices that send tokens to each other.

    Attributes:
      axes: Mesh axes over which the experts are sharded.
      num_shards: X.
      all_axes: All manual axes of the `jax.shard_map`. All devices along them run the same number
        of rounds.
    """

    axes: tuple[str, ...]
    num_shards: int
    all_axes: tuple[str, ...]

    def swap(self, x_NM: jax.Array) -> jax.Array:
        """Exchanges rows [N, M] with the other devices, C rows with each."""
        x_XCM = x_NM.reshape(self.num_shards, -1, *x_NM.shape[1:])
        return jax.lax.all_to_all(x_XCM, self.axes, 0, 0).reshape(x_NM.shape)

    def num_slots(self, num_choices: int, max_slots: int) -> int:
        """Returns C, the number of slots per pair of devices.

        Args:
          num_choices: Number of choices on a device.
          max_slots: Maximum number of these choices that can go to the same device.
        """
        even = -(-num_choices // self.num_shards)
        return max(1, min(max_slots, -(-int(even * SLACK) // 8) * 8))


def exchange_in_rounds(
    local_experts: LocalExperts,
    exchange: Exchange,
    x_nD: jax.Array,
    gates_nK: jax.Array,
    weights: Weights,
    experts_nK: jax.Array,
) -> jax.Array:
    """Computes the gated sum of each token's expert outputs, [n, D].

    Must be called inside a `jax.shard_map` with check_vma=False. The choices that a device sends to
    the same device are numbered; round r sends choices r C to (r + 1) C - 1.

    Args:
      local_experts: Computes the outputs of this device's experts; 0 for rows with a gate of 0.
      exchange: The group of devices that exchange tokens.
      x_nD: Tokens.
      gates_nK: Gates; choices with a gate of 0 are not sent.
      weights: Weights of this device's experts.
      experts_nK: Indices of the chosen experts, counted over all devices.
    """
    num_local = next(iter(weights.values())).shape[0]
    num_tokens, num_chosen = experts_nK.shape
    num_slots = exchange.num_slots(experts_nK.size, num_tokens * min(num_chosen, num_local))
    num_rows = exchange.num_shards * num_slots

    def plan_rounds(gates_nK: jax.Array, experts_nK: jax.Array) -> tuple[Callable, jax.Array]:
        """Returns (slots_of_round, num_rounds).

        `slots_of_round` maps the index of a round to the slot of each choice, [n, K]. A choice that
        is not sent in this round has slot N.
        """
        shard_nK, is_sent_nK = experts_nK // num_local, gates_nK != 0.0
        # Number the choices per target device. A choice with position p is sent in round p // C.
        position_nK = positions_in_expert(shard_nK[None], is_sent_nK[None], exchange.num_shards)[0]
        # The all-to-alls are collective, so all devices run as many rounds as the largest load
        # needs.
        last = jax.lax.pmax(jnp.max(jnp.where(is_sent_nK, position_nK, -1)), exchange.all_axes)

        def slots_of_round(index: jax.Array) -> jax.Array:
            is_now_nK = is_sent_nK & (position_nK // num_slots == index)
            return jnp.where(is_now_nK, shard_nK * num_slots + position_nK % num_slots, num_rows)

        return slots_of_round, last // num_slots + 1

    def in_slots(x_nKM: jax.Array, slots_nK: jax.Array) -> jax.Array:
        """Moves the value of each choice to its slot, [N, 1]; empty slots are 0."""
        return dispatch(x_nKM.reshape(1, -1, 1), slots_nK.reshape(1, -1, 1), num_rows)[0]

    def send(x_nD: jax.Array, experts_nK: jax.Array, slots_nK: jax.Array) -> tuple:
        rows_ND = exchange.swap(dispatch(x_nD[None], slots_nK[None], num_rows)[0])
        # Send expert + 1, so that 0 marks empty slots.
        expert_N1 = exchange.swap(in_slots(experts_nK % num_local + 1, slots_nK))
        is_taken_N1 = (expert_N1 > 0).astype(jnp.float32)
        return rows_ND, jnp.where(expert_N1 > 0, expert_N1 - 1, num_local), is_taken_N1

    def sum_rounds(num_rounds: jax.Array, one_round: Callable[[jax.Array], PyTree]) -> PyTree:
        first = jnp.zeros((), jnp.int32)
        # The carry is the index of the next round, and the sums over all previous rounds.
        carry = first + 1, one_round(first)
        with jax.named_scope(EXTRA_ROUNDS):
            _, sums = jax.lax.while_loop(
                lambda carry: carry[0] < num_rounds,
                lambda carry: (carry[0] + 1, jax.tree.map(jnp.add, carry[1], one_round(carry[0]))),
                carry,
            )
        return sums

    @jax.custom_vjp
    def run(x_nD, gates_nK, weights, experts_nK):
        slots_of_round, num_rounds = plan_rounds(gates_nK, experts_nK)

        def one_round(index: jax.Array) -> jax.Array:
            slots_nK = slots_of_round(index)
            rows_ND, expert_N1, is_taken_N1 = send(x_nD, experts_nK, slots_nK)
            # The experts' devices compute with gates of 1. The sender applies the gates to the
            # outputs.
            y_ND = exchange.swap(local_experts(rows_ND, expert_N1, is_taken_N1, weights))
            return combine(y_ND[None], slots_nK[None], gates_nK[None])[0]

        return sum_rounds(num_rounds, one_round)

    def forward(*args):
        return run(*args), args

    def backward(args, grad_nD):
        x_nD, gates_nK, weights, experts_nK = args
        # Prevent XLA from saving the tokens received in the first round of the forward pass.
        x_nD, experts_nK = jax.lax.optimization_barrier((x_nD, experts_nK))
        slots_of_round, num_rounds = plan_rounds(gates_nK, experts_nK)

        def one_round(index: jax.Array) -> tuple:
            slots_nK = slots_of_round(index)
            rows_ND, experts_N1, is_taken_N1 = send(x_nD, experts_nK, slots_nK)
            gate_N1 = exchange.swap(in_slots(gates_nK, slots_nK))
            grad_ND = exchange.swap(dispatch(grad_nD[None], slots_nK[None], num_rows)[0])
            # The output is the sum of gate x y: the gradient of y is gate x grad, and the gradient
            # of the gate is the dot product of y and grad.
            y_ND, vjp = jax.vjp(
                lambda rows, weights: local_experts(rows, experts_N1, is_taken_N1, weights),
                rows_ND,
                weights,
            )
            grad_rows_ND, grad_weights = vjp((grad_ND * gate_N1).astype(y_ND.dtype))
            grad_gate_N1 = jnp.sum(
                y_ND.astype(jnp.float32) * grad_ND.astype(jnp.float32), axis=1, keepdims=True
            )
            grad_rows_ND, grad_gate_N1 = exchange.swap(grad_rows_ND), exchange.swap(grad_gate_N1)
            # grad_rows already contains the gates.
            ones_nK = jnp.ones_like(gates_nK)
            grad_gates_nK = jnp.take(grad_gate_N1[:, 0], slots_nK, mode="fill", fill_value=0)
            return (
                combine(grad_rows_ND[None], slots_nK[None], ones_nK[None])[0],
                grad_gates_nK.astype(gates_nK.dtype),
                grad_weights,
            )

        return *sum_rounds(num_rounds, one_round), None

    run.defvjp(forward, backward)
    return run(x_nD, gates_nK, weights, experts_nK)
