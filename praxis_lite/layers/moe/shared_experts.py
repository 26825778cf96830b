"""Experts that every token goes through, beside those that it is routed to."""

import jax
from flax import nnx

from praxis_lite.core.sharding.split_dims import DimSplit
from praxis_lite.layers.activations import ActivationFn, activation_fn
from praxis_lite.layers.base_layer import BaseLayer
from praxis_lite.layers.linears import Linear

# B batch, T time, D model dims, F hidden dims.


class SharedExperts(BaseLayer):
    """A feed-forward without norm and skip connection: [B, T, D] -> [B, T, D].

    Args:
      input_dims, hidden_dims: D, F.
      activation: of the hidden activations, or of the gate.
      is_gated: the hidden activations are multiplied by an activated gate.
      split: of the weights [D, F] into hidden dims; the one out of them has it reversed.
    """

    def __init__(
        self, input_dims: int, hidden_dims: int, activation: str | ActivationFn, is_gated: bool,
        split: tuple[DimSplit, DimSplit], rngs: nnx.Rngs,
    ):
        def linear(fan_in: int, fan_out: int, split: tuple[DimSplit, DimSplit]) -> Linear:
            return Linear(fan_in, fan_out, weight_split_dims_mapping=split, rngs=rngs)

        self.ffn_layer1_gate = linear(input_dims, hidden_dims, split) if is_gated else None
        self.ffn_layer1 = linear(input_dims, hidden_dims, split)
        self.ffn_layer2 = linear(hidden_dims, input_dims, split[::-1])
        self.activation = activation

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        activate, hidden = activation_fn(self.activation, self), self.ffn_layer1(x_BTD)
        if self.ffn_layer1_gate is None:
            return self.ffn_layer2(activate(hidden))
        return self.ffn_layer2(hidden * activate(self.ffn_layer1_gate(x_BTD)))
