"""The decoder-only language model. Names and structure are Pax's."""

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

# Which tokens a token sees: those before it; all; those before it and the whole prefix.
MODEL_TYPES = ("causal", "bidirectional", "prefix")


class TransformerLm(BaseLayer):
    """Returns float32 logits [B, T, V] of ids [B, T], and the cache; `compute_loss` the loss.

    Args:
      vocab_size: V.
      model_dims, hidden_dims, num_heads, dim_per_head, num_layers: sizes passed to the templates.
      max_seq_length: number of learned positions, which replace `position_emb_tpl`.
      max_positions: the longest accepted sequence, such as the length a rotary model was trained
        with; None: no limit for rotary positions and sines.
      model_type: "causal", "bidirectional" or "prefix" (a prefix sees all of itself).
      fprop_dtype: of the activations; weights stay float32, logits are float32.
      residual_dropout_prob: see Transformer.
      entropy_loss_weight: weight of the mean of sum(p log p), added to the loss.
      softmax_tpl: called with (V, D, rngs=) and, if it also embeds ids, fprop_dtype=.
      separate_embedding_tpl: embeds ids instead of the softmax; called as the softmax.
      position_emb_tpl: added to the embeddings, called with (D, rngs=); None: nothing is added, for
        rotary positions.
      transformer_layer_tpl: a block, called with (D, hidden_dims, num_heads, rngs=) and settings
        of Transformer; or several, a pattern repeated along the depth.
      stacked_transformer_tpl: called with (block, num blocks, rngs=); a pattern is one block.
      final_ln_tpl: the norm before the softmax; None: no norm.
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
        require_positive(
            self, vocab_size=vocab_size, model_dims=model_dims, num_layers=num_layers
        )
        if max_positions is not None:
            require_positive(self, max_positions=max_positions)
        require_choice("TransformerLm.model_type", model_type, MODEL_TYPES)
        require_floating(self, fprop_dtype=fprop_dtype)
        sizes, dtype = (vocab_size, model_dims), {"fprop_dtype": fprop_dtype}
        is_shared = separate_embedding_tpl is None
        self.softmax = softmax_tpl(*sizes, **(dtype if is_shared else {}), rngs=rngs)
        self.embedding_lookup = (
            None if is_shared else separate_embedding_tpl(*sizes, **dtype, rngs=rngs)
        )
        self.position_emb = position_embedding(
            position_emb_tpl, max_seq_length, model_dims, rngs=rngs
        )
        settings = {"dim_per_head": dim_per_head, "fold_padding_with_segment_mask": True}
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
        """The number of positions; None: no limit."""
        learned = getattr(self.position_emb, "max_seq_length", None)
        limits = [item for item in (learned, self.max_positions) if item is not None]
        return min(limits, default=None)

    def init_cache(self, batch_size: int, max_seq_length: int) -> Any:
        """Returns an empty cache for `batch_size` rows of up to `max_seq_length` tokens.

        Raises:
          ConfigError: there are fewer learned positions, or tokens see later ones.
        """
        if self.model_type != "causal":
            raise ConfigError(
                f"TransformerLm.model_type is {self.model_type!r}: a later token changes what "
                "earlier ones give, so there is no cache. Decode with a causal model."
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

        With a cache the ids are appended to it at their positions, and the logits equal those of a
        call with the complete sequence.

        Args:
          ids: int [B, T].
          positions: int [B, T], consecutive in each segment; None: from 0 in each.
          segment_ids: int [B, T], of packed rows: a token sees its segment; 0 is padding.
          paddings: [B, T], 1.0 for padding.
          inputs_indicator: [B, T] of model_type "prefix", 1 for a token of the prefix.
          key: enables dropout.
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
        """Returns the loss of predicting `labels`, and its parts, by Pax's names.

        Args:
          labels, weights: int and float [B, T]: the token after each, and how much it counts.
          others: as in `__call__`.

        Returns:
          What the softmax's `compute_loss` returns, and per_token_xent [B, T], per_sequence_xent
          [B], aux_loss (the sum of the layers') and total_loss, which is to be minimised. The
          layers' AuxLoss and Summary variables hold what this pass reports.
        """
        x, _ = self._activations(ids, positions, segment_ids, paddings, inputs_indicator, key)
        outputs = self.softmax.compute_loss(x, labels, weights, key=key)
        return with_total_loss(self, outputs, weights, self.entropy_loss_weight)

    def _activations(
        self, ids: jax.Array, positions: jax.Array | None, segment_ids: jax.Array | None,
        paddings: jax.Array | None, inputs_indicator: jax.Array | None, key: jax.Array | None,
        cache: Any = None,
    ) -> tuple[jax.Array, Any]:
        """Returns the softmax's inputs, [B, T, D], and the cache."""
        if (inputs_indicator is None) == (self.model_type == "prefix"):
            raise ConfigError(
                f"TransformerLm.model_type is {self.model_type!r}, and inputs_indicator is "
                f"{'missing' if inputs_indicator is None else 'given'}. It marks the tokens of "
                'the prefix, and only model_type "prefix" takes it.'
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
                f"{length} tokens (what is decoded included). Shorten seq_len, the prompts or "
                "max_decode_steps; or, to go beyond what the model was trained for, --set "
                f"task.model.max_positions={length}."
            )


def _prefix_mask(
    inputs_indicator: jax.Array, segment_ids: jax.Array | None, paddings: jax.Array | None
) -> jax.Array:
    """Returns the atten_mask [B, 1, T, T] by which tokens see their segment's prefix and past."""
    after_prefix = convert_paddings_to_mask((inputs_indicator <= 0).astype(jnp.float32))
    mask = jnp.maximum(causal_mask(inputs_indicator.shape[1]), after_prefix)
    if segment_ids is None and paddings is not None:
        segment_ids = paddings < 0.5
    return mask if segment_ids is None else jnp.minimum(mask, segment_mask(segment_ids))
