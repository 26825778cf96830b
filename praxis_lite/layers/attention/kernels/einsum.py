"""Attention with einsums, the reference: supports all options, and materializes all logits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from praxis_lite.layers.activations import soft_cap
from praxis_lite.layers.attention.masks import LARGE_NEGATIVE, AttentionMask
from praxis_lite.layers.stochastics import Dropout

# B batch, T queries, S keys, N query heads, G key/value heads, R query heads per key/value head
# (N = G R), K dims per head.


@dataclasses.dataclass(frozen=True)
class LogitOptions:
    """Options for the attention logits.

    Attributes:
      scale: Factor that multiplies the logits.
      cap: Logits become `cap * tanh(logits / cap)`. If 0.0, they are not capped.
      extra: An additional logit in the softmax, whose value vector is zero.
      zero_fully_masked: Whether fully masked queries output zeros. If False, these queries output
        the mean of all values, the result of a softmax over equal logits.
      float32_logits: Whether to compute logits and softmax in float32, as in Pax, instead of the
        queries' dtype.
    """

    scale: float = 1.0
    cap: float = 0.0
    extra: float | None = None
    zero_fully_masked: bool = False
    float32_logits: bool = True

    @property
    def averages(self) -> bool:
        """Whether fully masked queries output the mean of all values instead of zeros."""
        return self.extra is None and not self.zero_fully_masked

    @property
    def needs(self) -> dict[str, bool]:
        """Maps the name of each setting to whether the setting is in use."""
        return {
            "atten_logit_cap": self.cap > 0.0,
            "attention_extra_logit": self.extra is not None,
            "zero_fully_masked": self.zero_fully_masked,
            "float32_logits=False": not self.float32_logits,
        }

    def apply(self, logits: jax.Array) -> jax.Array:
        """Scales and caps logits."""
        return soft_cap(logits if self.scale == 1.0 else logits * self.scale, self.cap)


def einsum_attention(
    q_BTNK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    mask: AttentionMask,
    options: LogitOptions,
    *,
    bias: jax.Array | None = None,
    atten_mask: jax.Array | None = None,
    dropout: Dropout | None = None,
    key: jax.Array | None = None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Returns attention outputs [B, T, N, K].

    Args:
      q_BTNK: Scaled queries.
      k_BSGK: Keys; query head n attends to key head n // (N / G).
      v_BSGK: Values.
      mask: Mask of queries and keys.
      options: Options for the logits.
      bias: Float [B or 1, N, T, S], added to the logits before they are scaled and capped.
      atten_mask: Float [B or 1, 1 or N, 1 or T, S]. Keys are masked where it is below
        LARGE_NEGATIVE / 2. As in Pax, it is not added to the logits.
      dropout: Dropout for the attention probabilities.
      key: Random key for dropout. If None, nothing is dropped.
      sinks_N: Float [N], an additional logit per head, whose value vector is zero.
    """
    B, T, N, K = q_BTNK.shape
    S, G = k_BSGK.shape[1:3]
    dtype = jnp.float32 if options.float32_logits else q_BTNK.dtype
    product = functools.partial(jnp.einsum, preferred_element_type=dtype)
    # Grouped heads need an additional dim in the einsum, so that keys are not repeated per query
    # head.
    if G == N:
        logits_BNTS = product("btnk,bsnk->bnts", q_BTNK, k_BSGK)
    else:
        q_BTGRK = q_BTNK.reshape(B, T, G, N // G, K)
        logits_BNTS = product("btgrk,bsgk->bgrts", q_BTGRK, k_BSGK).reshape(B, N, T, S)
    if bias is not None:
        logits_BNTS += jnp.broadcast_to(bias, logits_BNTS.shape).astype(dtype)
    logits_BNTS = options.apply(logits_BNTS)
    visible = mask.visible(T, S)
    visible = None if visible is None else visible[:, None]
    if atten_mask is not None:
        seen = atten_mask >= 0.5 * LARGE_NEGATIVE
        visible = seen if visible is None else jnp.logical_and(*jnp.broadcast_arrays(visible, seen))
    if visible is not None:
        # Masked logits must be finite, so that a fully masked query gets equal probabilities
        # instead of NaN. LARGE_NEGATIVE would overflow in float16.
        unseen = max(LARGE_NEGATIVE, 0.7 * float(jnp.finfo(dtype).min))
        logits_BNTS = jnp.where(visible, logits_BNTS, jnp.asarray(unseen, dtype))
    extra: float | jax.Array | None = options.extra
    if sinks_N is not None:
        extra = sinks_N.astype(dtype)[None, :, None, None]
    probs_BNTS = _softmax(logits_BNTS, extra).astype(v_BSGK.dtype)
    if dropout is not None:
        probs_BNTS = dropout(probs_BNTS, key)
    if G == N:
        encoded_BTNK = jnp.einsum("bnts,bsnk->btnk", probs_BNTS, v_BSGK)
    elif G == 1:  # With a group dim, XLA's CPU backend would first transpose the values.
        encoded_BTNK = jnp.einsum("bnts,bsk->btnk", probs_BNTS, v_BSGK[:, :, 0])
    else:
        probs_BGRTS = probs_BNTS.reshape(B, G, N // G, T, S)
        encoded_BTNK = jnp.einsum("bgrts,bsgk->btgrk", probs_BGRTS, v_BSGK).reshape(B, T, N, K)
    if options.zero_fully_masked and visible is not None:
        sees_any = jnp.any(visible, axis=-1, keepdims=True)  # [B or 1, 1 or N, T or 1, 1]
        encoded_BTNK = jnp.where(sees_any.transpose(0, 2, 1, 3), encoded_BTNK, 0.0)
    return encoded_BTNK


def _softmax(logits: jax.Array, extra: float | jax.Array | None) -> jax.Array:
    if extra is None:
        return jax.nn.softmax(logits, axis=-1)
    highest = jnp.max(logits, axis=-1, keepdims=True)
    highest = jax.lax.stop_gradient(jnp.maximum(highest, extra))
    exp = jnp.exp(logits - highest)
    return exp / (jnp.sum(exp, axis=-1, keepdims=True) + jnp.exp(extra - highest))
