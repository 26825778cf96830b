"""Transformer blocks (self-attention, cross-attention, feed-forward), with Pax's names."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.errors import ConfigError
from praxis_lite.layers.attention.attentions import DotProductAttention
from praxis_lite.layers.attention.masks import HIDE_LATER
from praxis_lite.layers.base.base_layer import BaseLayer
from praxis_lite.layers.normalizations import LayerNorm
from praxis_lite.layers.stacking.residual_branches import (
    check_norm_policy,
    normed_branch,
    split_keys,
)
from praxis_lite.layers.stochastics import Dropout, StochasticResidual
from praxis_lite.layers.transformer.feed_forwards import TransformerFeedForward

# B batch, T time, S time of the encoder's outputs, D model dims.
_KEYS = (
    "self_attention",
    "self_attention_dropout",
    "self_attention_droppath",
    "cross_attention",
    "cross_attention_dropout",
    "cross_attention_droppath",
    "ff_layer",
)


def _if_set(**settings: Any) -> dict[str, Any]:
    """Drops settings that are None or 0.0, because sublayer templates may not accept them."""
    return {name: value for name, value in settings.items() if value not in (None, 0.0)}


def _has_cache(layer: Any) -> bool:
    return hasattr(type(layer), "init_cache")


def _outputs_and_cache(layer: Any, result: Any) -> tuple[jax.Array, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise ConfigError(
            f"{type(layer).__name__} has an init_cache, but its call returned a "
            f"{type(result).__name__}. Return (outputs, cache), where cache is None if the call "
            "received no cache."
        )
    return result


class Transformer(BaseLayer):
    """A transformer block: attention, optional cross-attention and a feed-forward layer.

    Templates are called with the block's dims, its norm policy, the probabilities that are not 0,
    and `rngs`.

    Args:
      input_dims: D.
      hidden_dims: Hidden size of the feed-forward layer.
      num_heads: Number of attention heads.
      dim_per_head: Size of a head. If None, attention's default.
      norm_policy: Norm policy of all sublayers; see TransformerFeedForward.
      atten_dropout_prob: Dropout probability of the attention probabilities.
      residual_dropout_prob: Dropout probability of the outputs that are added to the residual
        stream.
      relu_dropout_prob: Dropout probability of the hidden activations.
      residual_droppath_prob: Probability that an example skips a sublayer (stochastic depth).
      mask_self_attention: If True, tokens do not attend to later tokens. If False, every token
        attends to all tokens, as in an encoder. In Pax, the stack has this setting, and the default
        is False. None means True, unless the call passes an atten_mask, which then replaces the
        causal mask, as in Pax's block.
      use_cross_attention: Whether to attend to `encoded` after self-attention.
      allow_skip_cross_attention: Whether to skip cross-attention if there is no `encoded` and no
        cache.
      fold_padding_with_segment_mask: Whether padding is a separate segment, whose tokens attend to
        each other, as in Pax's TransformerLm. If False, a padding token attends equally to all
        tokens. Other tokens never attend to padding.
      is_parallel: Whether attention and the feed-forward layer receive the same inputs, and their
        outputs are added (GPT-J, arXiv:2204.06745).
      ln_tpl: Builds a norm, also in the feed-forward layer, from (input_dims, rngs=).
      tr_atten_tpl: Builds attention from (input_dims, num_heads, dim_per_head=, rngs=).
      cross_atten_tpl: Builds cross-attention from the same arguments and is_cross_attention=True.
        If None, tr_atten_tpl is used.
      tr_fflayer_tpl: Builds the feed-forward layer from (input_dims, hidden_dims, ln_tpl=, rngs=).
        If the layer has an `init_cache`, its call also receives cache= and returns (outputs,
        cache).
    """

    cache_skips_padding = True

    def __init__(
        self,
        input_dims: int,
        hidden_dims: int,
        num_heads: int,
        *,
        dim_per_head: int | None = None,
        norm_policy: str = "pre",
        atten_dropout_prob: float = 0.0,
        residual_dropout_prob: float = 0.0,
        relu_dropout_prob: float = 0.0,
        residual_droppath_prob: float = 0.0,
        mask_self_attention: bool | None = None,
        use_cross_attention: bool = False,
        allow_skip_cross_attention: bool = False,
        fold_padding_with_segment_mask: bool = False,
        is_parallel: bool = False,
        ln_tpl: Callable[..., Any] = LayerNorm,
        tr_atten_tpl: Callable[..., Any] = DotProductAttention,
        cross_atten_tpl: Callable[..., Any] | None = None,
        tr_fflayer_tpl: Callable[..., Any] = TransformerFeedForward,
        rngs: nnx.Rngs,
    ):
        check_norm_policy(norm_policy, self)
        if is_parallel and (norm_policy == "post_skip" or use_cross_attention):
            other = "use_cross_attention" if use_cross_attention else "norm_policy 'post_skip'"
            raise ConfigError(f"Transformer.is_parallel cannot be combined with {other}.")
        self.is_parallel = is_parallel

        def norm(is_used: bool) -> Any:
            return ln_tpl(input_dims, rngs=rngs) if is_used else None

        def attention(template: Callable[..., Any], **settings: Any) -> Any:
            settings |= _if_set(atten_dropout_prob=atten_dropout_prob)
            return template(input_dims, num_heads, dim_per_head=dim_per_head, **settings, rngs=rngs)

        is_hybrid, crosses = norm_policy == "primer_hybrid", use_cross_attention
        self.layer_norm = norm(not is_hybrid)
        self.pre_layer_norm, self.post_layer_norm = norm(is_hybrid), norm(is_hybrid)
        self.self_attention = attention(
            tr_atten_tpl, **({"is_causal": False} if mask_self_attention is False else {})
        )
        self.cross_layer_norm = norm(crosses and not is_hybrid)
        self.pre_cross_layer_norm = norm(crosses and is_hybrid)
        self.post_cross_layer_norm = norm(crosses and is_hybrid)
        self.cross_attention = (
            attention(cross_atten_tpl or tr_atten_tpl, is_cross_attention=True) if crosses else None
        )
        # Pass only settings that differ from the defaults, because a template may lack the others.
        self.ff_layer = tr_fflayer_tpl(
            input_dims,
            hidden_dims,
            ln_tpl=ln_tpl,
            **({} if norm_policy == "pre" else {"norm_policy": norm_policy}),
            **({"add_skip_connection": False} if is_parallel else {}),
            **_if_set(
                relu_dropout_prob=relu_dropout_prob,
                residual_dropout_prob=residual_dropout_prob,
                residual_droppath_prob=residual_droppath_prob,
            ),
            rngs=rngs,
        )
        self.residual_dropout = Dropout(residual_dropout_prob)
        self.residual_droppath = StochasticResidual(survival_prob=1.0 - residual_droppath_prob)
        self.norm_policy, self.mask_self_attention = norm_policy, mask_self_attention
        self.allow_skip_cross_attention = allow_skip_cross_attention
        self.fold_padding_with_segment_mask = fold_padding_with_segment_mask

    def init_cache(
        self,
        batch_size: int,
        max_seq_length: int,
        dtype: Any,
        *,
        encoded_length: int | None = None,
    ) -> Any:
        """Returns attention's empty cache, or a dict of caches if several sublayers have a cache.

        The keys of the dict are the names of the sublayers' attributes.
        """
        sizes = batch_size, max_seq_length, dtype
        caches = {"self_attention": self.self_attention.init_cache(*sizes)}
        if self.cross_attention is not None and encoded_length is not None:
            caches["cross_attention"] = self.cross_attention.init_cache(
                *sizes, encoded_length=encoded_length
            )
        if _has_cache(self.ff_layer):
            caches["ff_layer"] = self.ff_layer.init_cache(*sizes)
        return caches if self._has_caches else caches["self_attention"]

    @property
    def _has_caches(self) -> bool:
        """Whether several sublayers have a cache, so that the block's cache is a dict."""
        return self.cross_attention is not None or _has_cache(self.ff_layer)

    def __call__(
        self,
        inputs: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        paddings: jax.Array | None = None,
        atten_mask: jax.Array | None = None,
        encoded: jax.Array | None = None,
        encoded_paddings: jax.Array | None = None,
        encoded_segment_ids: jax.Array | None = None,
        encoded_positions: jax.Array | None = None,
        key: jax.Array | None = None,
        cache: Any = None,
    ) -> tuple[jax.Array, Any]:
        """Returns outputs [B, T, D] and the cache, updated with these tokens.

        Arguments that are not listed are those of DotProductAttention.

        Args:
          inputs: Float [B, T, D].
          paddings: [B, T]; 1.0 for padding. Also passed to the feed-forward layer.
          atten_mask: Float [B or 1, 1 or N, 1 or T, T] for self-attention, LARGE_NEGATIVE for
            masked tokens. As in Pax, self-attention then ignores paddings, segment_ids and the
            order of tokens.
          encoded: The encoder's outputs [B, S, D].
          key: Random key for dropout. If None, nothing is dropped.
          cache: Cache from `init_cache`, or None.

        Raises:
          ConfigError: An atten_mask is passed although mask_self_attention is True, or the block
            attends to `encoded`, which is missing.
        """
        if atten_mask is not None and self.mask_self_attention is True:
            raise ConfigError(
                "Transformer.mask_self_attention is True, but the call passes an atten_mask, which "
                f"would replace the causal mask, as in Pax. Omit the setting, and {HIDE_LATER}."
            )
        keys = dict(zip(_KEYS, split_keys(key, len(_KEYS)), strict=True))
        local = {"segment_ids": segment_ids, "paddings": paddings}
        if atten_mask is not None:
            local = {"atten_mask": atten_mask}
        elif cache is None and paddings is not None:
            # As in Pax's stacks, padding is in segment 0, and attends to that segment.
            is_masked = self.mask_self_attention is not False
            if segment_ids is None and (self.fold_padding_with_segment_mask or is_masked):
                local["segment_ids"] = (1.0 - paddings).astype(jnp.int32)
            if self.fold_padding_with_segment_mask:
                local["paddings"] = None
        has_caches = self._has_caches
        caches = dict(cache) if has_caches and cache is not None else {"self_attention": cache}

        def attend(name: str, x: jax.Array, **inputs: Any) -> jax.Array:
            # Omit arguments that are None: a layer that replaces attention may not accept them.
            inputs = {name: value for name, value in inputs.items() if value is not None}
            outputs, caches[name] = getattr(self, name)(
                x, key=keys[name], cache=caches.get(name), **inputs
            )
            return outputs

        def join(x: jax.Array, attended: jax.Array, name: str) -> jax.Array:
            attended = self.residual_dropout(attended, keys[f"{name}_dropout"])
            return self.residual_droppath(x, attended, keys[f"{name}_droppath"])

        # Self-attention, then cross-attention, then the feed-forward layer. `normed_branch` adds
        # norms, and `join` adds the skip connection.
        outputs = normed_branch(
            self.norm_policy,
            (self.layer_norm, self.pre_layer_norm, self.post_layer_norm),
            inputs,
            lambda x: attend("self_attention", x, positions=positions, **local),
            functools.partial(join, name="self_attention"),
            key,
        )
        if self._crosses(encoded, caches):
            across = {
                "positions": positions,
                "segment_ids": segment_ids,
                "encoded": encoded,
                "encoded_paddings": encoded_paddings,
                "encoded_segment_ids": encoded_segment_ids,
                "encoded_positions": encoded_positions,
            }
            outputs = normed_branch(
                self.norm_policy,
                (self.cross_layer_norm, self.pre_cross_layer_norm, self.post_cross_layer_norm),
                outputs,
                lambda x: attend("cross_attention", x, **across),
                functools.partial(join, name="cross_attention"),
                key,
            )
        rows = {"paddings": paddings, "segment_ids": segment_ids, "key": keys["ff_layer"]}
        # A parallel block reads the same inputs in both layers and adds their outputs.
        x = inputs if self.is_parallel else outputs
        if _has_cache(self.ff_layer):
            ff_outputs, caches["ff_layer"] = _outputs_and_cache(
                self.ff_layer, self.ff_layer(x, **rows, cache=caches.get("ff_layer"))
            )
        else:
            ff_outputs = self.ff_layer(x, **rows)
        outputs = outputs + ff_outputs if self.is_parallel else ff_outputs
        if cache is None:
            return outputs, None
        return outputs, caches if has_caches else caches["self_attention"]

    def _crosses(self, encoded: jax.Array | None, caches: dict[str, Any]) -> bool:
        if self.cross_attention is None:
            return False
        # In decoding, the cache may contain `encoded`.
        if encoded is not None or "cross_attention" in caches:
            return True
        if not self.allow_skip_cross_attention:
            raise ConfigError(
                "Transformer.use_cross_attention is set, but the block was called without "
                "`encoded`. Pass the encoder's outputs, or set allow_skip_cross_attention=True."
            )
        return False
