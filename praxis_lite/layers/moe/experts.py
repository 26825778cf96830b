"""The experts' feed-forward computation, with the initializers and sharding of their weights."""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

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
from praxis_lite.layers.base.result_types import broadcast_typed_like, einsum
from praxis_lite.layers.initializers import EinsumXavier

# G groups, E experts, C slots per expert and group, D model dims, F hidden dims.
Weights = Mapping[str, jax.Array]
Function = Callable[[jax.Array], jax.Array]
# Takes (hidden activations, gate activations or None), and returns the inputs of the output
# projection.
Glu = Callable[[jax.Array, jax.Array | None], jax.Array]


def expert_initializer(is_uniform: bool, has_explicit_fans: bool, fan_in: int) -> Initializer:
    """Returns Pax's initializer for an expert weight [E, in, out].

    Args:
      is_uniform: Whether to initialize uniformly in +-sqrt(3 / fan_in).
      has_explicit_fans: Whether the fan-in and fan-out for Xavier exclude E.
      fan_in: Number of inputs of an expert.
    """
    if is_uniform:
        limit = (3.0 / fan_in) ** 0.5
        return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -limit, limit)
    if has_explicit_fans:
        return EinsumXavier()
    return xavier


def glu(activate: Function, limit: float | None, alpha: float = 1.702) -> Glu:
    """Returns a gated activation function: hidden x activate(gate), or activate(hidden).

    Args:
      activate: Activation function of the gate, or of the hidden activations if there is no gate.
      limit: If set, the activation is (hidden + 1) gate sigmoid(alpha gate), as in GPT-OSS, with
        hidden clipped to +-limit and the gate clipped to at most limit.
      alpha: Factor that multiplies the gate inside the sigmoid, if limit is set.
    """

    def gated(hidden: jax.Array, gate: jax.Array | None) -> jax.Array:
        if gate is None:
            return activate(hidden)
        if limit is None:
            return hidden * activate(gate)
        gate = jnp.minimum(gate, limit)
        return (jnp.clip(hidden, -limit, limit) + 1) * gate * jax.nn.sigmoid(alpha * gate)

    return gated


class Experts(NamedTuple):
    """The experts of a layer: their weights and activation, and how weights and tokens are sharded.

    Attributes:
      weights: Weights, keyed by name: wi_0 [E, D, F], wo_0 [E, F, D], wi_gate_0 if there is a gate,
        and if there are biases, bi_0, bi_gate_0 [E, F] and bo_0 [E, D].
      activation: Takes the hidden activations and the gate activations (or None).
      tokens_split: Sharding of the tokens outside the experts, of which only the first entry, for
        the batch or G, is used.
      weights_split: Sharding of wi_0, [E, D, F].
    """

    weights: Weights
    activation: Glu
    tokens_split: SplitDims
    weights_split: SplitDims

    def ffn(
        self,
        matmul: Callable[[jax.Array, jax.Array], jax.Array],
        x: jax.Array,
        on_hidden: Function = lambda hidden: hidden,
        *,
        at_rows: Function,
    ) -> jax.Array:
        """Returns the experts' feed-forward outputs, with the shape of `x`.

        The matmul outputs have the checkpoint names "expert_ffn1", "expert_ffn1_gate" and
        "expert_ffn2".

        Args:
          matmul: Multiplies tokens by the weight [E, in, out] of their expert.
          x: Tokens, grouped by expert, [..., D].
          on_hidden: Constrains the sharding of the hidden activations, and applies dropout.
          at_rows: Broadcasts a bias [E, dims] to a result of `matmul`.
        """
        weights = self.weights

        def affine(x: jax.Array, name: str, activation_name: str) -> jax.Array:
            y = named(matmul(x, weights[f"w{name}"]), activation_name)
            if f"b{name}" not in weights:
                return y
            return y + broadcast_typed_like(at_rows(weights[f"b{name}"]), y)

        gate = affine(x, "i_gate_0", "expert_ffn1_gate") if "wi_gate_0" in weights else None
        hidden = on_hidden(self.activation(affine(x, "i_0", "expert_ffn1"), gate))
        return affine(hidden, "o_0", "expert_ffn2")


def apply_experts(
    experts: Experts,
    x_GECD: jax.Array,
    dropout: Function,
    *,
    dispatch_split: SplitDims,
    hidden_split: SplitDims,
) -> jax.Array:
    """Returns the experts' outputs for the tokens in their slots, [G, E, C, D].

    Args:
      experts: The experts.
      x_GECD: Tokens in slots.
      dropout: Applied to the hidden activations.
      dispatch_split: Sharding of [G, E, C, D] inside the experts. If None, E is sharded like the
        weights, and G over its remaining axes.
      hidden_split: Sharding of [G, E, C, F] inside the experts. If None, G and E are sharded as in
        dispatch_split, and F like the weights.
    """
    assert experts.weights_split is not None
    split_E, _, split_F = experts.weights_split
    outside = first_dim(experts.tokens_split)
    if dispatch_split is None:
        dispatch_split = _groups_and_experts_split(outside, split_E)
    if hidden_split is None:
        assert dispatch_split is not None
        hidden_split = (*tuple(dispatch_split)[:2], None, split_F)
    # XLA implements the change between two successive constraints, and its reverse, with one
    # all-to-all each.
    x_GECD = constrain(constrain(x_GECD, outside), dispatch_split)
    y_GECD = experts.ffn(
        functools.partial(einsum, "gecd,edf->gecf"),
        x_GECD,
        lambda hidden_GECF: dropout(constrain(hidden_GECF, hidden_split)),
        at_rows=lambda bias_EF: bias_EF[None, :, None, :],
    )
    return constrain(constrain(y_GECD, dispatch_split), outside)


def first_dim(split: SplitDims) -> SplitDims:
    """Returns a split mapping that keeps only the first entry of `split`, or None for None."""
    return None if split is None else tuple(split)[:1]


def first_axes(split: SplitDims) -> tuple[str, ...]:
    """Returns the mesh axes over which a split mapping shards the first dim.

    Axes that are manual in an enclosing `jax.shard_map` are omitted.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not split:
        return ()
    spec = to_partition_spec(tuple(split)[:1], mesh.axis_names)
    return axes_of(without_axes(spec, mesh.manual_axes)[0])


def _groups_and_experts_split(tokens_split: SplitDims, split_E: DimSplit) -> SplitDims:
    """Returns the sharding of [G, E, ...] inside the experts.

    Axes that shard both G and E outside the experts move to E; XLA implements this with an
    all-to-all.
    """
    expert_axes = first_axes((split_E,))
    rest = tuple(axis for axis in first_axes(tokens_split) if axis not in expert_axes)
    return (rest or None, expert_axes or None)
