"""Builds the config of a decoder-only language model from `DecoderSettings`."""

from typing import Any

import fiddle as fdl
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError, require_choice
from praxis_lite.huggingface.decoder_settings import DecoderSettings, LayerKind
from praxis_lite.huggingface.rotary import latent_scale, rotary
from praxis_lite.layers.attention.attentions import DotProductAttention
from praxis_lite.layers.attention.latent import MultiHeadLatentAttention
from praxis_lite.layers.embedding.embeddings import Embedding
from praxis_lite.layers.embedding.softmaxes import FullSoftmax, SharedEmbeddingSoftmax
from praxis_lite.layers.moe.mixture_of_experts import TransformerFeedForwardMoe
from praxis_lite.layers.normalizations import LayerNorm, RmsNorm
from praxis_lite.layers.stacking.repeats import Repeat
from praxis_lite.layers.transformer.feed_forwards import TransformerFeedForward
from praxis_lite.layers.transformer.models import TransformerLm
from praxis_lite.layers.transformer.transformers import Transformer

# Names of activations in transformers, mapped to our names.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu_exact",
    "gelu_python": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_python_tanh": "gelu",
    "gelu_fast": "gelu",
    "gelu_accurate": "gelu",
    "relu2": "squared_relu",
    "relu6": "relu6",
    "leaky_relu": "leaky_relu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "linear": "identity",
}
NORMS = {
    "rms": lambda epsilon: fdl.Partial(RmsNorm, epsilon=epsilon),
    "rms 1 + w": lambda epsilon: fdl.Partial(RmsNorm, epsilon=epsilon, direct_scale=False),
    "layer": lambda epsilon: fdl.Partial(LayerNorm, epsilon=epsilon, direct_scale=True),
}


def lm_config(settings: DecoderSettings) -> "fdl.Partial[TransformerLm]":
    """Returns the `TransformerLm` config for these settings."""
    require_choice("config.json: activation", settings.activation, tuple(ACTIVATIONS))
    norm = NORMS[settings.norm](settings.epsilon)
    blocks = [_block(settings, norm, kind) for kind in settings.pattern]
    scales = {"scale_sqrt_depth": True} if settings.scale_embeddings else {}
    softmax = {"has_bias": False, "soft_cap_logits": settings.soft_cap_logits or 0.0}
    if settings.is_tied:
        embedding, softmax_tpl = None, fdl.Partial(SharedEmbeddingSoftmax, **softmax, **scales)
    else:
        embedding = fdl.Partial(Embedding, **scales)
        softmax_tpl = fdl.Partial(FullSoftmax, **softmax)
    stack: dict[str, Any] = {}
    if settings.input_dropout_prob:
        stack["stacked_transformer_tpl"] = fdl.Partial(
            Repeat, input_dropout_prob=settings.input_dropout_prob
        )
    return fdl.Partial(
        TransformerLm,
        vocab_size=settings.vocab_size,
        model_dims=settings.model_dims,
        hidden_dims=settings.hidden_dims or 4 * settings.model_dims,
        num_heads=settings.num_heads,
        dim_per_head=settings.head_dims,
        num_layers=settings.num_layers,
        max_seq_length=settings.max_seq_length,
        fprop_dtype=jnp.float32,
        softmax_tpl=softmax_tpl,
        separate_embedding_tpl=embedding,
        position_emb_tpl=None,
        final_ln_tpl=norm,
        transformer_layer_tpl=blocks[0] if len(blocks) == 1 else tuple(blocks),
        **stack,
    )


def _block(settings: DecoderSettings, norm: Any, kind: LayerKind) -> "fdl.Partial[Transformer]":
    attention = (_attention if settings.kv_lora_rank is None else _latent)(settings, norm, kind)
    feed_forward = {
        "activation": ACTIVATIONS[settings.activation],
        "use_gated_activation": settings.use_gated_activation,
    }
    if not kind.has_experts:
        feed_forward_tpl = fdl.Partial(
            TransformerFeedForward, has_bias=settings.has_bias, **feed_forward
        )
    else:
        feed_forward_tpl = fdl.Partial(
            TransformerFeedForwardMoe,
            num_experts=settings.num_experts,
            gating_func="top_k",
            num_experts_per_token=settings.num_experts_per_token,
            dropless=True,
            expert_hidden_dims=settings.expert_hidden_dims,
            normalize_gates=settings.normalize_gates,
            moe_load_balance_loss_weight=0.0,
            **feed_forward,
        )
        # Only models whose scores are sigmoids have these settings.
        if settings.score_func == "sigmoid":
            for name in (
                "num_shared_experts",
                "score_func",
                "num_expert_groups",
                "num_expert_groups_per_token",
                "gates_scale",
            ):
                setattr(feed_forward_tpl, name, getattr(settings, name))
        if settings.has_expert_bias:
            feed_forward_tpl.has_bias, feed_forward_tpl.score_func = True, settings.score_func
            feed_forward_tpl.swiglu_limit = settings.swiglu_limit
            if settings.swiglu_alpha != DecoderSettings.swiglu_alpha:
                feed_forward_tpl.swiglu_alpha = settings.swiglu_alpha
    options = {"is_parallel": True} if settings.is_parallel else {}
    for name in ("atten_dropout_prob", "residual_dropout_prob"):
        if getattr(settings, name):
            options[name] = getattr(settings, name)
    return fdl.Partial(
        Transformer,
        norm_policy=settings.norm_policy,
        ln_tpl=norm,
        tr_atten_tpl=attention,
        tr_fflayer_tpl=feed_forward_tpl,
        **options,
    )


def _latent(
    settings: DecoderSettings, norm: Any, kind: LayerKind
) -> "fdl.Partial[MultiHeadLatentAttention]":
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    options = {name: getattr(settings, name) for name in names}
    nope_dim, rope_dim = settings.qk_nope_head_dim, settings.qk_rope_head_dim
    if nope_dim is None or rope_dim is None:
        raise ConfigError(
            "config.json must contain qk_nope_head_dim and qk_rope_head_dim, because kv_lora_rank "
            "is set. Add them."
        )
    scale = (nope_dim + rope_dim) ** -0.5
    if not settings.rope_interleave:
        options["rope_interleave"] = False
    if settings.has_latent_bias:
        options["use_bias"] = True
    return fdl.Partial(
        MultiHeadLatentAttention,
        **options,
        query_scale=scale * latent_scale(settings, kind),
        # DeepSeek normalizes latents with a fixed epsilon and ignores rms_norm_eps.
        ln_tpl=fdl.Partial(RmsNorm, epsilon=1e-6),
        rotary_position_emb_tpl=rotary(settings, kind),
    )


def _attention(
    settings: DecoderSettings, norm: Any, kind: LayerKind
) -> "fdl.Partial[DotProductAttention]":
    scale = settings.query_scalar or settings.head_dims if settings.scales_queries else 1
    scale *= kind.score_divisor**2
    qk_norm = {}
    if settings.qk_norm:
        qk_norm = {
            "ln_tpl": norm,
            "ln_before_rotary": True,
            "ln_over_heads": settings.qk_norm == "all heads",
        }
    has_rotary = settings.max_seq_length is None
    return fdl.Partial(
        DotProductAttention,
        num_kv_heads=settings.num_kv_heads,
        window=settings.window if kind.slides else None,
        use_bias=settings.use_bias,
        use_output_bias=settings.use_output_bias,
        # The layer scales queries by (hidden_dim / num_heads)**-0.5. Nothing else reads hidden_dim
        # here, because dim_per_head is set.
        hidden_dim=scale * settings.num_heads,
        internal_enable_per_dim_scale=False,
        atten_logit_cap=settings.atten_logit_cap or 0.0,
        use_rotary_position_emb=has_rotary,
        **({"attention_sinks": True} if settings.attention_sinks else {}),
        **({"rotary_position_emb_tpl": rotary(settings, kind)} if has_rotary else {}),
        **qk_norm,
    )
