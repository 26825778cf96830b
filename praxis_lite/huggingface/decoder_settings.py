"""Settings of a decoder-only language model, the target of the tables in `families/`."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

SLIDING, FULL = "sliding_attention", "full_attention"  # As in their `layer_types`.
# Which layers have sliding windows, if there are no `layer_types`.
WINDOWS = ("all", "even", "from max_window_layers", "all but each window_period-th")


class LayerKind(NamedTuple):
    """The settings that differ between the layers of a model.

    Attributes:
      slides: its attention has the sliding window, and local rotary positions if there are any.
      has_experts: its feed-forward part is a mixture of experts.
      score_divisor: divides its scores, in addition to the scale that all layers share.
    """

    slides: bool
    has_experts: bool
    score_divisor: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderSettings:
    """Settings of a decoder-only model, named by the tables in `families/`.

    Attributes:
      hidden_dims: 0 or None: 4 model_dims.
      num_kv_heads: None: num_heads.
      dim_per_head: None: model_dims / num_heads.
      activation: the name in transformers, see `decoder.ACTIVATIONS`.
      norm: of `decoder.NORMS`; norm_policy: of Transformer.
      is_tied: embedding and head share a table.
      use_bias, use_output_bias, has_bias: of queries, keys and values; of attention's outputs; of
        the feed-forward part.
      qk_norm: norm of queries and keys before they rotate: "", "head" or "all heads".
      query_scalar: queries are multiplied by its -0.5th power; None: dim_per_head.
      scales_queries: False: queries are not scaled; divides_by_layer: scores of layer i are
        divided by i + 1.
      atten_logit_cap, soft_cap_logits: 0 or None: none.
      window: a token sees itself and window - 1 before it, in the layers that slide.
      windows: which layers slide, of WINDOWS; layer_types lists the kind of each layer instead.
      max_seq_length: of learned positions; None: positions are rotary.
      rotary_share: the share of a head's dims that rotates; is_rotary_in_part: rope_scaling may
        set it as well.
      rope_theta: local_rope_theta is that of sliding layers, which have no rope_scaling; None:
        sliding layers are like the others.
      rope_scaling: as in config.json.
      num_experts: None: no experts. The last of each sparse_step layers has them, except
        dense_layers.
      expert_hidden_dims: None: hidden_dims.
      is_parallel: attention and feed-forward part have the same input, and both are added.
      first_dense_layers: how many layers at the start have no experts.
      num_shared_experts, score_func, num_expert_groups, num_expert_groups_per_token, gates_scale:
        of TransformerFeedForwardMoe.
      attention_sinks: of DotProductAttention.
      has_expert_bias, swiglu_limit, swiglu_alpha: has_bias, swiglu_limit and swiglu_alpha of
        TransformerFeedForwardMoe.
      q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim,
        rotates_neighbours: of MultiHeadLatentAttention, which replaces attention if kv_lora_rank
        is set; has_latent_bias: its use_bias.
      num_prediction_layers: of multi-token prediction, which are left out.
      atten_dropout_prob, residual_dropout_prob: of Transformer, in training.
      max_positions: for which a model is published; divided by original_max_positions it is the
        factor of longrope and yarn. It is the default of original_max_positions.
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
    rotates_neighbours: bool = True
    has_latent_bias: bool = False
    num_prediction_layers: int = 0
    atten_dropout_prob: float = 0.0
    residual_dropout_prob: float = 0.0
    max_positions: int | None = None

    @property
    def head_dims(self) -> int:
        """Dims of a head."""
        return self.dim_per_head or self.model_dims // self.num_heads

    @functools.cached_property
    def pattern(self) -> Sequence[LayerKind]:
        """The kinds of the layers of the repeated block."""
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
            slides = (
                True, layer % 2 == 0, layer >= self.max_window_layers,
                (layer + 1) % (self.window_period or 1) != 0,
            )[WINDOWS.index(self.windows)]
        is_sparse = (layer + 1) % self.sparse_step == 0 and layer not in self.dense_layers
        is_sparse = is_sparse and layer >= self.first_dense_layers
        divisor = layer + 1 if self.divides_by_layer else 1
        return LayerKind(slides, self.num_experts is not None and is_sparse, divisor)
