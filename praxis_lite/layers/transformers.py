"""Transformer blocks, pre-norm. Names and structure are Pax's."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from praxis_lite.layers.attentions import Cache, DotProductAttention
from praxis_lite.layers.linears import FeedForward
from praxis_lite.layers.normalizations import RmsNorm
from praxis_lite.layers.stochastics import Dropout
from praxis_lite.sharding import SplitDims
from praxis_lite.weights import BaseLayer, require_positive

# B batch, T time, D model dims, F hidden dims.


def _split_keys(key: jax.Array | None, num: int) -> Any:
    return (None,) * num if key is None else jax.random.split(key, num)


class TransformerFeedForward(BaseLayer):
    """Returns `x + ffn(norm(x))`: [B, T, D] -> [B, T, D], with hidden dims F.

    Args:
      use_gated_activation: multiply the hidden, unactivated, by an activated second projection
        (arXiv:2002.05202).
      ln_tpl: the norm, called with (input_dims, rngs=).
      weight_split_dims_mapping: of the weight into F, [D, F]; the one out of F splits as its
        transpose.
      hidden_split_dims_mapping: of the hidden activations, [B, T, F].
      activation_split_dims_mapping: of the outputs, [B, T, D].
    """

    def __init__(
        self,
        input_dims: int,
        hidden_dims: int,
        *,
        has_bias: bool = True,
        activation: str = "relu",
        use_gated_activation: bool = False,
        residual_dropout_prob: float = 0.0,
        ln_tpl: Callable[..., Any] = RmsNorm,
        weight_split_dims_mapping: SplitDims = None,
        hidden_split_dims_mapping: SplitDims = None,
        activation_split_dims_mapping: SplitDims = None,
        rngs: nnx.Rngs,
    ):
        require_positive(self, input_dims=input_dims, hidden_dims=hidden_dims)
        split_D, split_F = (*(weight_split_dims_mapping or ()), None, None)[:2]

        def into_hidden(activation: str) -> FeedForward:
            return FeedForward(
                input_dims,
                hidden_dims,
                has_bias=has_bias,
                activation=activation,
                weight_split_dims_mapping=(split_D, split_F),
                activation_split_dims_mapping=hidden_split_dims_mapping,
                rngs=rngs,
            )

        self.layer_norm = ln_tpl(input_dims, rngs=rngs)
        # As Pax: of the pair it is the gate that is activated.
        self.ffn_layer1 = into_hidden("identity" if use_gated_activation else activation)
        self.ffn_layer1_gate = into_hidden(activation) if use_gated_activation else None
        self.ffn_layer2 = FeedForward(
            hidden_dims,
            input_dims,
            has_bias=has_bias,
            activation="identity",
            weight_split_dims_mapping=(split_F, split_D),
            activation_split_dims_mapping=activation_split_dims_mapping,
            rngs=rngs,
        )
        self.residual_dropout = Dropout(residual_dropout_prob)

    def __call__(self, inputs: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        normed = self.layer_norm(inputs)
        hidden_BTF = self.ffn_layer1(normed)
        if self.ffn_layer1_gate is not None:
            hidden_BTF = hidden_BTF * self.ffn_layer1_gate(normed)
        return inputs + self.residual_dropout(self.ffn_layer2(hidden_BTF), key)


class Transformer(BaseLayer):
    """Returns a decoder block's [B, T, D] and its attention's cache: attention, then feed-forward.

    The parent's dims go to the templates, which are called with `rngs`.
    """

    def __init__(
        self,
        input_dims: int,
        hidden_dims: int,
        num_heads: int,
        *,
        dim_per_head: int | None = None,
        residual_dropout_prob: float = 0.0,
        ln_tpl: Callable[..., Any] = RmsNorm,
        tr_atten_tpl: Callable[..., Any] = DotProductAttention,
        tr_fflayer_tpl: Callable[..., Any] = TransformerFeedForward,
        rngs: nnx.Rngs,
    ):
        self.layer_norm = ln_tpl(input_dims, rngs=rngs)
        self.self_attention = tr_atten_tpl(
            input_dims, num_heads, dim_per_head=dim_per_head, rngs=rngs
        )
        self.ff_layer = tr_fflayer_tpl(
            input_dims,
            hidden_dims,
            residual_dropout_prob=residual_dropout_prob,
            ln_tpl=ln_tpl,
            rngs=rngs,
        )
        self.residual_dropout = Dropout(residual_dropout_prob)

    def init_cache(self, *args: Any) -> Cache:
        return self.self_attention.init_cache(*args)

    def __call__(
        self,
        inputs: jax.Array,
        *,
        positions: jax.Array | None = None,
        key: jax.Array | None = None,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        atten_key, residual_key, ff_key = _split_keys(key, 3)
        attended, cache = self.self_attention(
            self.layer_norm(inputs), positions=positions, key=atten_key, cache=cache
        )
        outputs = inputs + self.residual_dropout(attended, residual_key)
        return self.ff_layer(outputs, key=ff_key), cache
