"""A sequence-to-sequence transformer, with Pax's names and structure."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.errors import ConfigError
from praxis_lite.layers.attention.checks import require_one_segment
from praxis_lite.layers.base.base_layer import BaseLayer
from praxis_lite.layers.base.calls import require_floating, require_positive
from praxis_lite.layers.base.variables import rebuilt
from praxis_lite.layers.embedding.positional_embeddings import PositionalEmbedding
from praxis_lite.layers.embedding.softmaxes import SharedEmbeddingSoftmax
from praxis_lite.layers.normalizations import LayerNorm
from praxis_lite.layers.stacking.repeats import Repeat
from praxis_lite.layers.stacking.residual_branches import split_keys
from praxis_lite.layers.transformer.model_parts import (
    embed,
    position_embedding,
    positions_in_segments,
    repeated_block,
    with_positions,
    with_total_loss,
)
from praxis_lite.layers.transformer.transformers import Transformer

# B batch, S time of the source, T time of the target, D model dims, V classes.
Template = Callable[..., Any]


class TransformerEncoderDecoder(BaseLayer):
    """Maps inputs [B, S] and targets [B, T] to float32 logits [B, T, V].

    The model is T5 (Raffel et al. 2020, arXiv:1910.10683), with Pax's numerics.

    Args:
      vocab_size: V, for both inputs and targets.
      model_dims: D.
      hidden_dims: Hidden size of the blocks' feed-forward layers.
      num_heads: Number of attention heads per block.
      dim_per_head: Size of a head. If None, the block's default.
      num_encoder_layers: Number of encoder blocks.
      num_decoder_layers: Number of decoder blocks.
      fprop_dtype: Dtype of activations; weights and logits are float32.
      softmax_tpl: Builds the softmax from (V, D, rngs=), and fprop_dtype= if it also embeds ids.
      encoder_embedding_tpl: Builds the inputs' embedding from (V, D, fprop_dtype=, rngs=). If None,
        inputs are embedded like targets.
      decoder_embedding_tpl: Builds the targets' embedding from the same arguments. If None, the
        softmax embeds targets.
      position_emb_tpl: Builds the position embedding of inputs and targets from (D, rngs=).
      encoder_position_emb_tpl: Builds a separate position embedding for the inputs; requires
        position_emb_tpl=None.
      decoder_position_emb_tpl: Builds a separate position embedding for the targets.
      encoder_layer_tpl: Builds an encoder block, in which every token attends to all inputs. A
        sequence of templates is a pattern that repeats along the depth.
      decoder_layer_tpl: Builds a decoder block, which attends to the encoder's outputs, or a
        pattern.
      encoder_stacked_transformer_tpl: Builds the encoder from (block, number of blocks, rngs=).
      decoder_stacked_transformer_tpl: Builds the decoder from the same arguments.
      encoder_ln_tpl: Builds the norm after the encoder.
      decoder_ln_tpl: Builds the norm after the decoder.
    """

    cache_skips_padding = True

    def __init__(
        self,
        vocab_size: int,
        model_dims: int,
        hidden_dims: int,
        num_heads: int,
        num_encoder_layers: int,
        num_decoder_layers: int,
        *,
        dim_per_head: int | None = None,
        fprop_dtype: jnp.dtype = jnp.float32,
        softmax_tpl: Template = SharedEmbeddingSoftmax,
        encoder_embedding_tpl: Template | None = None,
        decoder_embedding_tpl: Template | None = None,
        position_emb_tpl: Template | None = PositionalEmbedding,
        encoder_position_emb_tpl: Template | None = None,
        decoder_position_emb_tpl: Template | None = None,
        encoder_layer_tpl: Template | Sequence[Template] = Transformer,
        decoder_layer_tpl: Template | Sequence[Template] = Transformer,
        encoder_stacked_transformer_tpl: Template = Repeat,
        decoder_stacked_transformer_tpl: Template = Repeat,
        encoder_ln_tpl: Template = LayerNorm,
        decoder_ln_tpl: Template = LayerNorm,
        rngs: nnx.Rngs,
    ):
        require_positive(
            self,
            vocab_size=vocab_size,
            model_dims=model_dims,
            num_encoder_layers=num_encoder_layers,
            num_decoder_layers=num_decoder_layers,
        )
        require_floating(self, fprop_dtype=fprop_dtype)
        if position_emb_tpl is not None and (encoder_position_emb_tpl or decoder_position_emb_tpl):
            raise ConfigError(
                "TransformerEncoderDecoder.position_emb_tpl, which inputs and targets share, "
                "cannot be combined with encoder_position_emb_tpl or decoder_position_emb_tpl. For "
                "separate positions, set position_emb_tpl=None; otherwise omit the other two."
            )

        def embedding(template: Template | None) -> Any:
            if template is None:
                return None
            return template(vocab_size, model_dims, fprop_dtype=fprop_dtype, rngs=rngs)

        def position(template: Template | None) -> Any:
            return position_embedding(template, None, model_dims, rngs=rngs)

        def stack(layer: Any, stacked: Template, num_layers: int, **settings: Any) -> Any:
            sizes = (num_layers, model_dims, hidden_dims, num_heads)
            settings["dim_per_head"] = dim_per_head
            return stacked(*repeated_block(self, layer, *sizes, **settings), rngs=rngs)

        # Without a separate embedding, the softmax also embeds the targets and needs the
        # activations' dtype.
        embeds_targets = decoder_embedding_tpl is None
        dtype = {"fprop_dtype": fprop_dtype} if embeds_targets else {}
        self.softmax = softmax_tpl(vocab_size, model_dims, **dtype, rngs=rngs)
        self.encoder_embedding_lookup = embedding(encoder_embedding_tpl)
        self.decoder_embedding_lookup = embedding(decoder_embedding_tpl)
        self.position_emb = position(position_emb_tpl)
        self.encoder_position_emb = position(encoder_position_emb_tpl)
        self.decoder_position_emb = position(decoder_position_emb_tpl)
        self.encoder = stack(
            encoder_layer_tpl,
            encoder_stacked_transformer_tpl,
            num_encoder_layers,
            mask_self_attention=False,
        )
        self.decoder = stack(
            decoder_layer_tpl,
            decoder_stacked_transformer_tpl,
            num_decoder_layers,
            use_cross_attention=True,
        )
        self.encoder_ln = encoder_ln_tpl(model_dims, rngs=rngs)
        self.decoder_ln = decoder_ln_tpl(model_dims, rngs=rngs)
        self.fprop_dtype, self.vocab_size = fprop_dtype, vocab_size

    def __call__(
        self, inputs: jax.Array, targets: jax.Array, **kwargs: Any
    ) -> tuple[jax.Array, None]:
        """Returns (logits, None); there is no cache. See `compute_loss` for the arguments."""
        return self.softmax(self._activations(inputs, targets, **kwargs)), None

    def compute_loss(
        self,
        inputs: jax.Array,
        targets: jax.Array,
        labels: jax.Array,
        weights: jax.Array,
        *,
        key: jax.Array | None = None,
        **kwargs: Any,
    ) -> dict[str, jax.Array]:
        """Returns the loss for predicting `labels`, and its components, like TransformerLm.

        Args:
          inputs: Int [B, S].
          targets: Int [B, T], the inputs of the decoder.
          labels: Int [B, T], the expected predictions.
          weights: Float [B, T], the weight of each label in the loss.
          key: Random key for dropout. If None, nothing is dropped.
          kwargs: input_paddings [B, S] and target_paddings [B, T], 1.0 for padding. For packed
            sequences, input_segment_ids and target_segment_ids (targets attend only to inputs in
            their segment), and input_segment_pos and target_segment_pos (by default, positions
            start at 0 in each segment).

        Raises:
          ConfigError: Segment ids are passed only for inputs or only for targets.
        """
        x = self._activations(inputs, targets, key=key, **kwargs)
        outputs = self.softmax.compute_loss(x, labels, weights, key=key)
        return with_total_loss(self, outputs, weights)

    def encode(
        self,
        inputs: jax.Array,
        *,
        input_paddings: jax.Array | None = None,
        input_segment_ids: jax.Array | None = None,
        input_segment_pos: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the encoder's outputs [B, S, D]. See `compute_loss` for the arguments."""
        # Without an embedding for the encoder, inputs are embedded like targets.
        lookups = (self.encoder_embedding_lookup, self.decoder_embedding_lookup, self.softmax)
        x = embed(next(layer for layer in lookups if layer is not None), inputs)
        position_emb = self.position_emb or self.encoder_position_emb
        positions = positions_in_segments(input_segment_pos, input_segment_ids)
        x, _ = self.encoder(
            with_positions(position_emb, x, positions),
            positions=positions,
            segment_ids=_segments(input_segment_ids, input_paddings),
            paddings=input_paddings,
            key=key,
        )
        return self.encoder_ln(x)

    def decode(
        self,
        targets: jax.Array,
        *,
        encoded: jax.Array | None = None,
        input_paddings: jax.Array | None = None,
        input_segment_ids: jax.Array | None = None,
        input_segment_pos: jax.Array | None = None,
        target_paddings: jax.Array | None = None,
        target_segment_ids: jax.Array | None = None,
        target_segment_pos: jax.Array | None = None,
        key: jax.Array | None = None,
        cache: Any = None,
    ) -> tuple[jax.Array, Any]:
        """Returns the softmax's inputs [B, T, D] and the decoder's cache.

        If a cache is passed, the targets are written to the cache at `target_segment_pos`, and only
        the first call needs `encoded`. Arguments that are not listed are those of `compute_loss`.

        Args:
          targets: Int [B, T].
          encoded: Outputs of the encoder, [B, S, D].
          key: Random key for dropout. If None, nothing is dropped.
          cache: Cache from `init_cache`, or None.

        Raises:
          ConfigError: Both a cache and segment ids are passed.
        """
        require_one_segment(self, cache, input_segment_ids)
        require_one_segment(self, cache, target_segment_ids)
        lookup = self.decoder_embedding_lookup
        x = embed(self.softmax if lookup is None else lookup, targets)
        position_emb = self.position_emb or self.decoder_position_emb
        # With a cache, each row is one segment.
        segments = {}
        if cache is None:
            segments = {
                "segment_ids": _segments(target_segment_ids, target_paddings),
                "encoded_segment_ids": _segments(input_segment_ids, input_paddings),
                "encoded_positions": positions_in_segments(input_segment_pos, input_segment_ids),
            }
        positions = positions_in_segments(target_segment_pos, target_segment_ids)
        x, cache = self.decoder(
            with_positions(position_emb, x, positions),
            positions=positions,
            paddings=target_paddings,
            encoded=encoded,
            encoded_paddings=input_paddings,
            **segments,
            key=key,
            cache=cache,
        )
        return self.decoder_ln(x), cache

    def init_cache(self, batch_size: int, max_seq_length: int, *, encoded_length: int) -> Any:
        """Returns an empty cache for the decoder.

        Raises:
          ConfigError: max_seq_length exceeds the number of learned positions.
        """
        position_emb = self.position_emb or self.decoder_position_emb
        if position_emb is not None:
            position_emb.check_length(max_seq_length)
        return self.decoder.init_cache(
            batch_size, max_seq_length, self.fprop_dtype, encoded_length=encoded_length
        )

    def given(
        self, inputs: jax.Array, *, input_paddings: jax.Array | None = None
    ) -> "ConditionedDecoder":
        """Returns a language model of targets that is conditioned on `inputs` [B, S]."""
        encoded = self.encode(inputs, input_paddings=input_paddings)
        return ConditionedDecoder(self, encoded, input_paddings)

    def _activations(
        self, inputs: jax.Array, targets: jax.Array, key: jax.Array | None = None, **kwargs: Any
    ) -> jax.Array:
        if (kwargs.get("input_segment_ids") is None) != (kwargs.get("target_segment_ids") is None):
            raise ConfigError(
                "TransformerEncoderDecoder received only one of input_segment_ids and "
                "target_segment_ids, but targets see only the inputs of their segment. Pass both "
                "or neither."
            )
        encoder_key, decoder_key = split_keys(key, 2)
        encode_kwargs = {name: x for name, x in kwargs.items() if name.startswith("input_")}
        encoded = self.encode(inputs, **encode_kwargs, key=encoder_key)
        return self.decode(targets, encoded=encoded, key=decoder_key, **kwargs)[0]


def _segments(segment_ids: jax.Array | None, paddings: jax.Array | None) -> jax.Array | None:
    """Returns segment_ids or, if they are None, 1 for tokens and 0 for padding."""
    if segment_ids is None and paddings is not None:
        return (1.0 - paddings).astype(jnp.int32)
    return segment_ids


@dataclasses.dataclass(frozen=True)
class ConditionedDecoder:
    """A language model of target tokens, conditioned on a batch of inputs, for `decode`.

    Attributes:
      model: The encoder-decoder.
      encoded: The outputs [B, S, D] of the model's encoder.
      input_paddings: Float [B, S], 1.0 for padding.
    """

    model: TransformerEncoderDecoder
    encoded: jax.Array
    input_paddings: jax.Array | None

    def init_cache(self, batch_size: int, max_seq_length: int) -> Any:
        """Returns a cache that contains the inputs, or an empty cache if batch sizes differ."""
        length = self.encoded.shape[1]
        cache = self.model.init_cache(batch_size, max_seq_length, encoded_length=length)
        if batch_size != self.encoded.shape[0]:
            return cache  # Only the shapes of such a cache are used.
        # A call with one padding token stores the inputs; the first real token overwrites the
        # padding token.
        padding = jnp.zeros((batch_size, 1), jnp.int32)
        _, cache = self.model.decode(
            padding,
            encoded=self.encoded,
            input_paddings=self.input_paddings,
            target_paddings=jnp.ones(padding.shape, jnp.float32),
            target_segment_pos=padding,
            cache=cache,
        )
        return cache

    def __call__(
        self,
        ids: jax.Array,
        *,
        positions: jax.Array | None = None,
        paddings: jax.Array | None = None,
        cache: Any,
    ) -> tuple[jax.Array, Any]:
        """Returns float32 logits [B, T, V] and the cache, updated with these targets."""
        model = rebuilt(self.model)
        x, cache = model.decode(
            ids, target_paddings=paddings, target_segment_pos=positions, cache=cache
        )
        return model.softmax(x), cache
