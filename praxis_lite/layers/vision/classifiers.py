"""A classifier: a network that computes features, and a softmax over classes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.layers.base.base_layer import BaseLayer
from praxis_lite.layers.base.calls import require_floating
from praxis_lite.layers.base.dims import splits


class ClassificationModel(BaseLayer):
    """Maps inputs [B, ...] to float32 class logits [B, V].

    Args:
      network_tpl: Builds the network from (rngs=). Its call takes inputs and `key=`, and returns
        features [B, D].
      softmax_tpl: Builds a FullSoftmax, or a layer with the same methods, from (rngs=).
      fprop_dtype: The dtype of inputs and activations; weights are float32.
    """

    template_splits = {"softmax_tpl": splits(activation=("batch", "activation_vocab"))}

    def __init__(
        self,
        network_tpl: Callable[..., Any],
        softmax_tpl: Callable[..., Any],
        *,
        fprop_dtype: jnp.dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        require_floating(self, fprop_dtype=fprop_dtype)
        self.network = network_tpl(rngs=rngs)
        self.softmax = softmax_tpl(rngs=rngs)
        self.fprop_dtype = fprop_dtype

    def __call__(self, inputs: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Returns the logits; passing a key selects training mode."""
        return self.softmax(self._features(inputs, key)).astype(jnp.float32)

    def compute_loss(
        self,
        inputs: jax.Array,
        labels: jax.Array,
        weights: jax.Array,
        *,
        key: jax.Array | None = None,
    ) -> dict[str, jax.Array]:
        """Returns the softmax's `compute_loss` for integer labels [B] and weights [B]."""
        return self.softmax.compute_loss(self._features(inputs, key), labels, weights, key=key)

    def _features(self, inputs: jax.Array, key: jax.Array | None) -> jax.Array:
        return self.network(inputs.astype(self.fprop_dtype), key=key)
