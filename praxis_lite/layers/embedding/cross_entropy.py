"""Cross-entropy from a few statistics of the logits per token."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# ... tokens, V classes.


class TokenStats(NamedTuple):
    """Statistics of logits for cross-entropy, z-loss and accuracy, per token: [...].

    Attributes:
      log_z: logsumexp of the logits, float32.
      label_logit: the logit of the label; 0 if the label is not a class.
      logit_sum: the sum of all logits.
      argmax: the class of the greatest logit, the first of equals; int32.
    """

    log_z: jax.Array
    label_logit: jax.Array
    logit_sum: jax.Array
    argmax: jax.Array


def stats_of_logits(logits: jax.Array, class_ids: jax.Array | None) -> TokenStats:
    """Returns the statistics of logits [..., V]; without labels the label logits are 0."""
    classes = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    if class_ids is None:
        label_logit = jnp.zeros(logits.shape[:-1], logits.dtype)
    else:
        # Neither a one-hot nor a gather, as the classes may be split.
        label_logit = jnp.sum(jnp.where(classes == class_ids[..., None], logits, 0.0), axis=-1)
    # As jax.nn.logsumexp and jnp.argmax (NaN is the highest), in one pass after that of the
    # maximum: XLA fuses sums over one array, but a separate argmax would be a third pass.
    fixed = jax.lax.stop_gradient(logits)
    highest = jnp.max(fixed, axis=-1, keepdims=True)
    is_highest = (fixed == highest) | (fixed != fixed)
    shift = jnp.where(jnp.isfinite(highest), highest, 0.0)
    return TokenStats(
        log_z=jnp.log(jnp.sum(jnp.exp(logits - shift), axis=-1)) + shift[..., 0],
        label_logit=label_logit,
        logit_sum=jnp.sum(logits, axis=-1),
        argmax=jnp.min(jnp.where(is_highest, classes, logits.shape[-1] - 1), axis=-1),
    )


def cross_entropy(
    stats: TokenStats, class_ids: jax.Array, num_classes: int, label_smoothing_prob: float
) -> jax.Array:
    """Returns nats per token, [...]; without smoothing 0 for a label that is not a class.

    Smoothing distributes `label_smoothing_prob` over the classes other than the label.
    """
    is_class = (class_ids >= 0) & (class_ids < num_classes)
    label_log_prob = jnp.where(is_class, stats.label_logit - stats.log_z, 0.0)
    if not label_smoothing_prob:
        return -label_log_prob
    other_prob = label_smoothing_prob / (num_classes - 1)
    log_prob_sum = stats.logit_sum - num_classes * stats.log_z
    label_prob = 1.0 - label_smoothing_prob - other_prob
    return -(label_prob * label_log_prob + other_prob * log_prob_sum)
