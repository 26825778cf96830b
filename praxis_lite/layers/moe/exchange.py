"""All-to-all exchange of tokens with the devices of their experts, in as many turns as needed.

Loads are unknown at compile time, and array sizes are static. Arrays for the worst load, all tokens
to one device, would be X times larger than even loads need. So each device has C slots for choices
of experts on each other device, a little more than even loads need, and tokens are sent in turns.
Even loads take one turn, the worst load X / SLACK. No choice is dropped. The first turn is outside
of the loop over turns, so that other work can overlap with its communication.

A turn sends X C rows of D and returns as many, and an integer for each; the backward pass sends
them and the gradients of their outputs, and returns the gradients of the rows. No residuals of a
turn are saved: the backward pass recomputes the experts' products.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.core.jaxprs import EXTRA_ROUNDS
from praxis_lite.layers.moe.dispatch import combine, dispatch, places_of
from praxis_lite.layers.moe.experts import Weights

__all__ = ("SLACK",)

# n tokens of a device, K experts of a token, X devices that experts are split over, C slots on a
# device for choices of experts on another, N = X x C, D model dims, L experts of a device.
PyTree = Any
SLACK = 1.25  # Slots per choice if loads are even.
# (rows [N, D], experts [N, 1], gates [N, 1], weights) -> gated outputs of this device's experts.
AtOwn = Callable[[jax.Array, jax.Array, jax.Array, Weights], jax.Array]


class Exchange(NamedTuple):
    """The devices that exchange tokens.

    Attributes:
      axes: mesh axes that split the experts.
      num_shards: X.
      all_axes: all manual axes of the `jax.shard_map`; their devices take the same number of turns.
    """

    axes: tuple[str, ...]
    num_shards: int
    all_axes: tuple[str, ...]

    def swap(self, x_NM: jax.Array) -> jax.Array:
        """Returns the rows [N, M] that the other devices have for this one."""
        x_XCM = x_NM.reshape(self.num_shards, -1, *x_NM.shape[1:])
        return jax.lax.all_to_all(x_XCM, self.axes, 0, 0).reshape(x_NM.shape)

    def num_slots(self, num_choices: int, most: int) -> int:
        """Returns C, given a device's number of choices and the most for one other device."""
        even = -(-num_choices // self.num_shards)
        return max(1, min(most, -(-int(even * SLACK) // 8) * 8))


def in_turns(
    at_own: AtOwn, over: Exchange, x_nD: jax.Array, gates_nK: jax.Array, weights: Weights,
    experts_nK: jax.Array,
) -> jax.Array:
    """Returns for each token the gated sum of its experts' outputs, [n, D].

    Called inside a `jax.shard_map` with check_vma=False.

    Args:
      at_own: computes the outputs of a device's experts; 0 for rows with a gate of 0.
      experts_nK: indices among the experts of all devices; choices with a gate of 0 are not sent.
      weights: of this device's experts.
    """
    num_local = next(iter(weights.values())).shape[0]
    num_tokens, num_chosen = experts_nK.shape
    num_slots = over.num_slots(experts_nK.size, num_tokens * min(num_chosen, num_local))
    num_rows = over.num_shards * num_slots

    def turns_of(gates_nK: jax.Array, experts_nK: jax.Array) -> tuple[Callable, jax.Array]:
        """Returns a function from a turn to each choice's slot, N for none, and the turns."""
        shard_nK, goes_nK = experts_nK // num_local, gates_nK != 0.0
        place_nK = places_of(shard_nK[None], goes_nK[None], over.num_shards)[0]
        last = jax.lax.pmax(jnp.max(jnp.where(goes_nK, place_nK, -1)), over.all_axes)

        def slots_of_turn(turn: jax.Array) -> jax.Array:
            is_now_nK = goes_nK & (place_nK // num_slots == turn)
            return jnp.where(is_now_nK, shard_nK * num_slots + place_nK % num_slots, num_rows)

        return slots_of_turn, last // num_slots + 1

    def in_slots(x_nKM: jax.Array, slots_nK: jax.Array) -> jax.Array:
        """Returns the value of the choice in each slot, [N, 1]; 0 for an empty slot."""
        return dispatch(x_nKM.reshape(1, -1, 1), slots_nK.reshape(1, -1, 1), num_rows)[0]

    def sent(x_nD: jax.Array, experts_nK: jax.Array, slots_nK: jax.Array) -> tuple:
        rows_ND = over.swap(dispatch(x_nD[None], slots_nK[None], num_rows)[0])
        # Expert + 1: an empty slot has 0.
        expert_N1 = over.swap(in_slots(experts_nK % num_local + 1, slots_nK))
        is_taken_N1 = (expert_N1 > 0).astype(jnp.float32)
        return rows_ND, jnp.where(expert_N1 > 0, expert_N1 - 1, num_local), is_taken_N1

    def summed(num_turns: jax.Array, turn: Callable[[jax.Array], PyTree]) -> PyTree:
        first = jnp.zeros((), jnp.int32)
        sums = first + 1, turn(first)
        with jax.named_scope(EXTRA_ROUNDS):
            _, result = jax.lax.while_loop(
                lambda carry: carry[0] < num_turns,
                lambda carry: (carry[0] + 1, jax.tree.map(jnp.add, carry[1], turn(carry[0]))),
                sums,
            )
        return result

    @jax.custom_vjp
    def run(x_nD, gates_nK, weights, experts_nK):
        slots_of_turn, num_turns = turns_of(gates_nK, experts_nK)

        def turn(index: jax.Array) -> jax.Array:
            slots_nK = slots_of_turn(index)
            y_ND = over.swap(at_own(*sent(x_nD, experts_nK, slots_nK), weights))
            return combine(y_ND[None], slots_nK[None], gates_nK[None])[0]

        return summed(num_turns, turn)

    def forward(*args):
        return run(*args), args

    def backward(args, grad_nD):
        x_nD, gates_nK, weights, experts_nK = args
        # Otherwise XLA might save the tokens received in the forward pass's first turn.
        x_nD, experts_nK = jax.lax.optimization_barrier((x_nD, experts_nK))
        slots_of_turn, num_turns = turns_of(gates_nK, experts_nK)

        def turn(index: jax.Array) -> tuple:
            slots_nK = slots_of_turn(index)
            rows_ND, experts_N1, is_taken_N1 = sent(x_nD, experts_nK, slots_nK)
            gate_N1 = over.swap(in_slots(gates_nK, slots_nK))
            grad_ND = over.swap(dispatch(grad_nD[None], slots_nK[None], num_rows)[0])
            y_ND, pulled_back = jax.vjp(
                lambda rows, weights: at_own(rows, experts_N1, is_taken_N1, weights),
                rows_ND, weights,
            )
            of_rows_ND, of_weights = pulled_back((grad_ND * gate_N1).astype(y_ND.dtype))
            of_gate_N1 = jnp.sum(
                y_ND.astype(jnp.float32) * grad_ND.astype(jnp.float32), axis=1, keepdims=True
            )
            of_rows_ND, of_gate_N1 = over.swap(of_rows_ND), over.swap(of_gate_N1)
            ones_nK = jnp.ones_like(gates_nK)
            of_gates_nK = jnp.take(of_gate_N1[:, 0], slots_nK, mode="fill", fill_value=0)
            return (
                combine(of_rows_ND[None], slots_nK[None], ones_nK[None])[0],
                of_gates_nK.astype(gates_nK.dtype), of_weights,
            )

        return *summed(num_turns, turn), None

    run.defvjp(forward, backward)
    return run(x_nD, gates_nK, weights, experts_nK)
