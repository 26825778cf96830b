"""The rows in pod_scale.py: models, meshes and results from other frameworks."""

import argparse
import json
from typing import Any, NamedTuple

import fiddle as fdl
import jax.numpy as jnp

from praxis_lite.huggingface.decoder import lm_config
from praxis_lite.huggingface.family import family_of
from praxis_lite.layers import (
    Embedding,
    FullSoftmax,
    Repeat,
    TransformerFeedForward,
    TransformerFeedForwardMoe,
    rotary_lm,
)

# (model dims, layers, heads, dims per head, hidden dims, vocabulary size).
MODELS = {
    "tiny": (2048, 4, 16, 128, 7168, 32_000),
    "llama2-7b": (4096, 32, 32, 128, 11_008, 32_000),
    "mixtral-8x7b": (4096, 32, 32, 128, 14_336, 32_000),
    "llama3.1-70b": (8192, 80, 64, 128, 28_672, 128_256),
    "even": (2048, 4, 16, 128, 8192, 32_004),
    "uneven": (2048, 4, 16, 128, 8190, 32_003),
}
NUM_KV_HEADS = {"mixtral-8x7b": 8, "llama3.1-70b": 8}
# (number of experts, experts per token) of mixture-of-experts models.
WITH_EXPERTS = {"mixtral-8x7b": (8, 2)}
# Models that are built from their config.json.
OF_HUGGING_FACE = {
    "gemma2-9b": {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_size": 3584,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "intermediate_size": 14_336,
        "vocab_size": 256_000,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
    },
}
# Mesh (data, expert, mdl) of each row, for presets with an expert axis.
EXPERT_MESHES = {"M8": (8, 8, 1)}


class Row(NamedTuple):
    """A model, its mesh and its batch on a pod.

    Attributes:
      mesh: (replica, data, mdl).
      length: Number of tokens per row.
      num_rows: Number of rows in a batch, or None for one row per device.
      remat: The checkpoint_policy.
    """

    model: str
    topology: str
    mesh: tuple[int, int, int]
    length: int
    num_rows: int | None = None
    remat: Any = "save_nothing"


ROWS = {
    "S": Row("tiny", "v5e:4x4", (1, 16, 1), 1024),
    "A": Row("llama2-7b", "v5e:16x16", (1, 256, 1), 2048),
    "B64": Row("llama2-7b", "v5e:16x16", (1, 64, 4), 2048),
    "B16": Row("llama2-7b", "v5e:16x16", (1, 16, 16), 2048),
    "F": Row("llama2-7b", "v5p:4x4x4", (1, 16, 4), 2048),
    "L32": Row("llama2-7b", "v5e:16x16", (1, 16, 16), 32_768, 16),
    "L128": Row("llama2-7b", "v5e:16x16", (1, 4, 64), 131_072, 4),
    "M8": Row("mixtral-8x7b", "v5p:4x4x4", (1, 64, 1), 4096),
    "O70": Row("llama3.1-70b", "v6e:16x16", (1, 256, 1), 8192, 512, {"iteration_input": "offload"}),
    "G9": Row("gemma2-9b", "v5e:16x16", (1, 256, 1), 4096),
    "even": Row("even", "v5e:2x4", (1, 2, 4), 1024),
    "uneven": Row("uneven", "v5e:2x4", (1, 2, 4), 1024),
}
# (peak MB, Gcycles, seconds) of MaxText e591f30c and of plain JAX with hand-written collectives
# (jax 0.10.2, libtpu 0.0.51, remat of entire layers, bfloat16, float32 weights, Adam).
PEERS = {
    "S": {"MaxText": (572.7, 0.0521, 0.0425), "by hand": (646, 0.0305, 0.0316)},
    "A": {"MaxText": (2416.7, 1.584, 1.238), "by hand": (1835, 1.2314, 1.0466)},
    "B64": {"MaxText": (2103.4, 1.715, 1.402), "by hand": (1895.5, 1.2429, 1.0157)},
    "B16": {"MaxText": (2614.8, 2.437, 3.133), "by hand": (1834.8, 1.2314, 1.0466)},
    "F": {"MaxText": (3494.3, 0.831, 0.610), "by hand": (2962.4, 0.6587, 0.4571)},
    # The best variants (all-to-all and ring), excluding the time in Pallas kernels.
    "L32": {"MaxText": (3871.4, 1.7772, 1.4581)},
    "L128": {"MaxText": (1939.7, 9.238, 10.166)},
    # Dropless with 8-way expert parallelism, dropless with 64-way FSDP, and a capacity of 1.25.
    "M8": {
        "MaxText": (19_865.6, 2.4088, 1.8952),
        "its fsdp": (19_666.7, 2.018, 2.5251),
        "dropping": (19_809.5, 4.2718, 3.8176),
    },
    "O70": {"MaxText": (24_798.2, 30.3927, 19.6664)},
    "G9": {"MaxText": (7233.0, 5.6096, 4.0364)},
}


def model_of(row: Row, options: argparse.Namespace) -> fdl.Config:
    """Returns the config of a row's model, which computes in bfloat16."""
    attention = {
        "atten_kernel": options.attention,
        "atten_chunk_size": options.chunk_size,
        # All other kernels compute float32 logits.
        "float32_logits": options.attention not in ("einsum", "blocked"),
    }
    remat = row.remat if options.remat is None else _policy(options.remat)
    stack = fdl.Partial(Repeat, checkpoint_policy=remat)
    if row.model in OF_HUGGING_FACE:
        config = OF_HUGGING_FACE[row.model]
        lm = lm_config(family_of(config).decoder_settings(config))
        lm.fprop_dtype, lm.stacked_transformer_tpl = jnp.bfloat16, stack
        for block in lm.transformer_layer_tpl:
            for name, value in attention.items():
                setattr(block.tr_atten_tpl, name, value)
        return lm
    model_dims, num_layers, num_heads, dim_per_head, hidden_dims, vocab_size = MODELS[row.model]
    if row.model in NUM_KV_HEADS:
        attention["num_kv_heads"] = NUM_KV_HEADS[row.model]
    activation = {"activation": "silu", "use_gated_activation": True}
    feed_forward = fdl.Partial(TransformerFeedForward, has_bias=False, **activation)
    if row.model in WITH_EXPERTS:
        num_experts, per_token = WITH_EXPERTS[row.model]
        capacity = (
            {"dropless": True}
            if options.capacity is None
            else {
                # Pax's factor is relative to tokens, and MaxText's to tokens x experts per token.
                "unadjusted_expert_capacity_factor": options.capacity * per_token,
            }
        )
        feed_forward = fdl.Partial(
            TransformerFeedForwardMoe,
            num_experts=num_experts,
            num_experts_per_token=per_token,
            gating_func="top_k",
            **activation,
            **capacity,
        )
    return rotary_lm(
        vocab_size=vocab_size,
        model_dims=model_dims,
        hidden_dims=hidden_dims,
        num_heads=num_heads,
        dim_per_head=dim_per_head,
        num_layers=num_layers,
        fprop_dtype=jnp.bfloat16,
        attention=attention,
        tr_fflayer_tpl=feed_forward,
        softmax_tpl=fdl.Partial(FullSoftmax, has_bias=False),
        separate_embedding_tpl=fdl.Partial(Embedding),
        stacked_transformer_tpl=stack,
    )


def _policy(text: str) -> Any:
    return json.loads(text) if text.startswith("{") else text
