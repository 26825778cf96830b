"""DotProductAttention: multi-head self-attention and cross-attention, with masks and caches."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.core.sharding.split_dims import constrain
from praxis_lite.layers.attention.checks import check_call, check_contexts, require_one_source
from praxis_lite.layers.attention.heads import AttentionHeads
from praxis_lite.layers.attention.kernels.choice import attend, check_kernel
from praxis_lite.layers.attention.kernels.context_parallel import check_context_parallel
from praxis_lite.layers.attention.kernels.einsum import LogitOptions
from praxis_lite.layers.attention.kernels.settings import AttentionSettings
from praxis_lite.layers.attention.kv_cache import (
    Cache,
    constrain_cache,
    empty_cache,
    round_to_cache,
    update_cache,
)
from praxis_lite.layers.attention.masks import (
    AttentionMask,
    cross_attention_mask,
    mask_of_keys,
    not_padding,
)
from praxis_lite.layers.base.activation_names import named
from praxis_lite.layers.base.base_layer import zeros
from praxis_lite.layers.base.calls import inherit_params, require_positive
from praxis_lite.layers.stacking.tensor_parallel import (
    ShardedLayer,
    check_tensor_parallel,
    run_tensor_parallel,
    tensor_parallel_axis,
)
from praxis_lite.layers.stochastics import Dropout

# B batch, T queries, S keys, D model dims, N query heads, G key/value heads, K dims per head.


class DotProductAttention(AttentionHeads):
    """Self-attention over [B, T, D], or cross-attention to `encoded` [B, S, D], with a cache.

    Vaswani et al. 2017, arXiv:1706.03762, with Pax's names, defaults and numerics.

    Args:
      input_dim: D, or a mapping from "query", "key" and "value" to dims if inputs and `encoded`
        differ in size.
      num_heads: N.
      hidden_dim: N K; used if dim_per_head is None. Defaults to D.
      dim_per_head: K. As in Pax, a query scale that is not learned is still (hidden_dim / N)^-0.5,
        unless scale_query_by_dim_per_head is set.
      num_kv_heads: G, the number of key/value heads, each shared by N / G query heads
        (arXiv:2305.13245; arXiv:1911.02150 for 1). If None, N.
      is_causal: For self-attention. If True, a token attends to itself and earlier tokens. If
        False, it attends to all tokens. None means True, unless the call passes an atten_mask: as
        in Pax, that mask then replaces the causal mask, but not the window.
      is_cross_attention: Whether keys and values come from `encoded`.
      window: Number of tokens that a token attends to on its left, including itself (Pax's
        left_context). The cache stores window + SPARE_PLACES tokens.
      right_context: Number of later tokens that a token attends to if is_causal is False. If None,
        all later tokens, or window - 1 with a window.
      use_bias: Whether the projections have biases.
      use_output_bias: Whether the output projection has a bias. Defaults to use_bias.
      internal_gshard_gaussian_init: Whether to initialize separate projections as in GShard, with
        Gaussians whose variance is 1 / (D K) for queries, 1 / D for keys and values, and 1 / (N K)
        for outputs.
      combine_qkv: Whether queries, keys and values share one weight.
      internal_enable_query_scale: Whether to scale queries.
      internal_enable_per_dim_scale: Whether the query scale is learned per dim.
      scale_query_by_dim_per_head: See dim_per_head.
      scale_logits_by_head_dims: Whether to multiply logits by 1 / sqrt(K).
      atten_logit_cap: Limit on the logits, applied with a tanh. If 0.0, there is no limit.
      attention_extra_logit: An additional logit, whose value vector is zero.
      attention_sinks: Whether each head learns such an additional logit (arXiv:2309.17453).
      zero_fully_masked: Whether fully masked queries output zeros, as in cross-attention, instead
        of the mean of all values.
      use_rotary_position_emb: Whether to rotate queries and keys by their positions.
      ln_tpl: Norm for queries and keys, called with (K, rngs=). As in Pax, it is applied after the
        rotation.
      ln_before_rotary: Whether to normalize before the rotation, as in Qwen 3 and Gemma 3.
      ln_over_heads: Whether to normalize over all heads at once, as in OLMo 2; ln_tpl is then
        called with (N K, rngs=).
      relative_bias_tpl: Attention bias that depends on distance, called with (N, rngs=).
      float32_logits: Whether to compute logits and softmax in float32, as in Pax. If False, both
        have the queries' dtype, as in MaxText, which halves the memory for logits in bfloat16.
      atten_dropout_prob: Dropout probability of the attention probabilities.
      output_proj_use_nhd_shape: Whether to store the output weight as [N, K, D].
      output_init: Initializer of the output weight. If None, that of the other projections. GPT-2
        uses a smaller scale for weights whose outputs are added to the residual stream.
      atten_kernel: "auto", "einsum", "cudnn", "splash", "tokamax", "chunked" or "blocked"; see
        `choose_kernel`. The choice and its reason are logged once.
      atten_chunk_size: Number of queries and keys per chunk of the chunked kernel, or of queries
        per block of the blocked kernel.
      weight_split_dims_mapping: Sharding of the projections' weights, [D, N, K].
      activation_split_dims_mapping: Sharding of queries, keys, values and the cache, [B, T, N, K].
      kv_split_dims_mapping: Sharding of keys, values and the cache, [B, S, G, K]. If None,
        activation_split_dims_mapping is used, except that a single head is replicated, and that the
        cache is sharded along time if there are fewer heads than devices.
      output_split_dims_mapping: Sharding of the outputs, [B, T, D].
      context_parallel: The explicit collectives to use if time is sharded, a name in
        CONTEXT_PARALLEL. If None, or in calls with a cache, the compiler inserts collectives.
      tensor_parallel: The explicit collectives to use along the mesh axis of N, a name in
        TENSOR_PARALLEL. If None, or in calls with a cache, the compiler inserts collectives.
    """

    cache_skips_padding = True

    preset_settings = {
        "tensor_parallel": "attention_collectives",
        "context_parallel": "attention_context",
    }

    @inherit_params(AttentionHeads)
    def __init__(
        self,
        input_dim: int | Mapping[str, int],
        num_heads: int = 1,
        *,
        is_causal: bool | None = None,
        is_cross_attention: bool = False,
        window: int | None = None,
        right_context: int | None = None,
        scale_logits_by_head_dims: bool = False,
        atten_logit_cap: float = 0.0,
        attention_extra_logit: float | None = None,
        attention_sinks: bool = False,
        zero_fully_masked: bool = False,
        float32_logits: bool = True,
        atten_dropout_prob: float = 0.0,
        atten_kernel: str = "auto",
        atten_chunk_size: int = 512,
        dropout_tpl: Callable[..., Any] = Dropout,
        context_parallel: str | None = None,
        tensor_parallel: str | None = None,
        **settings: Any,
    ):
        require_positive(self, atten_chunk_size=atten_chunk_size)
        is_valid = atten_logit_cap >= 0.0
        cap_setting = f"{type(self).__name__}.atten_logit_cap"
        require(is_valid, cap_setting, atten_logit_cap, "a positive cap, or 0.0 for none")
        # Whether an atten_mask replaces the causal mask, and whether passing one is an error.
        self.mask_is_all = is_causal is None and window is None
        self.refuses_mask = is_causal is True and window is None
        is_causal = is_causal is not False
        check_contexts(self, is_causal, is_cross_attention, window, right_context)
        if attention_sinks and attention_extra_logit is not None:
            raise ConfigError(
                f"{type(self).__name__}.attention_extra_logit {attention_extra_logit} cannot be "
                "combined with attention_sinks."
            )
        super().__init__(input_dim, num_heads, **settings)
        check_tensor_parallel(
            self,
            tensor_parallel,
            {
                "atten_dropout_prob": atten_dropout_prob > 0.0,
                "ln_over_heads": self.layer_norm_q is not None and self.ln_over_heads,
                "relative_bias_tpl": self.relative_bias is not None,
            },
        )
        self.tensor_parallel = tensor_parallel
        N, rngs = self.num_heads, settings["rngs"]
        self.sinks = self.weight((N,), init=zeros, rngs=rngs) if attention_sinks else None
        require_one_source(self, self.combined_qkv is None or not is_cross_attention)
        self.is_causal, self.is_cross_attention = is_causal, is_cross_attention
        if is_causal:
            right_context = 0
        elif right_context is None and window is not None:
            right_context = window - 1
        self.left_context, self.right_context = window, right_context
        options = LogitOptions(
            scale=self.dim_per_head**-0.5 if scale_logits_by_head_dims else 1.0,
            cap=atten_logit_cap,
            extra=attention_extra_logit,
            zero_fully_masked=zero_fully_masked,
            float32_logits=float32_logits,
        )
        self.attention_settings = AttentionSettings(
            atten_kernel, atten_chunk_size, context_parallel, options
        )
        uses = {
            "atten_dropout_prob": atten_dropout_prob > 0.0,
            "attention_sinks": attention_sinks,
            "num_kv_heads": self.num_kv_heads != self.num_heads,
            "relative_bias_tpl": self.relative_bias is not None,
            "window": window is not None,
            "window without is_causal": window is not None and not is_causal,
        }
        check_kernel(atten_kernel, uses | options.needs)
        self.atten_dropout = dropout_tpl(atten_dropout_prob)
        check_context_parallel(
            self,
            self.attention_settings,
            uses | {"tensor_parallel": tensor_parallel is not None},
        )

    def init_cache(
        self,
        batch_size: int,
        max_seq_length: int,
        dtype: Any,
        *,
        encoded_length: int | None = None,
    ) -> Cache:
        """Returns an empty cache (see `empty_cache`), sharded like keys and values."""
        cache = empty_cache(self, batch_size, max_seq_length, dtype, encoded_length)
        return constrain_cache(cache, self._split_of_cache())

    def __call__(
        self,
        inputs: jax.Array,
        *,
        encoded: jax.Array | None = None,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        paddings: jax.Array | None = None,
        encoded_paddings: jax.Array | None = None,
        encoded_segment_ids: jax.Array | None = None,
        encoded_positions: jax.Array | None = None,
        atten_mask: jax.Array | None = None,
        key: jax.Array | None = None,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Returns outputs [B, T, D] and the updated cache.

        With a cache, keys and values are stored at the positions of their tokens, and each token
        attends to its own and all earlier positions. Sequences may be at different positions, and
        each sequence is one segment. Cross-attention stores the keys and values of `encoded` in the
        cache, so that later calls do not need `encoded`.

        Args:
          inputs: [B, T, D].
          encoded: [B, S, D], the sequence to attend to. If None, the inputs, or the `encoded` that
            is stored in the cache.
          positions: Int [B or 1, T], consecutive along T. If None, 0 to T - 1.
          segment_ids: Int [B, T]. Tokens attend only to tokens in their segment.
          paddings: [B, T]; 1.0 for padding, to which no token attends.
          encoded_paddings: Paddings of `encoded`, [B, S].
          encoded_segment_ids: Segments of `encoded`, [B, S]. Tokens whose segment does not occur in
            `encoded` output zeros, except padding (segment 0).
          encoded_positions: Positions of `encoded`, [B, S].
          atten_mask: Float [B or 1, 1 or N, 1 or T, S]. Keys are masked where it is below
            LARGE_NEGATIVE / 2. It is not added to the logits.
          key: Random key for dropout. If None, nothing is dropped.
          cache: Cache of the preceding tokens, or None.
        """
        check_call(self, inputs, encoded, cache, atten_mask, segment_ids)
        rows = {
            "encoded": encoded,
            "positions": positions,
            "segment_ids": segment_ids,
            "paddings": paddings,
            "atten_mask": atten_mask,
            "encoded_paddings": encoded_paddings,
            "encoded_segment_ids": encoded_segment_ids,
            "encoded_positions": encoded_positions,
        }
        # With explicit tensor parallelism, each device runs `_attend` with its heads. With a cache,
        # this is left to the compiler.
        axis = tensor_parallel_axis(self, self.features_split) if cache is None else None
        if axis is None:
            outputs, cache = self._attend(inputs, rows, key, cache)
        else:
            sharded = ShardedLayer(
                self,
                lambda layer, x, rows: layer._attend(x, rows)[0],
                self.output_split_dims_mapping,
                reads_sequences=True,
                output="post",
                prepared=self._heads_for,
            )
            outputs = run_tensor_parallel(sharded, axis, inputs, rows)
        return named(outputs, "out_proj"), cache

    def _attend(
        self,
        inputs: jax.Array,
        rows: Mapping[str, jax.Array | None],
        key: jax.Array | None = None,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Returns outputs (a partial sum if the layer has only a shard of the heads) and the cache.

        Args:
          inputs: [B, T, D].
          rows: The arguments of `__call__` that have a batch dim, keyed by name.
          key: Random key for dropout, or None.
          cache: Cache of the preceding tokens, or None.
        """
        encoded, positions, segment_ids = map(rows.get, ("encoded", "positions", "segment_ids"))
        atten_mask = rows.get("atten_mask")
        # Positions created here are constants, so that XLA folds the rotary sines and cosines. If
        # they were inputs of a scan, it would recompute them for each head of each layer.
        positions = _positions(positions, inputs)
        assert positions is not None
        # First choose the keys' source and the mask: `encoded`, or the inputs themselves.
        is_cross = self.is_cross_attention or encoded is not None
        if is_cross:
            kv_positions = _positions(rows.get("encoded_positions"), encoded)
            mask = cross_attention_mask(
                segment_ids, rows.get("encoded_paddings"), rows.get("encoded_segment_ids")
            )
        else:
            encoded, kv_positions = inputs, positions
            # As in Pax, an atten_mask replaces the causal mask unless is_causal or window is set.
            replaces_causal = atten_mask is not None and self.mask_is_all
            mask = AttentionMask(
                self.left_context,
                None if replaces_causal else self.right_context,
                q_segments_BT=segment_ids,
                kv_segments_BS=segment_ids,
                kv_visible_BS=not_padding(rows.get("paddings")),
                is_to_itself=True,
            )
        q_BTNK, kv = self._project(inputs, encoded, positions, kv_positions)
        if cache is not None:
            # The new keys are written to the cache, and the queries attend to all of its entries.
            kv = None if kv is None else round_to_cache(kv, inputs.dtype)
            cache, kv, kv_positions, mask = update_cache(
                cache, kv, positions, mask, self._split_of_cache(), is_cross=is_cross
            )
            atten_mask = mask_of_keys(atten_mask, kv_positions)
            # Convert the query: the cache may have a wider dtype, and converting the cache for each
            # token would be slow.
            q_BTNK = q_BTNK.astype(jnp.promote_types(q_BTNK.dtype, kv["key"].dtype))
            if self.split_of_time() is not None:  # Each device has some of the keys for all heads.
                q_BTNK = constrain(q_BTNK, (self.activation_split_dims_mapping or ())[:2])
        assert kv is not None, "Calls without a cache always have keys."
        bias = None if self.relative_bias is None else self.relative_bias(positions, kv_positions)
        k_BSGK, v_BSGK = (kv[name].astype(q_BTNK.dtype) for name in ("key", "value"))
        encoded_BTNK = attend(
            self.attention_settings,
            q_BTNK,
            k_BSGK,
            v_BSGK,
            mask,
            has_cache=cache is not None,
            bias=bias,
            atten_mask=atten_mask,
            dropout=self.atten_dropout,
            key=key,
            split=self.activation_split_dims_mapping,
            sinks_N=None if self.sinks is None else self.sinks[...],
            dtype=inputs.dtype,  # Rotary embeddings may return float32.
        )
        if is_cross:
            encoded_BTNK = mask.zero_fully_masked(encoded_BTNK, kv["key"].shape[1])
        return constrain(self.post(encoded_BTNK), self.output_split_dims_mapping), cache


def _positions(given: jax.Array | None, x: jax.Array | None) -> jax.Array | None:
    """Returns positions for x [B, T, ...], by default 0 to T - 1, or None if x is None."""
    if given is not None or x is None:
        return given
    return jnp.arange(x.shape[1], dtype=jnp.int32)[None, :]
