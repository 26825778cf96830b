"""Models of published training runs, rebuilt with this library's layers (see published_runs.py)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import fiddle as fdl
import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.layers import (
    BaseLayer,
    DotProductAttention,
    Embedding,
    FullSoftmax,
    IdentityNorm,
    LayerNorm,
    MultiHeadLatentAttention,
    Repeat,
    RmsNorm,
    RmsNormNoScale,
    SharedEmbeddingSoftmax,
    Transformer,
    TransformerFeedForward,
    TransformerFeedForwardMoe,
    TransformerLm,
)
from praxis_lite.layers.attention.relative_bias import RelativeBias

Run = dict[str, Any]

# Maps a published remat policy to our policy that saves (nearly) the same activations.
_POLICIES = {
    "full": "save_nothing",
    "minimal": "save_dot_with_no_batch_dims",
    "default of AXLearn's transformer stack": "save_dot_for_mlperf_200b",
    "dots_saveable under flash attention, else the default names": "save_dot_only",
}
# Maps MaxText's and AXLearn's names of activations to our names, if they differ.
_NAMES = {
    "decoder_layer_input": ("iteration_input",),
    "layer input": ("iteration_input",),
    "mlpwi": ("ffn1", "ffn1_gate"),
    "mlpwi_0": ("ffn1_gate",),
    "mlpwi_1": ("ffn1",),
    "mlpwo": ("ffn2",),
    "qkv_proj": (),
    "q, k, v and output projections, attention context": (
        "query_proj",
        "key_proj",
        "value_proj",
        "out_proj",
        "context",
    ),
}
# Router settings by prefix of the model's name; other models use a softmax.
_ROUTERS: dict[str, dict[str, Any]] = {
    "deepseek2": {"normalize_gates": False},
    "deepseek3": {
        "score_func": "sigmoid",
        "num_expert_groups": 8,
        "num_expert_groups_per_token": 4,
        "gates_scale": 2.5,
    },
    "llama4": {"normalize_gates": False},
    "gpt-oss": {"score_func": "softmax_of_chosen", "has_bias": True, "swiglu_limit": 7.0},
}


class _Kind(NamedTuple):
    """Settings that differ between a model's blocks, named as in the model's publication."""

    window: int | None = None
    has_positions: bool = True
    has_experts: bool = True
    is_global: bool = False  # Gemma 4: a different head size, and values equal to keys.


def _pattern(model: dict[str, Any]) -> list[_Kind]:
    """Returns the repeating pattern of a model's blocks, excluding dense blocks at the start."""
    window = model.get("sliding_window")
    if every := model.get("nope_every_n_layers"):
        # Attention chunks are as long as the sequences, so no position is masked.
        return [
            _Kind(
                has_positions=(index + 1) % every > 0,
                has_experts=(index + 1) % model["moe_every_n_layers"] == 0,
            )
            for index in range(every)
        ]
    if model["name"].startswith("gpt-oss"):
        return [_Kind(window=window), _Kind()]
    if window:  # Gemma.
        return [_Kind(window=window)] * 5 + [_Kind(is_global="global_head_dim" in model)]
    return [_Kind()]


class GlobalAttention(DotProductAttention):
    """Attention of Gemma 4's global layers, with a separate head size and values equal to keys."""

    def __init__(self, input_dim: int, num_heads: int, *, head_dim: int, **settings: Any):
        super().__init__(input_dim, num_heads, **settings | {"dim_per_head": head_dim})

    @property
    def value(self) -> Any:
        return self.key

    @value.setter
    def value(self, projection: Any) -> None:
        del projection


class ParallelBlock(Transformer):
    """A block whose attention and feed-forward layers share one norm, as in MaxText in 2023."""

    def __init__(self, *args: Any, rngs: nnx.Rngs, **settings: Any):
        super().__init__(*args, is_parallel=True, rngs=rngs, **settings)
        self.ff_layer.layer_norm = IdentityNorm()

    def __call__(
        self, inputs: jax.Array, *, key: jax.Array | None = None, cache: Any = None, **rows: Any
    ) -> tuple[jax.Array, Any]:
        normed = self.layer_norm(inputs)
        rows = {name: value for name, value in rows.items() if value is not None}
        attended, cache = self.self_attention(normed, key=key, cache=cache, **rows)
        return inputs + (attended + self.ff_layer(normed, key=key)), cache


class DenseFirst(BaseLayer):
    """A stack of `num_layers` blocks whose first few blocks are dense.

    Args:
      block: As in Repeat.
      num_layers: As in Repeat.
      first_tpl: Template of the first blocks, called with (rngs=).
      num_first: Number of first blocks.
      repeat_tpl: Template of a stack, called with (block, number, rngs=) for each kind of block.
    """

    cache_skips_padding = True

    def __init__(
        self,
        block: Callable[..., Any],
        num_layers: int,
        *,
        first_tpl: Callable[..., Any],
        num_first: int,
        repeat_tpl: Callable[..., Any] = Repeat,
        rngs: nnx.Rngs,
    ):
        self.first = repeat_tpl(first_tpl, num_first, rngs=rngs)
        self.rest = repeat_tpl(block, num_layers - num_first, rngs=rngs)

    def init_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the caches for both kinds of blocks."""
        return self.first.init_cache(*args, **kwargs), self.rest.init_cache(*args, **kwargs)

    def __call__(
        self, x: jax.Array, *, key: jax.Array | None = None, cache: Any = None, **inputs: Any
    ) -> tuple[jax.Array, Any]:
        caches = (None, None) if cache is None else cache
        x, first = self.first(x, key=key, cache=caches[0], **inputs)
        x, rest = self.rest(x, key=key, cache=caches[1], **inputs)
        return x, None if cache is None else (first, rest)


def _attention(run: Run, kind: _Kind) -> fdl.Partial:
    model = run["model"]
    kernel = "splash" if "flash" in run["attention"]["kernel"] else "einsum"
    if model.get("attention_type") == "mla":
        sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return fdl.Partial(
            MultiHeadLatentAttention,
            q_lora_rank=model["q_lora_rank"] or None,
            atten_kernel=kernel,
            **{name: model[name] for name in sizes},
        )
    positions = model["positions"]
    settings: dict[str, Any] = {
        "atten_kernel": kernel,
        "float32_logits": kernel == "splash",
        "use_bias": bool(model["bias"]),
        "internal_enable_per_dim_scale": False,
        "use_rotary_position_emb": positions == "rope" and kind.has_positions,
        "window": kind.window,
    }
    if kind.is_global:
        return fdl.Partial(
            GlobalAttention,
            head_dim=model["global_head_dim"],
            num_kv_heads=model["global_num_kv_heads"],
            ln_tpl=RmsNorm,
            **settings,
        )
    if model["num_kv_heads"] != model["num_heads"]:
        settings["num_kv_heads"] = model["num_kv_heads"]
    if "relative position bias (32 buckets), added" in positions:
        settings["relative_bias_tpl"] = fdl.Partial(RelativeBias)
    norm = model["norm"]
    is_normed = "norm on q and k" in norm and "no norm on q" not in norm or "q and k norm" in norm
    if is_normed or model["name"].startswith("gemma4"):
        settings["ln_tpl"] = RmsNorm
    if model["name"] == "llama4-17b-16e" and kind.has_positions:
        settings["ln_tpl"] = RmsNormNoScale
    if model.get("fused_qkv"):
        settings["combine_qkv"] = True
    return fdl.Partial(DotProductAttention, **settings)


def _feed_forward(run: Run, has_experts: bool) -> fdl.Partial:
    model = run["model"]
    common = {
        # GPT-OSS's activation is specified by swiglu_limit.
        "activation": model["activation"].split("-")[0].replace("sigmoid", "silu"),
        "use_gated_activation": bool(model["gated_activation"]),
    }
    if not has_experts:
        return fdl.Partial(TransformerFeedForward, has_bias=bool(model["bias"]), **common)
    settings = next(
        (value for name, value in _ROUTERS.items() if model["name"].startswith(name)), {}
    )
    width = model["expert_hidden_dims"]
    if shared := model.get("shared_experts"):
        # Gemma 4's shared expert is as wide as several experts, and is in a separate branch.
        is_wide = model["name"].startswith("gemma4")
        settings = settings | {
            "num_shared_experts": shared * model["hidden_dims"] // width if is_wide else shared
        }
    return fdl.Partial(
        TransformerFeedForwardMoe,
        num_experts=model["experts"],
        gating_func="top_k",
        num_experts_per_token=model["experts_per_token"],
        unadjusted_expert_capacity_factor=1.25 * model["experts_per_token"],
        dropless="dropless" in model["moe_dispatch"],
        **common,
        **settings,
        **({"expert_hidden_dims": width} if width not in (None, model["hidden_dims"]) else {}),
    )


def _block(run: Run, kind: _Kind, *sizes: int, **settings: Any) -> fdl.Partial:
    model = run["model"]
    has_four = "before and after" in model["norm"]
    return fdl.Partial(
        ParallelBlock if model["block"].startswith("parallel") else Transformer,
        *sizes,
        ln_tpl=LayerNorm if model["norm"].startswith("layernorm") else RmsNorm,
        tr_atten_tpl=_attention(run, kind),
        tr_fflayer_tpl=_feed_forward(run, bool(model.get("experts")) and kind.has_experts),
        norm_policy="primer_hybrid" if has_four else "pre",
        **settings,
    )


def _stack(run: Run) -> fdl.Partial:
    model = run["model"]
    repeat = fdl.Partial(Repeat, checkpoint_policy=_policy(run))
    if not (num_first := model.get("first_dense_layers")):
        return repeat
    first = _block(
        run,
        _Kind(has_experts=False),
        model["model_dims"],
        model["hidden_dims"],
        model["num_heads"],
    )
    return fdl.Partial(DenseFirst, first_tpl=first, num_first=num_first, repeat_tpl=repeat)


def model_of(run: Run) -> fdl.Partial:
    """Returns the config of a run's model, without sharding."""
    model = run["model"]
    blocks = [_block(run, kind) for kind in _pattern(model)]
    tiles = (run.get("settings") or {}).get("loss_vocab_tiles")
    softmax: dict[str, Any] = {"has_bias": False}
    if tiles:
        softmax["chunk_size"] = model["vocab"] // tiles
    style = "matmul" if run["embedding_lookup"].startswith("one-hot") else "index"
    tied = bool(model["tied_embeddings"])
    learned = (
        int(model["positions"].split(", ")[1].split(" ")[0].replace(",", ""))
        if (model["positions"].startswith("learned, "))
        else None
    )
    is_causal = run["attention"]["causal"]
    return fdl.Partial(
        TransformerLm,
        vocab_size=model["vocab"],
        model_dims=model["model_dims"],
        hidden_dims=model["hidden_dims"],
        num_heads=model["num_heads"],
        dim_per_head=model["head_dim"],
        fprop_dtype=jnp.bfloat16,
        model_type="causal" if is_causal else "bidirectional",
        num_layers=model["num_layers"],
        max_seq_length=learned,
        position_emb_tpl=None,
        final_ln_tpl=LayerNorm if model["norm"].startswith("layernorm") else RmsNorm,
        softmax_tpl=fdl.Partial(SharedEmbeddingSoftmax, lookup_style=style, **softmax)
        if tied
        else fdl.Partial(FullSoftmax, **softmax),
        separate_embedding_tpl=None if tied else fdl.Partial(Embedding, lookup_style=style),
        transformer_layer_tpl=blocks if len(blocks) > 1 else blocks[0],
        stacked_transformer_tpl=_stack(run),
    )


def _policy(run: Run) -> str | dict[str, str]:
    """Returns the remat policy: a name, or the location of each named activation."""
    remat, model = run["remat"], run["model"]
    if remat["policy"] in _POLICIES:
        return _POLICIES[remat["policy"]]
    places = {"device": remat["saved_on_device"], "offload": remat["offloaded_to_host"]}
    experts = "expert_" if model.get("experts") else ""
    policy = {
        f"{experts}{ours}" if ours.startswith("ffn") else ours: place
        for place, names in places.items()
        for name in names
        for ours in _NAMES.get(name, (name,))
    }
    # In a pattern of several layers, each layer's input is the previous layer's output.
    if "iteration_input" in policy and model.get("experts") and len(_pattern(model)) > 1:
        policy["transformer_layer_out"] = policy["iteration_input"]
    return policy or "save_nothing"
