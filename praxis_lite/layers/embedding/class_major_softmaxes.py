"""A softmax that keeps a row per class. Names, weights and numerics are Pax's."""

from typing import Any

import jax
from flax import nnx

from praxis_lite.core.sharding.split_dims import constrain
from praxis_lite.layers.activations import ActivationFn, activation_fn
from praxis_lite.layers.base.base_layer import Initializer
from praxis_lite.layers.base.calls import takes_settings_of
from praxis_lite.layers.base.result_types import einsum
from praxis_lite.layers.embedding.chunked_cross_entropy import token_stats
from praxis_lite.layers.embedding.cross_entropy import TokenStats
from praxis_lite.layers.embedding.softmaxes import SharedEmbeddingSoftmax
from praxis_lite.layers.linears import Bias

# D input dims, V classes.


class NClassMajorSharedEmbeddingSoftmax(SharedEmbeddingSoftmax):
    """A SharedEmbeddingSoftmax whose weight `w` is [V, D], a row per class.

    `weight_split_dims_mapping` is of [D, V] all the same, as in Pax: one softmax can stand for the
    other.

    Args:
      use_bias: Pax's name here for what other softmaxes call has_bias.
      activation: of the logits, before the cap.
      settings: of SharedEmbeddingSoftmax.
    """

    @takes_settings_of(
        SharedEmbeddingSoftmax, but=("has_bias", "scale_before_logits", "feed_forward_tpl")
    )
    def __init__(
        self,
        num_classes: int,
        input_dims: int,
        *,
        use_bias: bool = True,
        activation: str | ActivationFn = "identity",
        **settings: Any,
    ):
        activation_fn(activation, self)
        super().__init__(num_classes, input_dims, has_bias=use_bias, **settings)
        self.activation = activation

    def _project(
        self, feed_forward_tpl: Any, *, has_bias: bool, bias_init: float,
        weight_init: Initializer, rngs: nnx.Rngs,
    ) -> None:
        D, V = self.dims(self.input_dims, self.num_classes)
        self.split_VD = (V.split, D.split)
        self.w = self.weight((V, D), init=weight_init, rngs=rngs)
        self.bias = Bias(V, bias_init=bias_init, rngs=rngs) if has_bias else None

    def _projected(self, inputs: jax.Array) -> jax.Array:
        logits = einsum("...d,vd->...v", inputs, self.w[...].astype(inputs.dtype))
        logits = constrain(logits, self.activation_split_dims_mapping)
        return logits if self.bias is None else self.bias(logits)

    def _activated(self, logits: jax.Array) -> jax.Array:
        return super()._activated(activation_fn(self.activation, self)(logits))

    def _token_stats(self, inputs: jax.Array, class_ids: jax.Array) -> TokenStats:
        return token_stats(
            [(inputs, self.w[...])],
            None if self.bias is None else self.bias.b[...],
            class_ids,
            chunk_size=self.chunk_size,
            class_dim=0,
            activation=self._activated,
            weight_split_dims_mapping=self.split_VD,
            activation_split_dims_mapping=self.activation_split_dims_mapping,
        )

    def _tables(self) -> list[tuple[jax.Array, jax.Array | None]]:
        return [(self.w[...], None)]
