"""Experts that every token goes through, beside those that it is routed to."""

import jax
from flax import nnx

from praxis_lite.layers.activations import ActivationFn, activation_fn
from praxis_lite.layers.base.base_layer import BaseLayer
from praxis_lite.layers.linears import Linear

# B batch, T time, D model dims, F hidden dims.


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
