"""Experts without a capacity: each token reaches all its experts, however uneven their load.

Rows are sorted by expert and multiplied group by group (`jax.lax.ragged_dot`; MegaBlocks,
arXiv:2211.15841). Experts split over mesh axes get their tokens by one all-to-all and return the
sums by another.

A program does not know the loads before it runs, and not every backend has a ragged all-to-all, so
the arrays are as large as the worst load needs. Of n tokens on a device, with the experts split
over X devices, a device sends n rows to each of the X and gets X n back; each may go to
min(K, E / X) of its experts. So it holds X n (D + 4 K) values of tokens exchanged, as many of sums,
and X n min(K, E / X) rows of D and of F. `ragged_dot` computes K n of them on average; on CPU,
where it is a masked matmul, all of them for each expert.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from praxis_lite.core.sharding.split_dims import SplitDims
from praxis_lite.layers.base.base_layer import to_multiple
from praxis_lite.layers.moe.dispatch import combine, dispatch
from praxis_lite.layers.moe.experts import Glu, Weights, first_axes, through_experts

# B batch, T time, D model dims, F hidden dims, E experts, L experts on one device, K experts of a
# token, n tokens, X devices that the experts are split over, R rows for experts.


def dropless(
    x_BTD: jax.Array,
    experts_BTK: jax.Array,
    gates_BTK: jax.Array,
    weights: Weights,
    activation: Glu,
    *,
    tokens_split: SplitDims,
    weights_split: SplitDims,
) -> jax.Array:
    """Returns for each token the gated sum of its experts' outputs, [B, T, D].

    Args:
      experts_BTK, gates_BTK: int32 and float32; a choice with a gate of 0 goes nowhere.
      weights: of `through_experts`.
      tokens_split, weights_split: whose first entries are the mesh axes that split B, and E.
    """
    expert_axes = first_axes(weights_split)
    # Tokens must be split where experts are, else each device there would send the same ones.
    token_axes = first_axes(tokens_split)
    token_axes += tuple(axis for axis in expert_axes if axis not in token_axes)
    mesh = jax.sharding.get_abstract_mesh()
    num_token_shards = math.prod(mesh.shape[axis] for axis in token_axes)
    num_expert_shards = math.prod(mesh.shape[axis] for axis in expert_axes)

    def on_device(x_BTD: jax.Array, experts_BTK: jax.Array, gates_BTK: jax.Array, weights):
        arrays = [x.reshape(-1, x.shape[-1]) for x in (x_BTD, experts_BTK, gates_BTK)]
        if num_expert_shards == 1:
            return _gated_sums(*arrays, weights, activation).reshape(x_BTD.shape)
        sent = _sent(*arrays, _num_experts(weights), num_expert_shards)
        received = jax.lax.all_to_all(sent, expert_axes, 0, 0).reshape(-1, sent.shape[-1])
        received = _unpacked(received, experts_BTK.shape[-1])
        sums = _gated_sums(*received, weights, activation)
        sums_XnD = sums.reshape(num_expert_shards, -1, sums.shape[-1])
        outputs = jnp.sum(jax.lax.all_to_all(sums_XnD, expert_axes, 0, 0), axis=0)
        return outputs.reshape(x_BTD.shape)

    # XLA has no sum over one device where others remain to the compiler: docs/upstream.md.
    if num_token_shards == 1:
        return on_device(x_BTD, experts_BTK, gates_BTK, weights)
    batch_split, expert_split = PartitionSpec(token_axes), PartitionSpec(expert_axes or None)
    # shard_map takes what divides: rows without tokens, and experts without rows, fill up.
    arrays = [to_multiple(x, num_token_shards) for x in (x_BTD, experts_BTK, gates_BTK)]
    weights = {name: to_multiple(w, num_expert_shards) for name, w in weights.items()}
    if mesh.manual_axes:
        # JAX (0.10 to 0.12) cannot lower the gradient of a shard_map inside another if it keeps
        # values of the forward pass: they are computed again.
        on_device = jax.checkpoint(on_device)
    outputs = jax.shard_map(
        on_device, in_specs=(batch_split,) * 3 + (expert_split,), out_specs=batch_split,
        axis_names=set(token_axes),
    )(*arrays, weights)
    return outputs[: x_BTD.shape[0]]


def _num_experts(weights: Weights) -> int:
    return next(iter(weights.values())).shape[0]


def _sent(
    x_nD: jax.Array, experts_nK: jax.Array, gates_nK: jax.Array, num_local: int, num_shards: int
) -> jax.Array:
    """Returns a device's messages to each of X, [X, n, D + 4 K]: its tokens for experts there."""
    shard_X11 = jnp.arange(num_shards)[:, None, None]
    is_there_XnK = (experts_nK[None] // num_local == shard_X11) & (gates_nK != 0.0)[None]
    experts_XnK = jnp.where(is_there_XnK, experts_nK[None] % num_local, num_local)
    gates_XnK = jnp.where(is_there_XnK, gates_nK[None], 0.0)
    goes_Xn1 = jnp.any(is_there_XnK, axis=-1, keepdims=True)
    return _packed(jnp.where(goes_Xn1, x_nD[None], 0), experts_XnK, gates_XnK)


def _packed(x: jax.Array, experts: jax.Array, gates: jax.Array) -> jax.Array:
    """Returns tokens, experts and gates in an array of the tokens' dtype: a single exchange.

    Gates keep 16 bits of mantissa in bfloat16, as a value and what it leaves; experts are two
    digits of base 256, which bfloat16 has exactly.
    """
    high = gates.astype(x.dtype)
    low = (gates - high.astype(gates.dtype)).astype(x.dtype)
    digits = [(experts // 256).astype(x.dtype), (experts % 256).astype(x.dtype)]
    return jnp.concatenate([x, high, low, *digits], axis=-1)


def _unpacked(packed: jax.Array, num_chosen: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, rest = packed[..., : -4 * num_chosen], packed[..., -4 * num_chosen :]
    high, low, digit_1, digit_0 = jnp.split(rest.astype(jnp.float32), 4, axis=-1)
    return x, digit_1.astype(jnp.int32) * 256 + digit_0.astype(jnp.int32), high + low


def _gated_sums(
    x_nD: jax.Array, experts_nK: jax.Array, gates_nK: jax.Array, weights: Weights, activation: Glu,
) -> jax.Array:
    """Returns the gated sums [n, D] over a device's own experts; others are L, or their gate 0."""
    num_local, (num_tokens, num_chosen) = _num_experts(weights), experts_nK.shape
    expert = jnp.where(gates_nK != 0.0, experts_nK, num_local).reshape(-1)
    # A token goes to an expert once: of its choices at most L are of experts here.
    num_rows = num_tokens * min(num_chosen, num_local)
    row = jnp.argsort(jnp.argsort(expert, stable=True))  # Of each choice, sorted by expert.
    row_nK = jnp.where(expert < num_local, row, num_rows).reshape(experts_nK.shape)
    rows_of_expert_L = jnp.bincount(expert, length=num_local + 1)[:num_local].astype(jnp.int32)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, w, rows_of_expert_L)

    x_RD = dispatch(x_nD[None], row_nK[None], num_rows)[0]

    def at_rows(bias_LF: jax.Array) -> jax.Array:
        # Rows are sorted by expert; the last are no one's.
        return jnp.take(bias_LF, jnp.sort(expert)[:num_rows], axis=0, mode="clip")

    y_RD = through_experts(product, x_RD, weights, activation, at_rows=at_rows)
    return combine(y_RD[None], row_nK[None], gates_nK[None])[0]
