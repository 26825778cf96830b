"""What cross-entropy, z-loss and accuracy need of a softmax: a few numbers per token."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# ... tokens, V classes.


class TokenStats(NamedTuple):
    """What cross-entropy, z-loss and accuracy are made of, per token: [...].

    Attributes:
      log_z: log sum exp of its logits, float32.
      label_logit: that of its label; 0 if the label is no class.
      logit_sum: of all its logits.
      argmax: the class of the greatest logit, the first of equals; int32.
    """

    log_z: jax.Array
    label_logit: jax.Array
    logit_sum: jax.Array
    argmax: jax.Array


def stats_of_logits(logits: jax.Array, class_ids: jax.Array | None) -> TokenStats:
    """Returns the statistics of logits [..., V]; without labels the label logits are 0."""
    if class_ids is None:
        label_logit = jnp.zeros(logits.shape[:-1], logits.dtype)
    else:
        classes = jnp.arange(logits.shape[-1]).reshape((1,) * class_ids.ndim + (-1,))
        # No one-hot, and no gather from logits whose classes are split.
        is_label = classes == class_ids[..., None]
        label_logit = jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
    highest, argmax = _highest(jax.lax.stop_gradient(logits))
    # As jax.nn.logsumexp, which would look for the highest logit in a pass of its own.
    shift = jnp.where(jnp.isfinite(highest), highest, 0.0)
    sum_exp = jnp.sum(jnp.exp(logits - shift[..., None]), axis=-1)
    return TokenStats(
        log_z=jnp.log(sum_exp) + shift,
        label_logit=label_logit,
        logit_sum=jnp.sum(logits, axis=-1),
        argmax=argmax,
    )


def _highest(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the highest logit and its class, the first of equals, in one pass: [...] each.

    As `jnp.argmax`, NaN is the highest of all.
    """

    def higher(best: tuple, other: tuple) -> tuple[jax.Array, jax.Array]:
        (a, i), (b, j) = best, other
        is_higher = (b > a) | (b != b)
        is_first = is_higher | ((b == a) & (j < i))
        return jnp.where(is_higher, b, a), jnp.where(is_first, j, i)

    classes = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    initial = (jnp.array(-jnp.inf, logits.dtype), jnp.array(0, jnp.int32))
    return jax.lax.reduce((logits, classes), initial, higher, (logits.ndim - 1,))


def cross_entropy(
    stats: TokenStats, class_ids: jax.Array, num_classes: int, label_smoothing_prob: float
) -> jax.Array:
    """Returns nats per token, [...]; without smoothing 0 for a label that is no class.

    Smoothing takes `label_smoothing_prob` from the label and spreads it over the other classes.
    """
    is_class = (class_ids >= 0) & (class_ids < num_classes)
    label_log_prob = jnp.where(is_class, stats.label_logit - stats.log_z, 0.0)
    if not label_smoothing_prob:
        return -label_log_prob
    other_prob = label_smoothing_prob / (num_classes - 1)
    log_prob_sum = stats.logit_sum - num_classes * stats.log_z
    label_prob = 1.0 - label_smoothing_prob - other_prob
    return -(label_prob * label_log_prob + other_prob * log_prob_sum)
