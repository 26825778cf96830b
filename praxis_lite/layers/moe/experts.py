"""The feed-forward maths of experts, the initializers of their weights, and their splits."""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.sharding.split_dims import (
    DimSplit,
    SplitDims,
    constrain,
    to_partition_spec,
    without_axes,
)
from praxis_lite.layers.base.activation_names import named
from praxis_lite.layers.base.base_layer import Initializer, xavier
from praxis_lite.layers.base.result_types import broadcast_beside, einsum
from praxis_lite.layers.initializers import EinsumXavier

# G groups, E experts, C slots of an expert for a group, D model dims, F hidden dims.
Weights = Mapping[str, jax.Array]
Function = Callable[[jax.Array], jax.Array]
# (hidden activations, those of the gate or None) -> activations for the output projection.
Glu = Callable[[jax.Array, jax.Array | None], jax.Array]


def expert_initializer(is_uniform: bool, has_explicit_fans: bool, fan_in: int) -> Initializer:
    """Returns Pax's initializer of a weight of experts."""
    if is_uniform:
        limit = (3.0 / fan_in) ** 0.5
        return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -limit, limit)
    if has_explicit_fans:
        return EinsumXavier()
    return xavier


def glu(activate: Function, limit: float | None, alpha: float = 1.702) -> Glu:
    """Returns a gated activation: hidden times the activated gate; without a gate activated hidden.

    With a limit it is GPT-OSS's: (hidden + 1) gate sigmoid(alpha gate), with hidden clipped to
    +-limit and the gate to at most limit.
    """

    def activated(hidden: jax.Array, gate: jax.Array | None) -> jax.Array:
        if gate is None:
            return activate(hidden)
        if limit is None:
            return hidden * activate(gate)
        gate = jnp.minimum(gate, limit)
        return (jnp.clip(hidden, -limit, limit) + 1) * gate * jax.nn.sigmoid(alpha * gate)

    return activated


def through_experts(
    product: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, weights: Weights,
    activation: Glu, on_hidden: Function = lambda hidden: hidden, *, at_rows: Function,
) -> jax.Array:
    """Returns the experts' feed-forward outputs, of the shape of `x`.

    The products are named "expert_ffn1", "expert_ffn1_gate" and "expert_ffn2".

    Args:
      product: multiplies tokens by the weight [E, in, out] of their expert.
      x: tokens by expert, [..., D].
      weights: wi_0 [E, D, F], wo_0 [E, F, D]; wi_gate_0 if there is a gate; bi_0, bi_gate_0 [E, F]
        and bo_0 [E, D] if there are biases.
      activation: of the hidden activations and the gate's, None without one.
      on_hidden: constrains the layout of the hidden activations, and applies dropout.
      at_rows: broadcasts a bias [E, dims] to the result of `product`.
    """

    def affine(x: jax.Array, name: str, activation_name: str) -> jax.Array:
        y = named(product(x, weights[f"w{name}"]), activation_name)
        if f"b{name}" not in weights:
            return y
        return y + broadcast_beside(at_rows(weights[f"b{name}"]), y)

    gate = affine(x, "i_gate_0", "expert_ffn1_gate") if "wi_gate_0" in weights else None
    hidden = on_hidden(activation(affine(x, "i_0", "expert_ffn1"), gate))
    return affine(hidden, "o_0", "expert_ffn2")


def at_experts(
    x_GECD: jax.Array, weights: Weights, activation: Glu, dropout: Function, *,
    tokens_split: SplitDims, weights_split: SplitDims, dispatch_split: SplitDims,
    hidden_split: SplitDims,
) -> jax.Array:
    """Returns the experts' outputs for the tokens in their slots, [G, E, C, D].

    Args:
      tokens_split: its first entry is the split of G outside of the experts.
      weights_split: of wi_0, [E, D, F].
      dispatch_split, hidden_split: of [G, E, C, D] and [G, E, C, F] at the experts; None: E and F
        split as the weights, G over its remaining axes.
    """
    split_E, _, split_F = weights_split
    if dispatch_split is None:
        dispatch_split = _groups_and_experts_split(tokens_split, split_E)
    if hidden_split is None:
        hidden_split = (*tuple(dispatch_split)[:2], None, split_F)
    # Two constraints in sequence: XLA turns the change, and its reverse, into one all-to-all each.
    x_GECD = constrain(constrain(x_GECD, first_dim(tokens_split)), dispatch_split)
    y_GECD = through_experts(
        functools.partial(einsum, "gecd,edf->gecf"),
        x_GECD,
        weights,
        activation,
        lambda hidden_GECF: dropout(constrain(hidden_GECF, hidden_split)),
        at_rows=lambda bias_EF: bias_EF[None, :, None, :],
    )
    return constrain(constrain(y_GECD, dispatch_split), first_dim(tokens_split))


def first_dim(split: SplitDims) -> SplitDims:
    """Returns the first entry of a mapping alone; None for None."""
    return None if split is None else tuple(split)[:1]


def first_axes(split: SplitDims) -> tuple[str, ...]:
    """Returns the axes of the current mesh that split the first dim of a mapping.

    Manual axes of `jax.shard_map` are left out.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not split:
        return ()
    spec = to_partition_spec(first_dim(split), mesh.axis_names)
    return axes_of(without_axes(spec, mesh.manual_axes)[0])


def _groups_and_experts_split(tokens_split: SplitDims, split_E: DimSplit) -> SplitDims:
    """Returns the split of [G, E, ...] at the experts: an axis of both moves from G to E.

    XLA makes this move an all-to-all.
    """
    expert_axes = first_axes((split_E,))
    rest = tuple(axis for axis in first_axes(tokens_split) if axis not in expert_axes)
    return (rest or None, expert_axes or None)
