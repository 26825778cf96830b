"""The decoder-only language model, with Pax's names and structure."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.errors import ConfigError, require_choice
from praxis_lite.layers.attention.masks import (
    causal_mask,
    convert_paddings_to_mask,
    segment_mask,
)
from praxis_lite.layers.base.base_layer import BaseLayer
from praxis_lite.layers.base.calls import require_floating, require_positive
from praxis_lite.layers.embedding.positional_embeddings import PositionalEmbedding
from praxis_lite.layers.embedding.softmaxes import SharedEmbeddingSoftmax
from praxis_lite.layers.normalizations import LayerNorm
from praxis_lite.layers.stacking.repeats import Repeat
from praxis_lite.layers.transformer.model_parts import (
    embed,
    position_embedding,
    positions_in_segments,
    repeated_block,
    with_positions,
    with_total_loss,
)
from praxis_lite.layers.transformer.transformers import Transformer

# B batch, T time, V classes.

# A token attends to earlier tokens, to all tokens, or to earlier tokens and the complete prefix.
MODEL_TYPES = ("causal", "bidirectional", "prefix")


class TransformerLm(BaseLayer):
    """Maps ids [B, T] to float32 logits [B, T, V] and a cache; `compute_loss` returns the loss.

    Args:
      vocab_size: V.
      model_dims: Size D of the embeddings and the residual stream.
      hidden_dims: Hidden size of the blocks' feed-forward layers.
      num_heads: Number of attention heads per block.
      num_layers: Number of blocks.
      dim_per_head: Size of a head. If None, the block's default.
      max_seq_length: Number of learned positions, which replace `position_emb_tpl`.
      max_positions: Maximum length of a sequence, such as the training length of a rotary model. If
        None, rotary and sinusoidal positions have no limit.
      model_type: "causal", "bidirectional" or "prefix" (the tokens in a prefix attend to each
        other).
      fprop_dtype: Dtype of activations; weights and logits are float32.
      residual_dropout_prob: See Transformer.
      entropy_loss_weight: Weight of the mean negative entropy, sum(p log p), in the loss.
      softmax_tpl: Builds the softmax from (V, D, rngs=), and fprop_dtype= if it also embeds ids.
      separate_embedding_tpl: Builds a separate embedding from (V, D, fprop_dtype=, rngs=). If None,
        the softmax embeds ids.
      position_emb_tpl: Builds the position embedding, which is added to the embeddings, from
        (D, rngs=). If None, nothing is added, as required for rotary positions.
      transformer_layer_tpl: Builds a block from (D, hidden_dims, num_heads, rngs=) and settings of
        Transformer. A sequence of templates is a pattern that repeats along the depth.
      stacked_transformer_tpl: Builds the stack from (block, number of blocks, rngs=), where a
        pattern is one block.
      final_ln_tpl: Builds the norm before the softmax. If None, there is no norm.
    """

    cache_skips_padding = True

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
        max_positions: int | None = None,
        model_type: str = "causal",
        fprop_dtype: jnp.dtype = jnp.float32,
        residual_dropout_prob: float = 0.0,
        entropy_loss_weight: float | None = None,
        softmax_tpl: Callable[..., Any] = SharedEmbeddingSoftmax,
        separate_embedding_tpl: Callable[..., Any] | None = None,
        position_emb_tpl: Callable[..., Any] | None = PositionalEmbedding,
        transformer_layer_tpl: Callable[..., Any] | Sequence[Callable[..., Any]] = Transformer,
        stacked_transformer_tpl: Callable[..., Any] = Repeat,
        final_ln_tpl: Callable[..., Any] | None = LayerNorm,
        rngs: nnx.Rngs,
    ):
        require_positive(self, vocab_size=vocab_size, model_dims=model_dims, num_layers=num_layers)
        if max_positions is not None:
            require_positive(self, max_positions=max_positions)
        require_choice("TransformerLm.model_type", model_type, MODEL_TYPES)
        require_floating(self, fprop_dtype=fprop_dtype)
        sizes, dtype = (vocab_size, model_dims), {"fprop_dtype": fprop_dtype}
        is_shared = separate_embedding_tpl is None
        self.softmax = softmax_tpl(*sizes, **(dtype if is_shared else {}), rngs=rngs)
        self.embedding_lookup = (
            None
            if separate_embedding_tpl is None
            else separate_embedding_tpl(*sizes, **dtype, rngs=rngs)
        )
        self.position_emb = position_embedding(
            position_emb_tpl, max_seq_length, model_dims, rngs=rngs
        )
        settings: dict[str, Any] = {
            "dim_per_head": dim_per_head,
            "fold_padding_with_segment_mask": True,
        }
        if model_type != "causal":
            settings["mask_self_attention"] = False
        if residual_dropout_prob:
            settings["residual_dropout_prob"] = residual_dropout_prob
        blocks = repeated_block(
            self, transformer_layer_tpl, num_layers, model_dims, hidden_dims, num_heads, **settings
        )
        self.transformer = stacked_transformer_tpl(*blocks, rngs=rngs)
        self.final_ln = None if final_ln_tpl is None else final_ln_tpl(model_dims, rngs=rngs)
        self.model_type, self.fprop_dtype, self.vocab_size = model_type, fprop_dtype, vocab_size
        self.entropy_loss_weight, self.max_positions = entropy_loss_weight, max_positions

    @property
    def num_positions(self) -> int | None:
        """The maximum number of positions, or None if there is no limit."""
        learned = getattr(self.position_emb, "max_seq_length", None)
        limits = [item for item in (learned, self.max_positions) if item is not None]
        return min(limits, default=None)

    def init_cache(self, batch_size: int, max_seq_length: int) -> Any:
        """Returns an empty cache for `batch_size` sequences of up to `max_seq_length` tokens.

        Raises:
          ConfigError: max_seq_length exceeds the number of positions, or the model is not causal.
        """
        if self.model_type != "causal":
            raise ConfigError(
                f"TransformerLm.model_type {self.model_type!r} does not support a cache, because "
                "later tokens change the outputs of earlier tokens. Decode with a causal model."
            )
        if self.position_emb is not None:
            self.position_emb.check_length(max_seq_length)
        self._check_length(max_seq_length)
        return self.transformer.init_cache(batch_size, max_seq_length, self.fprop_dtype)

    def __call__(
        self,
        ids: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        paddings: jax.Array | None = None,
        inputs_indicator: jax.Array | None = None,
        key: jax.Array | None = None,
        cache: Any = None,
    ) -> tuple[jax.Array, Any]:
        """Returns the logits and the cache.

        If a cache is passed, the ids are written to the cache at their positions, and the logits
        are the same as in a call with the complete sequence.

        Args:
          ids: Int [B, T].
          positions: Int [B, T], consecutive in each segment. If None, positions start at 0 in each
            segment.
          segment_ids: Int [B, T], for packed sequences. A token attends only to its segment; 0
            marks padding.
          paddings: Float [B, T], 1.0 for padding.
          inputs_indicator: [B, T], 1 for tokens in the prefix; only for model_type "prefix".
          key: Random key for dropout. If None, nothing is dropped.
          cache: Cache from `init_cache`, or None.
        """
        x, cache = self._activations(
            ids, positions, segment_ids, paddings, inputs_indicator, key, cache
        )
        return self.softmax(x), cache

    def compute_loss(
        self,
        ids: jax.Array,
        labels: jax.Array,
        weights: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        paddings: jax.Array | None = None,
        inputs_indicator: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> dict[str, jax.Array]:
        """Returns the loss for predicting `labels`, and its components, with Pax's names.

        Arguments that are not listed are those of `__call__`.

        Args:
          labels: Int [B, T], the token that follows each id.
          weights: Float [B, T], the weight of each label in the loss.

        Returns:
          The outputs of the softmax's `compute_loss`, per_token_xent [B, T], per_sequence_xent [B],
          aux_loss (the sum over layers) and total_loss, the loss to minimize. The layers' AuxLoss
          and Summary variables contain the values of this pass.
        """
        x, _ = self._activations(ids, positions, segment_ids, paddings, inputs_indicator, key)
        outputs = self.softmax.compute_loss(x, labels, weights, key=key)
        return with_total_loss(self, outputs, weights, self.entropy_loss_weight)

    def _activations(
        self,
        ids: jax.Array,
        positions: jax.Array | None,
        segment_ids: jax.Array | None,
        paddings: jax.Array | None,
        inputs_indicator: jax.Array | None,
        key: jax.Array | None,
        cache: Any = None,
    ) -> tuple[jax.Array, Any]:
        """Returns the softmax's inputs [B, T, D] and the cache."""
        if (inputs_indicator is None) == (self.model_type == "prefix"):
            state = "missing" if inputs_indicator is None else "passed"
            raise ConfigError(
                f"TransformerLm.model_type is {self.model_type!r}, but inputs_indicator, which "
                f"marks the tokens of a prefix, is {state}. Pass inputs_indicator if and only if "
                'model_type is "prefix".'
            )
        self._check_length(ids.shape[-1])
        positions = positions_in_segments(positions, segment_ids)
        x = embed(self.softmax if self.embedding_lookup is None else self.embedding_lookup, ids)
        x = with_positions(self.position_emb, x, positions)
        inputs = {"positions": positions, "segment_ids": segment_ids, "paddings": paddings}
        if inputs_indicator is not None:
            inputs["atten_mask"] = _prefix_mask(inputs_indicator, segment_ids, paddings)
        x, cache = self.transformer(x, key=key, cache=cache, **inputs)
        return x if self.final_ln is None else self.final_ln(x), cache

    def _check_length(self, length: int) -> None:
        if self.max_positions is not None and length > self.max_positions:
            raise ConfigError(
                f"TransformerLm.max_positions is {self.max_positions}, but a sequence has up to "
                f"{length} tokens (including decoded tokens). Reduce seq_len, max_decode_steps or "
                "the length of the prompts. To exceed the length that the model was trained with, "
                f"use --set task.model.max_positions={length}."
            )


def _prefix_mask(
    inputs_indicator: jax.Array, segment_ids: jax.Array | None, paddings: jax.Array | None
) -> jax.Array:
    """Returns an atten_mask [B, 1, T, T] that allows the past and the prefix in each segment."""
    after_prefix = convert_paddings_to_mask((inputs_indicator <= 0).astype(jnp.float32))
    # Visible keys have the larger value: a maximum allows keys that either mask allows, and a
    # minimum allows keys that both allow.
    mask = jnp.maximum(causal_mask(inputs_indicator.shape[1]), after_prefix)
    if segment_ids is None and paddings is not None:
        segment_ids = paddings < 0.5
    return mask if segment_ids is None else jnp.minimum(mask, segment_mask(segment_ids))
