"""Experts without a capacity: each token reaches all of its experts, regardless of their load.

Tokens are sorted by expert and multiplied in groups (`grouped_matmul`; MegaBlocks,
arXiv:2211.15841). If experts are sharded over mesh axes, all-to-alls send the tokens to the
experts' devices (`exchange`).

If experts are replicated, n tokens on a device need memory for n min(K, E) rows of D inputs and F
hidden activations.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from praxis_lite.core.collectives.vmapped_axes import vmapped_axes
from praxis_lite.layers.base.base_layer import pad_to_multiple
from praxis_lite.layers.base.foreign_kernels import without_vma
from praxis_lite.layers.moe.dispatch import combine, dispatch
from praxis_lite.layers.moe.exchange import Exchange, exchange_in_rounds
from praxis_lite.layers.moe.experts import Experts, Weights, first_axes
from praxis_lite.layers.moe.grouped_matmul import grouped_matmul

# B batch, T time, D model dims, F hidden dims, E experts, L experts per device, K experts per
# token, n tokens, X devices over which the experts are sharded, R rows for experts, P shards of F.


def dropless(
    experts: Experts,
    kernel: str,
    x_BTD: jax.Array,
    experts_BTK: jax.Array,
    gates_BTK: jax.Array,
) -> jax.Array:
    """Computes the gated sum of each token's expert outputs, [B, T, D].

    Args:
      experts: The experts.
      kernel: Kernel for the matmuls, a name in `grouped_matmul.EXPERT_KERNELS`.
      x_BTD: Tokens.
      experts_BTK: Chosen experts, int32.
      gates_BTK: Their gates, float32; choices with a gate of 0 are not computed.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = tuple(axis for axis in mesh.axis_names if axis not in mesh.manual_axes)
    roles = _AxisRoles.of(free, experts, shard_time=x_BTD.shape[1] > 1)
    num_shards = {
        name: math.prod(mesh.shape[axis] for axis in axes) for name, axes in roles._asdict().items()
    }
    # `without_vma` takes arrays with gradients first, so the experts' indices are passed last.
    names, arrays = tuple(experts.weights), tuple(experts.weights.values())

    def on_device(x: jax.Array, gates: jax.Array, *rest: jax.Array) -> jax.Array:
        weights, chosen = dict(zip(names, rest[:-1], strict=True)), rest[-1]
        if num_shards["hidden"] > 1 and "bo_0" in weights:  # Add it once, not per shard of F.
            is_first = jax.lax.axis_index(roles.hidden) == 0
            weights["bo_0"] = jnp.where(is_first, weights["bo_0"], 0)
        x_nD, gates_nK, experts_nK = (a.reshape(-1, a.shape[-1]) for a in (x, gates, chosen))

        def local_experts(
            x_nD: jax.Array, experts_nK: jax.Array, gates_nK: jax.Array, weights: Weights
        ) -> jax.Array:
            local = experts._replace(weights=weights)
            matmul = functools.partial(grouped_matmul, kernel, expected_rows=chosen.size)
            return _gated_sums(local, matmul, x_nD, experts_nK, gates_nK)

        if num_shards["expert"] == 1:
            outputs = local_experts(x_nD, experts_nK, gates_nK, weights)
        else:
            exchange = Exchange(roles.expert, num_shards["expert"], free)
            outputs = exchange_in_rounds(
                local_experts, exchange, x_nD, gates_nK, weights, experts_nK
            )
        # The new dim is P: each device returns a partial sum for its shard of F.
        return outputs.reshape(1, *x.shape)

    # On one device, or inside a shard_map over all axes, nothing is sharded.
    if not free or math.prod(num_shards.values()) == 1:
        return on_device(x_BTD, gates_BTK, *arrays, experts_BTK)[0]

    def pad(x: jax.Array, *parts: str) -> jax.Array:
        """Pads each sharded dim to a multiple of its number of shards."""
        for dim, part in enumerate(parts):
            x = pad_to_multiple(x, num_shards[part], dim) if part else x
        return x

    token_spec = PartitionSpec(roles.rows or None, roles.time or None)
    tokens = [pad(x, "rows", "time") for x in (x_BTD, gates_BTK, experts_BTK)]
    dims = [_DIMS[name] for name in names]
    arrays = tuple(pad(w, *parts) for w, parts in zip(arrays, dims, strict=True))
    specs = (
        token_spec,
        token_spec,
        *(
            PartitionSpec(*(getattr(roles, part) or None if part else None for part in parts))
            for parts in dims
        ),
    )
    sums_PBTD = without_vma(
        on_device,
        specs,
        (token_spec,),
        PartitionSpec(roles.hidden or None, *token_spec),
        set(free),
    )(*tokens[:2], *arrays, tokens[2])
    # Leave the sum over shards of F to the compiler, which may use a reduce-scatter.
    return jnp.sum(sums_PBTD, axis=0)[: x_BTD.shape[0], : x_BTD.shape[1]]


# For each dim of each weight, the field of `_AxisRoles` with the mesh axes that shard it.
_DIMS = {
    "wi_0": ("expert", "", "hidden"),
    "wi_gate_0": ("expert", "", "hidden"),
    "wo_0": ("expert", "hidden", ""),
    "bi_0": ("expert", "hidden"),
    "bi_gate_0": ("expert", "hidden"),
    "bo_0": ("expert", ""),
}


class _AxisRoles(NamedTuple):
    """The mesh axes over which the batch, time, hidden dims and experts are sharded."""

    rows: tuple[str, ...]
    time: tuple[str, ...]
    hidden: tuple[str, ...]
    expert: tuple[str, ...]

    @classmethod
    def of(
        cls,
        free: tuple[str, ...],
        experts: Experts,
        *,
        shard_time: bool,
    ) -> "_AxisRoles":
        """Assigns roles to `free`, the axes that are not manual."""
        weights_split = experts.weights_split
        expert = first_axes(weights_split)
        # Tokens must be sharded over the experts' axes. Otherwise several devices would send the
        # same tokens.
        rows = first_axes(experts.tokens_split)
        rows += tuple(axis for axis in expert if axis not in rows)
        hidden = () if weights_split is None else first_axes(tuple(weights_split)[2:])
        hidden = tuple(axis for axis in hidden if axis not in rows)
        # Shard time over unused axes, so that no two devices compute the same tokens. In decoding,
        # it is cheaper to compute the single token on every device.
        taken = {*rows, *hidden, *vmapped_axes()}
        time = tuple(axis for axis in free if axis not in taken) if shard_time else ()
        return cls(rows, time, hidden, expert)


def _gated_sums(
    experts: Experts,
    matmul: Callable[..., jax.Array],
    x_nD: jax.Array,
    experts_nK: jax.Array,
    gates_nK: jax.Array,
) -> jax.Array:
    """Returns the gated sums [n, D] over a device's experts.

    Args:
      experts: This device's experts.
      matmul: Takes (rows sorted by expert, weights, number of rows per expert).
      x_nD: Tokens.
      experts_nK: Indices among this device's experts. Choices of other experts have index L or a
        gate of 0.
      gates_nK: Gates.
    """
    num_local = next(iter(experts.weights.values())).shape[0]
    num_tokens, num_chosen = experts_nK.shape
    # Index L stands for choices that this device does not compute. They come last in the sort.
    expert = jnp.where(gates_nK != 0.0, experts_nK, num_local).reshape(-1)
    # A token chooses an expert at most once, so at most L of its choices are on this device.
    num_rows = num_tokens * min(num_chosen, num_local)
    # The inverse permutation of the sort by expert: the row of each choice.
    row = jnp.argsort(jnp.argsort(expert, stable=True))
    row_nK = jnp.where(expert < num_local, row, num_rows).reshape(experts_nK.shape)
    rows_of_expert_L = jnp.bincount(expert, length=num_local + 1)[:num_local].astype(jnp.int32)
    x_RD = dispatch(x_nD[None], row_nK[None], num_rows)[0]

    def at_rows(bias_LF: jax.Array) -> jax.Array:
        # Rows are sorted by expert; the last rows have no expert.
        return jnp.take(bias_LF, jnp.sort(expert)[:num_rows], axis=0, mode="clip")

    y_RD = experts.ffn(lambda x, w: matmul(x, w, rows_of_expert_L), x_RD, at_rows=at_rows)
    return combine(y_RD[None], row_nK[None], gates_nK[None])[0]
