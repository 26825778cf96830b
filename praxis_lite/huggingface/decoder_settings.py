"""Settings of decoder-only models; tables in `families` map config.json fields to settings."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

SLIDING, FULL = "sliding_attention", "full_attention"  # Values in the config's `layer_types`.
# Which layers use sliding-window attention if config.json has no `layer_types`.
WINDOWS = ("all", "even", "from max_window_layers", "all but each window_period-th")


class LayerKind(NamedTuple):
    """Settings that differ between the layers of a model.

    Attributes:
      slides: Whether attention uses the sliding window, with the local rotary base if one is set.
      has_experts: Whether the feed-forward layer is a mixture of experts.
      score_divisor: Divisor of the attention scores, in addition to the scale shared by all layers.
    """

    slides: bool
    has_experts: bool
    score_divisor: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderSettings:
    """Settings of a decoder-only model; the tables in `families/` refer to these names.

    Attributes:
      hidden_dims: Width of the feed-forward layers. If 0 or None, 4 * model_dims.
      num_kv_heads: Number of key and value heads. If None, num_heads.
      dim_per_head: Dims per head. If None, model_dims / num_heads.
      activation: Name of the activation in transformers, a key of `decoder.ACTIVATIONS`.
      norm: Kind of normalization, a key of `decoder.NORMS`.
      norm_policy: Positions of normalization in a layer; see `Transformer.norm_policy`.
      is_tied: Whether the embedding and the head share a table.
      use_bias: Whether the query, key and value projections have a bias.
      use_output_bias: Whether attention's output projection has a bias.
      has_bias: Whether the feed-forward layers have a bias.
      qk_norm: Normalization of queries and keys before rotation: "", "head" or "all heads".
      query_scalar: Queries are multiplied by query_scalar**-0.5. If None, dim_per_head.
      scales_queries: Whether queries are scaled at all.
      divides_by_layer: Whether the scores of layer i are divided by i + 1.
      atten_logit_cap: Soft cap of the attention scores; 0 or None disables it.
      soft_cap_logits: Soft cap of the output logits; 0 or None disables it.
      use_window: Whether sliding layers use the window.
      window: Number of tokens that a token attends to in sliding layers, including itself.
      windows: Which layers use sliding-window attention, one of WINDOWS; ignored if layer_types is
        set.
      max_window_layers: First sliding layer if windows is "from max_window_layers".
      window_period: Distance between full-attention layers if windows is "all but each
        window_period-th".
      layer_types: Kind of each layer, SLIDING or FULL.
      max_seq_length: Number of learned positions, or None for rotary positions.
      rope_theta: Base of the rotary frequencies.
      local_rope_theta: Base for sliding layers, where rope_scaling is then ignored. If None,
        sliding layers use the same rotary embedding as the other layers.
      rotary_share: Fraction of a head's dims that is rotated.
      is_rotary_in_part: Whether rope_scaling may also set rotary_share.
      rope_scaling: The field `rope_scaling` of config.json.
      original_max_positions: Context length before RoPE scaling. If None, max_positions.
      num_experts: Number of experts, or None for a dense model.
      expert_hidden_dims: Width of each expert. If None, hidden_dims.
      sparse_step: Every sparse_step-th layer has experts, except dense_layers.
      dense_layers: Indices of layers without experts.
      first_dense_layers: Number of layers without experts at the start of the model.
      is_parallel: Whether attention and feed-forward layers read the same input, and their outputs
        are summed.
      num_shared_experts, score_func, num_expert_groups, num_expert_groups_per_token, gates_scale:
        Arguments of TransformerFeedForwardMoe.
      attention_sinks: Argument of DotProductAttention.
      has_expert_bias: TransformerFeedForwardMoe.has_bias.
      swiglu_limit, swiglu_alpha: Arguments of TransformerFeedForwardMoe.
      q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim: Arguments of
        MultiHeadLatentAttention, which replaces DotProductAttention if kv_lora_rank is set.
      rope_interleave: Argument of MultiHeadLatentAttention.
      has_latent_bias: MultiHeadLatentAttention.use_bias.
      num_prediction_layers: Number of multi-token prediction layers, which are not loaded.
      atten_dropout_prob, residual_dropout_prob: Dropout rates of Transformer in training.
      input_dropout_prob: Dropout rate of the embeddings in training.
      max_positions: Published context length. The factor for longrope and yarn defaults to
        max_positions / original_max_positions.
    """

    vocab_size: int
    model_dims: int
    num_layers: int
    num_heads: int
    hidden_dims: int | None
    num_kv_heads: int | None = None
    dim_per_head: int | None = None
    activation: str = "silu"
    norm: str = "rms"
    norm_policy: str = "pre"
    epsilon: float = 1e-6
    is_tied: bool = False
    use_bias: bool = False
    use_output_bias: bool = False
    has_bias: bool = False
    use_gated_activation: bool = False
    scale_embeddings: bool = False
    qk_norm: str = ""
    query_scalar: int | None = None
    scales_queries: bool = True
    divides_by_layer: bool = False
    atten_logit_cap: float | None = 0.0
    soft_cap_logits: float | None = 0.0
    use_window: bool = True
    window: int | None = None
    windows: str = "all"
    max_window_layers: int = 0
    window_period: int | None = None
    layer_types: Sequence[str] | None = None
    max_seq_length: int | None = None
    rope_theta: float = 10_000.0
    local_rope_theta: float | None = None
    rotary_share: float = 1.0
    is_rotary_in_part: bool = False
    rope_scaling: Mapping[str, Any] | None = None
    original_max_positions: int | None = None
    num_experts: int | None = None
    num_experts_per_token: int = 2
    normalize_gates: bool = True
    expert_hidden_dims: int | None = None
    sparse_step: int = 1
    dense_layers: Sequence[int] = ()
    is_parallel: bool = False
    first_dense_layers: int = 0
    num_shared_experts: int = 0
    score_func: str = "softmax"
    num_expert_groups: int = 1
    num_expert_groups_per_token: int = 1
    gates_scale: float = 1.0
    attention_sinks: bool = False
    has_expert_bias: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    rope_interleave: bool = True
    has_latent_bias: bool = False
    num_prediction_layers: int = 0
    atten_dropout_prob: float = 0.0
    residual_dropout_prob: float = 0.0
    input_dropout_prob: float = 0.0
    max_positions: int | None = None

    @property
    def head_dims(self) -> int:
        """Number of dims per head."""
        return self.dim_per_head or self.model_dims // self.num_heads

    @functools.cached_property
    def pattern(self) -> Sequence[LayerKind]:
        """Kinds of the layers in the smallest block that is repeated to form the model."""
        kinds = [self._kind_of(i) for i in range(self.num_layers)]
        for length in range(1, self.num_layers):
            repeats, rest = divmod(self.num_layers, length)
            if not rest and kinds == kinds[:length] * repeats:
                return kinds[:length]
        return kinds

    def _kind_of(self, layer: int) -> LayerKind:
        if self.window is None or not self.use_window:
            slides = False
        elif self.layer_types is not None:
            slides = self.layer_types[layer] == SLIDING
        else:
            # The values are in the order of WINDOWS.
            slides = (
                True,
                layer % 2 == 0,
                layer >= self.max_window_layers,
                (layer + 1) % (self.window_period or 1) != 0,
            )[WINDOWS.index(self.windows)]
        is_sparse = (layer + 1) % self.sparse_step == 0 and layer not in self.dense_layers
        is_sparse = is_sparse and layer >= self.first_dense_layers
        divisor = layer + 1 if self.divides_by_layer else 1
        return LayerKind(slides, self.num_experts is not None and is_sparse, divisor)
