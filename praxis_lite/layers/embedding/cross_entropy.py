"""Cross-entropy computed from a few statistics of the logits per token."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# ... tokens, V classes.


class TokenStats(NamedTuple):
    """Per-token statistics of the logits, [...], for cross-entropy, z-loss and accuracy.

    Attributes:
      log_z: Logsumexp of the logits, float32.
      label_logit: Logit of the label; 0 if the label is not a class.
      logit_sum: Sum of all logits.
      argmax: First class with the greatest logit, int32.
    """

    log_z: jax.Array
    label_logit: jax.Array
    logit_sum: jax.Array
    argmax: jax.Array


def stats_of_logits(logits: jax.Array, class_ids: jax.Array | None) -> TokenStats:
    """Computes the statistics of logits [..., V]; without labels, label logits are 0."""
    classes = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    if class_ids is None:
        label_logit = jnp.zeros(logits.shape[:-1], logits.dtype)
    else:
        # Avoid one-hot matmuls and gathers, because the classes may be sharded.
        label_logit = jnp.sum(jnp.where(classes == class_ids[..., None], logits, 0.0), axis=-1)
    # Equivalent to jax.nn.logsumexp and jnp.argmax (where NaN is the maximum), but with two passes
    # over the logits: one for the maximum, and one for the reductions below, which XLA fuses. A
    # separate argmax would be a third pass.
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
    """Returns the cross-entropy per token in nats, [...]; 0 for labels that are not classes.

    With smoothing, `label_smoothing_prob` is distributed over the classes other than the label.

    Args:
      stats: Statistics of the logits.
      class_ids: Labels, int [...].
      num_classes: Number of classes V.
      label_smoothing_prob: Probability that smoothing removes from the label. If 0, labels are not
        smoothed.
    """
    is_class = (class_ids >= 0) & (class_ids < num_classes)
    label_log_prob = jnp.where(is_class, stats.label_logit - stats.log_z, 0.0)
    if not label_smoothing_prob:
        return -label_log_prob
    other_prob = label_smoothing_prob / (num_classes - 1)
    log_prob_sum = stats.logit_sum - num_classes * stats.log_z
    label_prob = 1.0 - label_smoothing_prob - other_prob
    return -(label_prob * label_log_prob + other_prob * log_prob_sum)
