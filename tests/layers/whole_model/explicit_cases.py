"""Every layer, split over a mesh, in one model: for steps over Explicit axes and over Auto ones."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from praxis_lite import layers
from praxis_lite.core import Learner, Task, constrain
from praxis_lite.layers import AuxLoss, BaseLayer, intermediates
from praxis_lite.layers.embedding import rotary_scaling
from praxis_tools.check.asserts.layers import revealing

AXES = ("replica", "data", "mdl")
ROWS = AXES[:2]
# Batch, time, model and hidden dims, heads, dims per head, vocabulary, places of an image.
B, T, D, F, N, K, V, P = 8, 6, 8, 16, 4, 4, 16, 8
OF_W, OF_X, OF_HEADS = ("data", "mdl"), (ROWS, None, "mdl"), (ROWS, None, "mdl", None)
RESIDUAL, OF_IMAGE = (ROWS, None, None), (ROWS, None, None, "mdl")
OF_FILTER = (None, None, "data", "mdl")

partial = functools.partial


def split(weight: Any, activation: Any = None) -> dict[str, Any]:
    given = {"weight_split_dims_mapping": weight, "activation_split_dims_mapping": activation}
    return {name: value for name, value in given.items() if value is not None}


HEADS = {**split(("data", "mdl", None), OF_HEADS), "output_split_dims_mapping": RESIDUAL}
FED = {**split(OF_W, RESIDUAL), "hidden_split_dims_mapping": OF_X}
ROTARY = {"use_rotary_position_emb": True}
BLOCK = partial(
    layers.Transformer, tr_atten_tpl=partial(layers.DotProductAttention, **HEADS),
    tr_fflayer_tpl=partial(layers.TransformerFeedForward, **FED),
)
CONV = partial(layers.ConvBNAct, **split(OF_FILTER, OF_IMAGE))


LENGTHS = {"factor": 4.0, "original_max_positions": 3}
ROTARIES = {
    rotary_scaling.LinearScaledRotary: {"factor": 4.0},
    rotary_scaling.ProportionalRotary: {"factor": 2.0, "share": 0.5},
    rotary_scaling.DynamicRotary: LENGTHS,
    rotary_scaling.Llama3Rotary: LENGTHS,
    rotary_scaling.YarnRotary: LENGTHS,
    rotary_scaling.LongRope: {
        "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_positions": 3,
    },
}


def of_x(layer, x, ids, image, key):
    return layer(x)


def with_key(layer, x, ids, image, key):
    return layer(x, key=key)


def first(layer, x, ids, image, key):
    return layer(x, key=key)[0]


def of_ids(layer, x, ids, image, key):
    return layer(ids)


def of_heads(layer, x, ids, image, key):
    return layer(constrain(jnp.stack([x] * N, axis=2), OF_HEADS), jnp.arange(T)[None])


def of_image(layer, x, ids, image, key):
    return layer(image)


def of_image_with_key(layer, x, ids, image, key):
    return layer(image, key=key)


def first_of_image(layer, x, ids, image, key):
    return layer(image)[0]


def embedded(layer, x, ids, image, key):
    return layer(x + layer.emb_lookup(ids))


def attention(cls: type, *args: Any, **settings: Any) -> tuple[Callable, Callable]:
    return partial(cls, D, N, dim_per_head=K, **HEADS, **settings), first


def rotary(cls: type, settings: dict[str, Any]) -> Callable:
    return lambda rngs: cls(D, **settings)


def of_experts(**settings: Any) -> tuple[Callable, Callable]:
    return partial(
        layers.TransformerFeedForwardMoe, D, F, num_experts=4, **split(
            ("mdl", "data", None), RESIDUAL
        ), gate_split_dims_mapping=("data", None), **settings,
    ), with_key


def vit(rngs: Any, **settings: Any) -> Any:
    return layers.VisionTransformer(
        partial(
            layers.VitEntryLayers, (4, 4), 2, 4 * D, D, prepend_cls_tokens=1, append_cls_tokens=1,
            **split((None, "data"), RESIDUAL),
        ),
        partial(
            layers.StackedTransformer,
            partial(BLOCK, D, F, N, mask_self_attention=False), 2,
        ),
        partial(layers.VitExitLayers, D, F, **split(OF_W, (ROWS, "mdl")), **settings), rngs=rngs,
    )


def lm(**settings: Any) -> tuple[Callable, Callable]:
    return partial(
        layers.TransformerLm, V, D, F, N, 2, dim_per_head=K, max_seq_length=T,
        transformer_layer_tpl=BLOCK,
        **{"softmax_tpl": partial(layers.SharedEmbeddingSoftmax, **split(OF_W, OF_X))} | settings,
    ), lambda layer, x, ids, image, key: layer(ids, key=key)[0]


# By name: what builds a layer, and what calls it.
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "linear": (partial(layers.Linear, D, F, **split(OF_W, OF_X)), of_x),
    "bias": (partial(layers.Bias, D, **split(("mdl",), OF_X)), of_x),
    "feed_forward": (partial(layers.FeedForward, D, F, **split(OF_W, OF_X)), of_x),
    "einsum": (
        partial(
            layers.Einsum, "...d,dnk->...nk", (D, N, K), has_bias=True,
            **split(("data", "mdl", None), OF_HEADS),
        ),
        of_x,
    ),
    "mlp": (
        partial(layers.Mlp, D, (F, V), N, **split(OF_W, (ROWS, "mdl"))),
        lambda layer, x, ids, image, key: layer(x[:, 0]),
    ),
    "embedding": (partial(layers.Embedding, V, D, **split(("mdl", "data"), OF_X)), of_ids),
    "embedding by matmul": (
        partial(layers.Embedding, V, D, lookup_style="matmul", **split(("mdl", "data"), OF_X)),
        of_ids,
    ),
    "softmax": (partial(layers.FullSoftmax, V, D, **split(OF_W, OF_X)), of_x),
    "shared softmax": (
        partial(
            layers.SharedEmbeddingSoftmax, V, D, has_bias=True, **split(OF_W, OF_X),
            lookup_split_dims_mapping=RESIDUAL,
        ),
        embedded,
    ),
    "class-major softmax": (
        partial(
            layers.NClassMajorSharedEmbeddingSoftmax, V, D, **split(("mdl", "data"), OF_X),
        ),
        embedded,
    ),
    "positions": (
        lambda rngs: layers.PositionalEmbedding(D),
        lambda layer, x, ids, image, key: x + layer(seq_length=T),
    ),
    "learned positions": (
        partial(layers.TrainablePositionalEmbedding, T, D, **split((None, "data"), (None,))),
        lambda layer, x, ids, image, key: x + layer(seq_length=T),
    ),
    "rotary": (lambda rngs: layers.RotaryPositionalEmbedding(D), of_heads),
    **{cls.__name__: (rotary(cls, settings), of_heads) for cls, settings in ROTARIES.items()},
    "layer norm": (partial(layers.LayerNorm, D, **split((("data", "mdl"),), OF_X)), of_x),
    "rms norm": (partial(layers.RmsNorm, D, **split((("data", "mdl"),), OF_X)), of_x),
    "norm without a scale": (
        partial(layers.RmsNormNoScale, activation_split_dims_mapping=OF_X), of_x
    ),
    "identity norm": (layers.IdentityNorm, of_x),
    "batch norm": (partial(layers.BatchNorm, D, **split(("mdl",), OF_X)), with_key),
    "group norm": (
        partial(layers.GroupNorm, D, input_rank=3, num_groups=4, **split(("mdl",), OF_X)), of_x,
    ),
    "running group norm": (
        partial(layers.GroupNorm, D, input_rank=3, num_groups=4, cumulative=True), of_x
    ),
    "dropout": (
        lambda rngs: layers.Dropout(0.3),
        lambda layer, x, ids, image, key: layer(constrain(x, OF_X), key),
    ),
    "residual": (
        lambda rngs: layers.StochasticResidual(survival_prob=0.5),
        lambda layer, x, ids, image, key: layer(x, jnp.sin(x), key),
    ),
    "projection": (
        partial(layers.AttentionProjection, D, N, K, **split(("data", "mdl", None), OF_HEADS)), of_x
    ),
    "joint projection": (
        partial(layers.CombinedQKVProjectionLayer, D, N, K, **split(("data", "mdl", None))),
        lambda layer, x, ids, image, key: sum(layer(x)),
    ),
    "one-headed projection": (
        partial(layers.OneHeadedAttentionProjection, D, K, **split(("data", None))), of_x
    ),
    "attention": attention(layers.DotProductAttention, use_bias=True, **ROTARY),
    "attention with positions": attention(
        layers.DotProductAttention, internal_enable_per_dim_scale=True,
        relative_bias_tpl=layers.RelativeBias,
    ),
    "grouped attention": attention(layers.GroupedQueryAttention, num_kv_heads=2),
    "multi-query attention": attention(layers.MultiQueryDotProductAttention),
    "latent attention": attention(
        layers.MultiHeadLatentAttention, q_lora_rank=6, kv_lora_rank=8, qk_nope_head_dim=4,
        qk_rope_head_dim=2, v_head_dim=6, use_bias=True,
    ),
    "fed": (partial(layers.TransformerFeedForward, D, F, **FED), with_key),
    "gated and fed": (
        partial(
            layers.TransformerFeedForward, D, F, use_gated_activation=True,
            residual_dropout_prob=0.2, **FED,
        ),
        with_key,
    ),
    "experts with slots": of_experts(use_gated_activation=True, has_bias=True),
    "experts of their choice": of_experts(gating_func="expert_choice"),
    "two of all experts": of_experts(gating_func="dense_top2"),
    "experts in groups": of_experts(num_groups=4, moe_router_z_loss_weight=0.1),
    "experts for all tokens": of_experts(dropless=True, num_shared_experts=1),
    "rg_lru": (partial(layers.RgLruBlock, D, N, dim_per_head=K, **HEADS), first),
    "transformer": (partial(BLOCK, D, F, N), first),
    "lm": lm(),
    "lm by steps": lm(stacked_transformer_tpl=layers.StackedTransformer),
    "convolution": (
        partial(layers.Conv2D, (3, 3, D, D), (2, 1), bias=True, **split(OF_FILTER, OF_IMAGE)),
        of_image,
    ),
    "normed convolution": (
        partial(
            layers.Conv2D, (3, 3, D, D), weight_norm_tpl=layers.WeightNormL2,
            **split(OF_FILTER, OF_IMAGE),
        ),
        of_image,
    ),
    "depthwise convolution": (
        partial(layers.Conv2D, (3, 3, 1, F), **split((None, None, None, "mdl"), OF_IMAGE)), of_image
    ),
    "whole depthwise filter": (partial(layers.Conv2D, (3, 3, 1, F)), of_image),
    "convolution over time": (
        partial(layers.DepthwiseConv1D, (3, D, 2), bias=True, **split((None, None, "mdl"), OF_X)),
        of_x,
    ),
    "convolution and norm": (partial(CONV, (3, 3, D, D)), of_image_with_key),
    "maxima": (
        partial(layers.Pooling, (3, 2), (2, 1), activation_split_dims_mapping=OF_IMAGE),
        first_of_image,
    ),
    "means": (
        partial(
            layers.Pooling, (3, 2), (2, 1), pooling_type="AVG",
            activation_split_dims_mapping=OF_IMAGE,
        ),
        first_of_image,
    ),
    "maxima over time": (
        lambda rngs: layers.Pooling1D(3, 2), lambda layer, x, ids, image, key: layer(x)[0]
    ),
    "mean of an image": (partial(layers.GlobalPooling, pooling_dims=(1, 2)), of_image),
    "resnet": (
        partial(
            layers.ResNet, channels=(16, 32), blocks=(1, 1), strides=(1, 2), kernels=(3, 3),
            entryflow_conv_kernel=(3, 3, D), conv_params=CONV,
        ),
        of_image_with_key,
    ),
    "basic resnet": (
        partial(
            layers.ResNet, channels=(8, 16), blocks=(1, 1), strides=(1, 2), kernels=(3, 3),
            entryflow_conv_kernel=(3, 3, D), conv_params=CONV,
            block_params=layers.ResNetBasicBlock,
        ),
        of_image_with_key,
    ),
    "vit": (vit, of_image_with_key),
    "vit with a class token": (
        partial(vit, pooling_tpl=layers.ClassTokenPooling), of_image_with_key
    ),
}


class EveryLayer(BaseLayer):
    """Returns the outputs of each case by its name."""

    def __init__(self, names: tuple[str, ...], *, rngs: Any):
        self.names = names
        for i, name in enumerate(names):
            setattr(self, f"case_{i}", CASES[name][0](rngs=rngs))

    def __call__(self, x, ids, image, key) -> dict[str, jax.Array]:
        return {
            name: CASES[name][1](getattr(self, f"case_{i}"), x, ids, image, key)
            for i, name in enumerate(self.names)
        }


class OfEveryLayer(Task):
    """A loss of each layer, and their sum."""

    required_inputs = ("x", "ids", "image")

    def __init__(self, names: tuple[str, ...]):
        rows = {f"map_{rank}d": (ROWS, *(None,) * (rank - 1)) for rank in range(1, 5)}
        super().__init__(
            partial(EveryLayer, names), Learner(optax.sgd, 0.01), inputs_split_mapping=rows
        )

    def compute_loss(self, model, inputs, key):
        outputs = model(inputs["x"], inputs["ids"], inputs["image"], key)
        losses = {name: revealing(y) / y.size for name, y in outputs.items()}
        loss = sum(losses.values()) + sum(intermediates(model, AuxLoss).values())
        return {name: (value, jnp.ones(())) for name, value in {**losses, "loss": loss}.items()}


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {
        "x": rng.normal(size=(B, T, D)).astype(np.float32),
        "ids": rng.integers(0, V, (B, T), dtype=np.int32),
        "image": rng.normal(size=(B, P, P, D)).astype(np.float32),
    }
