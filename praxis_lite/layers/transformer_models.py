"""A decoder-only language model, and its splits set in one place."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.layers.attentions import DotProductAttention
from praxis_lite.layers.embeddings import SharedEmbeddingSoftmax, TrainablePositionalEmbedding
from praxis_lite.layers.normalizations import RmsNorm
from praxis_lite.layers.repeats import Repeat
from praxis_lite.layers.transformers import Transformer, TransformerFeedForward
from praxis_lite.weights import BaseLayer, require_positive

# B batch, T time, V classes.


class TransformerLm(BaseLayer):
    """Returns float32 logits [B, T, V] of ids [B, T], and the cache.

    Args:
      vocab_size: V.
      model_dims, hidden_dims, num_heads, dim_per_head, num_layers: sizes handed to the templates.
      max_seq_length: positions of the learned embedding; None: none is added (rotary positions
        are the attention's own).
      fprop_dtype: of the activations; weights stay float32, logits are float32.
      softmax_tpl, transformer_layer_tpl, stacked_transformer_tpl, final_ln_tpl: the parts.
    """

    def __init__(
        self,
        vocab_size: int,
        model_dims: int,
        hidden_dims: int,
        num_heads: int,
        num_layers: int,
        *,
        dim_per_head: int | None = None,
        max_seq_length: int | None = None,
        fprop_dtype: jnp.dtype = jnp.float32,
        residual_dropout_prob: float = 0.0,
        softmax_tpl: Callable[..., Any] = SharedEmbeddingSoftmax,
        position_emb_tpl: Callable[..., Any] = TrainablePositionalEmbedding,
        transformer_layer_tpl: Callable[..., Any] = Transformer,
        stacked_transformer_tpl: Callable[..., Any] = Repeat,
        final_ln_tpl: Callable[..., Any] = RmsNorm,
        rngs: nnx.Rngs,
    ):
        require_positive(self, vocab_size=vocab_size, model_dims=model_dims)
        self.softmax = softmax_tpl(vocab_size, model_dims, fprop_dtype=fprop_dtype, rngs=rngs)
        self.position_emb = (
            None
            if max_seq_length is None
            else position_emb_tpl(max_seq_length, model_dims, rngs=rngs)
        )
        block = functools.partial(
            transformer_layer_tpl,
            model_dims,
            hidden_dims,
            num_heads,
            dim_per_head=dim_per_head,
            residual_dropout_prob=residual_dropout_prob,
        )
        self.transformer = stacked_transformer_tpl(block, num_layers, rngs=rngs)
        self.final_ln = final_ln_tpl(model_dims, rngs=rngs)
        self.fprop_dtype = fprop_dtype

    def init_cache(self, batch_size: int, max_seq_length: int) -> Any:
        """Returns an empty cache for `batch_size` rows of up to `max_seq_length` tokens.

        Raises:
          ConfigError: learned positions end before that.
        """
        if self.position_emb is not None:
            self.position_emb.check_length(max_seq_length)
        return self.transformer.init_cache(batch_size, max_seq_length, self.fprop_dtype)

    def __call__(
        self,
        ids: jax.Array,
        *,
        positions: jax.Array | None = None,
        key: jax.Array | None = None,
        cache: Any = None,
    ) -> tuple[jax.Array, Any]:
        """Args: ids int [B, T]; positions int [B, T], consecutive; None: 0 to T - 1.

        A key turns dropout on. With a cache the ids are appended to it at their positions, and
        the logits are those that the whole sequence up to there would give.
        """
        x = self.softmax.emb_lookup(ids)
        if self.position_emb is not None:
            rows = jnp.arange(ids.shape[1])[None, :] if positions is None else positions
            x += self.position_emb(rows).astype(x.dtype)
        x, cache = self.transformer(x, positions=positions, key=key, cache=cache)
        return self.softmax(self.final_ln(x)), cache


def set_sharding_params(
    lm: fdl.Buildable,
    *,
    batch_axes: Sequence[str] = ("replica", "data"),
    data_axis: str | None = "data",
    mdl_axis: str | None = "mdl",
) -> fdl.Buildable:
    """Returns a TransformerLm config with every split set, as Pax's `set_sharding_params_v1`.

    Weights split over `data_axis` along the model dims and over `mdl_axis` along vocabulary,
    heads and hidden dims. Activations split their batch over `batch_axes`, and the heads, hidden
    and vocabulary dims over `mdl_axis`; the residual stream's model dims stay whole (Megatron's
    way, arXiv:1909.08053: one all-reduce after attention and one after the feed-forward).
    Templates already in the config keep their other settings.
    """
    batch = tuple(batch_axes)
    residual, hidden = (batch, None, None), (batch, None, mdl_axis)

    def template(parent: fdl.Buildable, name: str, layer: Callable[..., Any], **splits: Any):
        child = getattr(parent, name, layer)
        if not isinstance(child, fdl.Buildable):
            child = fdl.Partial(child)
        for split_name, split in splits.items():
            setattr(child, split_name, split)
        setattr(parent, name, child)
        return child

    template(
        lm,
        "softmax_tpl",
        SharedEmbeddingSoftmax,
        weight_split_dims_mapping=(data_axis, mdl_axis),
        activation_split_dims_mapping=hidden,
        lookup_split_dims_mapping=residual,
    )
    template(lm, "stacked_transformer_tpl", Repeat)  # So that --set reaches its remat policy.
    block = template(lm, "transformer_layer_tpl", Transformer)
    template(
        block,
        "tr_atten_tpl",
        DotProductAttention,
        weight_split_dims_mapping=(data_axis, mdl_axis, None),
        activation_split_dims_mapping=(batch, None, mdl_axis, None),
        output_split_dims_mapping=residual,
    )
    template(
        block,
        "tr_fflayer_tpl",
        TransformerFeedForward,
        weight_split_dims_mapping=(data_axis, mdl_axis),
        hidden_split_dims_mapping=hidden,
        activation_split_dims_mapping=residual,
    )
    return lm
