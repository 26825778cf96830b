"""Components that the language model and the encoder-decoder share: embeddings, stacks, losses."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.layers.base.base_layer import broadcast_as
from praxis_lite.layers.base.variables import aux_loss
from praxis_lite.layers.embedding.positional_embeddings import (
    PositionalEmbedding,
    TrainablePositionalEmbedding,
)
from praxis_lite.layers.stacking.repeats import Block, StackedTransformer, num_repeats

# B batch, T time, D model dims.


def embed(layer: Any, ids: jax.Array) -> jax.Array:
    """Embeds ids, [B, T] -> [B, T, D], with an embedding layer or an embedding softmax."""
    return getattr(layer, "emb_lookup", layer)(ids)


def position_embedding(
    template: Callable[..., Any] | None,
    max_seq_length: int | None,
    model_dims: int,
    *,
    rngs: nnx.Rngs,
) -> Any:
    """Builds a position embedding, which is learned if `max_seq_length` is set.

    Returns None if neither a template nor `max_seq_length` is set.
    """
    if max_seq_length is None:
        return None if template is None else template(embedding_dims=model_dims, rngs=rngs)
    if template in (None, PositionalEmbedding):
        template = TrainablePositionalEmbedding
    return template(max_seq_length=max_seq_length, embedding_dims=model_dims, rngs=rngs)


def positions_in_segments(
    positions: jax.Array | None, segment_ids: jax.Array | None
) -> jax.Array | None:
    """Returns `positions`, or by default positions that start at 0 in each segment.

    Args:
      positions: Int [B, T], or None for the default.
      segment_ids: Int [B, T], with contiguous segments. If None, each row is one segment, and the
        default positions are returned as None.
    """
    if positions is not None or segment_ids is None:
        return positions
    index_BT = jax.lax.broadcasted_iota(jnp.int32, segment_ids.shape, 1)
    begins_BT = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    # Subtract the index at which each token's segment begins.
    return index_BT - jax.lax.cummax(jnp.where(begins_BT, index_BT, 0), axis=1)


def with_positions(position_emb: Any, x: jax.Array, positions: jax.Array | None) -> jax.Array:
    """Adds position embeddings to embeddings x [B, T, D], unless `position_emb` is None."""
    if position_emb is None:
        return x
    return x + broadcast_as(position_emb(positions, seq_length=x.shape[1]), x)


def repeated_block(
    model: object,
    templates: Callable[..., Any] | Sequence[Callable[..., Any]],
    num_layers: int,
    *sizes: int,
    **settings: Any,
) -> tuple[Block, int]:
    """Returns (block, number of blocks) for a stack of layers.

    A sequence of templates is a pattern, which becomes one block.

    Raises:
      ConfigError: num_layers is not divisible by the length of the pattern; the message names the
        class of `model`.
    """
    if not isinstance(templates, Sequence):
        return functools.partial(templates, *sizes, **settings), num_layers
    num_blocks = num_repeats(model, templates, num_layers)
    pattern = [functools.partial(template, *sizes, **settings) for template in templates]
    return functools.partial(StackedTransformer, pattern, len(pattern)), num_blocks


def with_total_loss(
    model: nnx.Module,
    outputs: dict[str, jax.Array],
    weights: jax.Array,
    entropy_loss_weight: float | None = None,
) -> dict[str, jax.Array]:
    """Adds per-token losses, per-sequence losses and the total loss to a softmax's outputs."""
    weights = weights.astype(jnp.float32)
    outputs = dict(outputs)
    outputs["per_token_xent"] = outputs["per_example_xent"] * weights
    outputs["per_sequence_xent"] = jnp.sum(outputs["per_token_xent"], axis=-1)
    layers_aux_loss = aux_loss(model)
    outputs["aux_loss"] = jnp.zeros(()) if layers_aux_loss is None else layers_aux_loss
    total = outputs["avg_xent"]
    if entropy_loss_weight is not None:
        log_probs = outputs["log_probs"]
        negative_entropy = jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
        mean = jnp.sum(negative_entropy * weights) / jnp.maximum(jnp.sum(weights), 1e-6)
        outputs["avg_entropy_loss"] = mean
        total = total + entropy_loss_weight * mean
    outputs["total_loss"] = total if layers_aux_loss is None else total + layers_aux_loss
    return outputs
