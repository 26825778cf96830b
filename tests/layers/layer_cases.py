"""Every layer with its weights and activations split: one table for tests on meshes.

Of uneven sizes, which the axes of no mesh divide, and of even ones, which Explicit axes need.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite import layers
from praxis_lite.core import constrain
from praxis_lite.layers import lora
from praxis_lite.layers.embedding import rotary_scaling

AXES = ("replica", "data", "mdl")
ROWS = AXES[:2]
OF_W, OF_X, OF_HEADS = ("data", "mdl"), (ROWS, None, "mdl"), (ROWS, None, "mdl", None)
RESIDUAL, OF_IMAGE = (ROWS, None, None), (ROWS, None, None, "mdl")
OF_FILTER, OF_DNK = (None, None, "data", "mdl"), ("data", "mdl", None)

partial = functools.partial


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of layers and their inputs.

    Attributes:
      per_head: dims of a head.
      kv_heads: of grouped attention, which has twice as many heads of queries.
      groups: of channels that a group norm takes together; they divide the model dims.
      channels, outputs: of images, and of the filters over them.
      resnet: output channels of each stage.
    """

    rows: int
    time: int
    model: int
    hidden: int
    heads: int
    per_head: int
    kv_heads: int
    vocab: int
    experts: int
    groups: int
    image: tuple[int, int]
    channels: int
    outputs: int
    resnet: tuple[int, ...]


SIZES = {
    "even": Sizes(
        rows=8,
        time=6,
        model=8,
        hidden=16,
        heads=4,
        per_head=4,
        kv_heads=2,
        vocab=16,
        experts=4,
        groups=4,
        image=(8, 8),
        channels=8,
        outputs=16,
        resnet=(16, 32),
    ),
    # Axes of 4 and 2 devices divide none but the heads of queries in groups.
    "uneven": Sizes(
        rows=7,
        time=5,
        model=9,
        hidden=17,
        heads=3,
        per_head=4,
        kv_heads=3,
        vocab=29,
        experts=5,
        groups=3,
        image=(6, 4),
        channels=3,
        outputs=5,
        resnet=(12,),
    ),
}


class Inputs(NamedTuple):
    """B rows of T tokens and S that a decoder reads, of D dims; images."""

    x: jax.Array
    ids: jax.Array
    image: jax.Array
    encoded: jax.Array
    segment_ids: jax.Array
    paddings: jax.Array
    encoded_paddings: jax.Array


def inputs_of(s: Sizes) -> Inputs:
    rng = np.random.default_rng(3)
    rows = (s.rows, s.time)
    return Inputs(
        x=rng.normal(size=(*rows, s.model)).astype(np.float32),
        ids=rng.integers(0, s.vocab, rows, dtype=np.int32),
        image=rng.normal(size=(s.rows, *s.image, s.channels)).astype(np.float32),
        encoded=rng.normal(size=(s.rows, 3, s.model)).astype(np.float32),
        segment_ids=np.sort(rng.integers(1, 3, rows), axis=1).astype(np.int32),
        paddings=(rng.random(rows) < 0.3).astype(np.float32),
        encoded_paddings=(np.arange(3) >= rng.integers(1, 4, (s.rows, 1))).astype(np.float32),
    )


class Case(NamedTuple):
    """What builds a layer of `rngs`, and what calls it on (layer, inputs, key).

    Attributes:
      of: the input by which outputs are differentiated, in addition to the weights.
    """

    build: Callable[..., Any]
    call: Callable[[Any, Inputs, jax.Array], jax.Array]
    of: str = "x"


def split(weight: Any, activation: Any = None) -> dict[str, Any]:
    given = {"weight_split_dims_mapping": weight, "activation_split_dims_mapping": activation}
    return {name: value for name, value in given.items() if value is not None}


HEADS = {**split(OF_DNK, OF_HEADS), "output_split_dims_mapping": RESIDUAL}
FED = {**split(OF_W, RESIDUAL), "hidden_split_dims_mapping": OF_X}
ATTENTION = partial(layers.DotProductAttention, **HEADS)
FEED_FORWARD = partial(layers.TransformerFeedForward, **FED)
BLOCK = partial(layers.Transformer, tr_atten_tpl=ATTENTION, tr_fflayer_tpl=FEED_FORWARD)
CONV = partial(layers.ConvBNAct, **split(OF_FILTER, OF_IMAGE))
# Without remat, which costs much compilation and has tests of its own.
KEEPS_ALL = partial(layers.Repeat, checkpoint_policy="save_everything")
SHARED_SOFTMAX = partial(
    layers.SharedEmbeddingSoftmax, **split(OF_W, OF_X), lookup_split_dims_mapping=RESIDUAL
)
# The gradient of the keys' biases would be nothing but rounding.
NO_BIAS = {"use_bias": False}


def of_x(layer: Any, i: Inputs, key: jax.Array) -> jax.Array:
    return layer(i.x)


def of_first_tokens(layer: Any, i: Inputs, key: jax.Array) -> jax.Array:
    return layer(i.x[:, 0])


def padded(layer: Any, i: Inputs, key: jax.Array) -> jax.Array:
    return layer(i.x, i.paddings, key=key)


def padded_evaluation(layer: Any, i: Inputs, key: jax.Array) -> jax.Array:
    return layer(i.x, i.paddings)


def with_key(layer: Any, i: Inputs, key: jax.Array) -> jax.Array:
    return layer(i.x, key=key)


def first(layer: Any, i: Inputs, key: jax.Array) -> jax.Array:
    return layer(i.x, key=key)[0]


def of_segments(layer: Any, i: Inputs, key: jax.Array) -> jax.Array:
    return layer(i.x, segment_ids=i.segment_ids)[0]


def of_padded_tokens(layer: Any, i: Inputs, key: jax.Array) -> jax.Array:
    return layer(i.x, paddings=i.paddings, key=key)[0]


def across(layer: Any, i: Inputs, key: jax.Array) -> jax.Array:
    return layer(i.x, encoded=i.encoded, encoded_paddings=i.encoded_paddings, key=key)[0]


def of_ids(layer: Any, i: Inputs, key: jax.Array) -> jax.Array:
    return layer(i.ids)


def of_all_ids(layer: Any, i: Inputs, key: jax.Array) -> jax.Array:
    return layer(i.ids, key=key)[0]


def of_image(layer: Any, i: Inputs, key: jax.Array) -> jax.Array:
    return layer(i.image)


def of_image_with_key(layer: Any, i: Inputs, key: jax.Array) -> jax.Array:
    return layer(i.image, key=key)


def first_of_image(layer: Any, i: Inputs, key: jax.Array) -> jax.Array:
    return layer(i.image)[0]


def embedded(layer: Any, i: Inputs, key: jax.Array) -> jax.Array:
    return layer(i.x + layer.emb_lookup(i.ids))


def loss_of(layer: Any, i: Inputs, key: jax.Array) -> jax.Array:
    x = i.x + layer.emb_lookup(i.ids)
    return layer.compute_loss(x, i.ids, 1.0 - i.paddings)["per_example_xent"]


def plus_positions(layer: Any, i: Inputs, key: jax.Array) -> jax.Array:
    return i.x + layer(seq_length=i.x.shape[1])


def turned(heads: int, per_head: int) -> Callable[..., jax.Array]:
    """Returns a call of a rotary embedding on heads, of which each is some of the model dims."""

    def call(layer: Any, i: Inputs, key: jax.Array) -> jax.Array:
        heads_BTNK = constrain(jnp.stack([i.x[..., :per_head]] * heads, axis=2), OF_HEADS)
        return layer(heads_BTNK, jnp.arange(i.x.shape[1])[None])

    return call


def joint_projection(s: Sizes) -> partial:
    return partial(layers.CombinedQKVProjectionLayer, s.model, s.heads, s.per_head)


def stacked_heads(layer: Any, i: Inputs, key: jax.Array) -> jax.Array:
    return jnp.stack(layer(i.x))


def dense_cases(s: Sizes) -> dict[str, Case]:
    """Returns dense layers, feed-forward layers and an adapted one."""
    return {
        "linear": Case(partial(layers.Linear, s.model, s.hidden, **split(OF_W, OF_X)), of_x),
        "bias": Case(partial(layers.Bias, s.model, **split(("mdl",), OF_X)), of_x),
        "feed_forward": Case(
            partial(layers.FeedForward, s.model, s.hidden, **split(OF_W, OF_X)), of_x
        ),
        "einsum": Case(
            partial(
                layers.Einsum,
                "...d,dnk->...nk",
                (s.model, s.heads, s.per_head),
                has_bias=True,
                **split(OF_DNK, OF_HEADS),
            ),
            of_x,
        ),
        "mlp": Case(
            partial(
                layers.Mlp, s.model, (s.hidden, s.vocab), s.heads, **split(OF_W, (ROWS, "mdl"))
            ),
            of_first_tokens,
        ),
        "projection": Case(
            partial(
                layers.AttentionProjection,
                s.model,
                s.heads,
                s.per_head,
                use_bias=True,
                **split(OF_DNK, OF_HEADS),
            ),
            of_x,
        ),
        "one-headed projection": Case(
            partial(
                layers.OneHeadedAttentionProjection, s.model, s.per_head, **split(("data", None))
            ),
            of_x,
        ),
        "joint projection": Case(partial(joint_projection(s), **split(OF_DNK)), stacked_heads),
        "fed": Case(partial(FEED_FORWARD, s.model, s.hidden), with_key),
        "gated and fed": Case(
            partial(
                FEED_FORWARD,
                s.model,
                s.hidden,
                activation="gelu",
                use_gated_activation=True,
                residual_dropout_prob=0.2,
            ),
            with_key,
        ),
        "dropout": Case(
            lambda rngs: layers.Dropout(0.3),
            lambda layer, i, key: layer(constrain(i.x, OF_X), key),
        ),
        "residual": Case(
            lambda rngs: layers.StochasticResidual(survival_prob=0.5),
            lambda layer, i, key: layer(i.x, jnp.sin(i.x), key),
        ),
        "adapted linear": Case(
            lora(partial(layers.Linear, s.model, s.vocab, **split(OF_W, OF_X)), rank=2), of_x
        ),
    }


def adapter_cases(s: Sizes) -> dict[str, Case]:
    """Returns adapters of layers with several products."""
    projection = partial(joint_projection(s), **split(OF_DNK))
    softmax = partial(SHARED_SOFTMAX, s.vocab, s.model)
    return {
        "adapted joint projection": Case(lora(projection, rank=2), stacked_heads),
        "joint projection of DoRA": Case(lora(projection, rank=2, use_dora=True), stacked_heads),
        "adapted softmax": Case(lora(softmax, rank=2), loss_of),
        "adapted softmax in chunks": Case(lora(partial(softmax, chunk_size=4), rank=2), loss_of),
        "softmax of DoRA": Case(lora(softmax, rank=2, use_dora=True), loss_of),
    }


def embedding_cases(s: Sizes) -> dict[str, Case]:
    """Returns embeddings, softmaxes and positions."""
    lengths = {"factor": 4.0, "original_max_positions": 3}
    half = s.per_head // 2
    rotaries = {
        layers.RotaryPositionalEmbedding: {},
        rotary_scaling.LinearScaledRotary: {"factor": 4.0},
        rotary_scaling.ProportionalRotary: {"factor": 2.0, "share": 0.5},
        rotary_scaling.DynamicRotary: lengths,
        rotary_scaling.Llama3Rotary: lengths,
        rotary_scaling.YarnRotary: lengths,
        rotary_scaling.LongRope: {
            "short_factor": [1.0] * half,
            "long_factor": [2.0] * half,
            "original_max_positions": 3,
        },
    }

    def rotary(cls: type, settings: dict[str, Any]) -> Callable[..., Any]:
        return lambda rngs: cls(s.per_head, **settings)

    table = split(("mdl", "data"), OF_X)
    return {
        "embedding": Case(partial(layers.Embedding, s.vocab, s.model, **table), of_ids),
        "embedding by matmul": Case(
            partial(layers.Embedding, s.vocab, s.model, lookup_style="matmul", **table), of_ids
        ),
        "softmax": Case(partial(layers.FullSoftmax, s.vocab, s.model, **split(OF_W, OF_X)), of_x),
        "shared softmax": Case(partial(SHARED_SOFTMAX, s.vocab, s.model, has_bias=True), embedded),
        "class-major softmax": Case(
            partial(layers.NClassMajorSharedEmbeddingSoftmax, s.vocab, s.model, **table), embedded
        ),
        "positions": Case(lambda rngs: layers.PositionalEmbedding(s.model), plus_positions),
        "learned positions": Case(
            partial(
                layers.TrainablePositionalEmbedding,
                s.hidden,
                s.model,
                **split(("mdl", "data"), (None, None, "mdl")),
            ),
            plus_positions,
        ),
        **{
            cls.__name__: Case(rotary(cls, settings), turned(s.heads, s.per_head))
            for cls, settings in rotaries.items()
        },
    }


def norm_cases(s: Sizes) -> dict[str, Case]:
    """Returns norms; those with statistics of padded rows, whose padding counts for nothing."""
    whole = split((("data", "mdl"),), OF_X)
    batch = partial(layers.BatchNorm, s.model, decay=0.7, **split(("mdl",), OF_X))
    group = partial(
        layers.GroupNorm, s.model, num_groups=s.groups, input_rank=3, **split(("mdl",), OF_X)
    )
    return {
        "layer norm": Case(partial(layers.LayerNorm, s.model, **whole), of_x),
        "layer norm of a direct scale": Case(
            partial(layers.LayerNorm, s.model, direct_scale=True, **whole), padded
        ),
        "rms norm": Case(partial(layers.RmsNorm, s.model, **whole), of_x),
        "rms norm of an offset scale": Case(
            partial(layers.RmsNorm, s.model, direct_scale=False, **whole), of_x
        ),
        "norm without a scale": Case(
            partial(layers.RmsNormNoScale, s.model, activation_split_dims_mapping=OF_X), of_x
        ),
        "identity norm": Case(layers.IdentityNorm, of_x),
        "batch norm": Case(batch, padded),
        "batch norm, evaluated": Case(batch, padded_evaluation),
        "batch norm of moving averages": Case(
            partial(batch, use_moving_avg_in_training=True), padded
        ),
        "group norm": Case(group, padded),
        "running group norm": Case(partial(group, cumulative=True), padded),
    }


def attention_cases(s: Sizes) -> dict[str, Case]:
    """Returns kinds of attention and recurrence, with options that split in their own way."""

    def attention(cls: type = layers.DotProductAttention, **settings: Any) -> partial:
        return partial(cls, s.model, s.heads, dim_per_head=s.per_head, **HEADS, **settings)

    grouped = partial(
        ATTENTION,
        s.model,
        2 * s.kv_heads,
        dim_per_head=s.per_head,
        num_kv_heads=s.kv_heads,
    )
    return {
        "attention": Case(attention(use_bias=True, use_rotary_position_emb=True), first),
        "attention with positions": Case(
            attention(
                internal_enable_per_dim_scale=False,
                relative_bias_tpl=layers.RelativeBias,
                **NO_BIAS,
            ),
            first,
        ),
        "grouped attention": Case(
            partial(
                grouped, window=3, use_rotary_position_emb=True, ln_tpl=layers.RmsNorm, **NO_BIAS
            ),
            of_segments,
        ),
        "grouped attention by its own layer": Case(
            partial(
                layers.GroupedQueryAttention,
                s.model,
                2 * s.kv_heads,
                num_kv_heads=s.kv_heads,
                dim_per_head=s.per_head,
                **HEADS,
            ),
            of_segments,
        ),
        "multi-query attention": Case(
            attention(
                layers.MultiQueryDotProductAttention,
                num_kv_heads=1,
                relative_bias_tpl=layers.RelativeBias,
                attention_extra_logit=0.3,
                **NO_BIAS,
            ),
            of_segments,
        ),
        "cross-attention": Case(
            partial(grouped, is_cross_attention=True, zero_fully_masked=True, **NO_BIAS), across
        ),
        "latent attention": Case(
            attention(
                layers.MultiHeadLatentAttention,
                q_lora_rank=s.model,
                kv_lora_rank=s.hidden,
                qk_nope_head_dim=4,
                qk_rope_head_dim=2,
                v_head_dim=6,
                use_bias=True,
            ),
            first,
        ),
        "rg_lru": Case(attention(layers.RgLruBlock), of_segments),
    }


def attention_option_cases(s: Sizes) -> dict[str, Case]:
    """Returns options of attention whose layers are among the kinds of attention."""
    joint = partial(ATTENTION, s.model, s.heads, dim_per_head=s.per_head, combine_qkv=True)
    return {
        "attention of joint projections": Case(
            partial(joint, atten_logit_cap=2.0, is_causal=False, **NO_BIAS), of_segments
        ),
        "attention in chunks": Case(
            partial(
                ATTENTION,
                s.model,
                2 * s.kv_heads,
                dim_per_head=s.per_head,
                num_kv_heads=s.kv_heads,
                atten_kernel="chunked",
                atten_chunk_size=2,
                window=4,
                **NO_BIAS,
            ),
            of_segments,
        ),
    }


def expert_cases(s: Sizes) -> dict[str, Case]:
    """Returns experts over the axis "mdl"; tests/layers/moe has those on an axis of their own."""

    def experts(**settings: Any) -> Case:
        return Case(
            partial(
                layers.TransformerFeedForwardMoe,
                s.model,
                s.hidden,
                num_experts=s.experts,
                gate_split_dims_mapping=("data", None),
                **split(("mdl", "data", None), RESIDUAL),
                **settings,
            ),
            with_key,
        )

    return {
        "experts with slots": experts(use_gated_activation=True, has_bias=True),
        "experts of their choice": experts(gating_func="expert_choice"),
        "two of all experts": experts(gating_func="dense_top2"),
        "experts in groups": experts(num_groups=s.rows, moe_router_z_loss_weight=0.1),
        "experts for all tokens": experts(dropless=True, num_shared_experts=1),
    }


def vision_cases(s: Sizes) -> dict[str, Case]:
    """Returns convolutions and poolings."""
    shape, of_image_split = (3, 3, s.channels, s.outputs), split(OF_FILTER, OF_IMAGE)
    windows = {"activation_split_dims_mapping": OF_IMAGE}
    features = {"activation_split_dims_mapping": (ROWS, "mdl")}
    over_time = {"activation_split_dims_mapping": OF_X}
    return {
        "convolution": Case(
            partial(layers.Conv2D, shape, (2, 1), bias=True, **of_image_split), of_image, "image"
        ),
        "normed convolution": Case(
            partial(layers.Conv2D, shape, weight_norm_tpl=layers.WeightNormL2, **of_image_split),
            of_image,
            "image",
        ),
        "depthwise convolution": Case(
            partial(
                layers.Conv2D,
                (3, 3, 1, 2 * s.channels),
                **split((None, None, None, "mdl"), OF_IMAGE),
            ),
            of_image,
            "image",
        ),
        "replicated depthwise filter": Case(
            partial(layers.Conv2D, (3, 3, 1, 2 * s.channels)), of_image, "image"
        ),
        "convolution over time": Case(
            partial(
                layers.DepthwiseConv1D,
                (3, s.model, 2),
                bias=True,
                is_causal=True,
                **split((None, None, "mdl"), OF_X),
            ),
            of_x,
        ),
        "convolution and norm": Case(partial(CONV, shape, (2, 1)), of_image_with_key, "image"),
        "maxima": Case(partial(layers.Pooling, (3, 2), (2, 1), **windows), first_of_image, "image"),
        "means": Case(
            partial(layers.Pooling, (3, 2), (2, 1), pooling_type="AVG", **windows),
            first_of_image,
            "image",
        ),
        "means over time": Case(
            partial(layers.Pooling1D, 2, 3, **over_time), lambda layer, i, key: layer(i.x)[0]
        ),
        "mean of an image": Case(
            partial(layers.GlobalPooling, pooling_dims=(1, 2), **features), of_image, "image"
        ),
        "maximum of an image": Case(
            partial(layers.GlobalPooling, pooling_dims=(1, 2), pooling_type="MAX", **features),
            of_image,
            "image",
        ),
    }


def model_cases(s: Sizes) -> dict[str, Case]:
    """Returns transformers' blocks and language models."""
    block = partial(BLOCK, s.model, s.hidden, s.heads, dim_per_head=s.per_head)
    drops = {"residual_droppath_prob": 0.5, "residual_dropout_prob": 0.3, "relu_dropout_prob": 0.2}

    return {
        "transformer": Case(block, of_segments),
        "transformer of two attentions, with dropout": Case(
            partial(
                block,
                use_cross_attention=True,
                norm_policy="post_skip",
                atten_dropout_prob=0.2,
                tr_atten_tpl=partial(ATTENTION, **NO_BIAS),
                **drops,
            ),
            across,
        ),
        "lm": language_model(s, stacked_transformer_tpl=KEEPS_ALL),
    }


def language_model(s: Sizes, **settings: Any) -> Case:
    return Case(
        partial(
            layers.TransformerLm,
            s.vocab,
            s.model,
            s.hidden,
            s.heads,
            2,
            dim_per_head=s.per_head,
            max_seq_length=s.hidden,
            transformer_layer_tpl=BLOCK,
            softmax_tpl=SHARED_SOFTMAX,
            **settings,
        ),
        of_all_ids,
    )


def network_cases(s: Sizes) -> dict[str, Case]:
    """Returns networks for images, and stacks of blocks that differ."""
    block = partial(BLOCK, s.model, s.hidden, s.heads, dim_per_head=s.per_head)

    def vit(rngs: Any, **settings: Any) -> Any:
        return layers.VisionTransformer(
            partial(
                layers.VitEntryLayers,
                tuple(side // 2 for side in s.image),
                2,
                4 * s.channels,
                s.model,
                prepend_cls_tokens=1,
                append_cls_tokens=1,
                **split((None, "data"), RESIDUAL),
            ),
            partial(KEEPS_ALL, partial(block, mask_self_attention=False), 2),
            partial(
                layers.VitExitLayers, s.model, s.vocab, **split(OF_W, (ROWS, "mdl")), **settings
            ),
            activation_split_dims_mapping=RESIDUAL,
            rngs=rngs,
        )

    def resnet(**settings: Any) -> Case:
        stages = len(s.resnet)
        return Case(
            partial(
                layers.ResNet,
                channels=s.resnet,
                blocks=(1,) * stages,
                strides=(2,) * stages,
                kernels=(3,) * stages,
                conv_params=CONV,
                entryflow_conv_kernel=(3, 3, s.channels),
                entryflow_conv_stride=(1, 1),
                **settings,
            ),
            of_image_with_key,
            "image",
        )

    def translated(layer: Any, i: Inputs, key: jax.Array) -> jax.Array:
        encoded = layer.encode(i.ids, input_paddings=i.paddings) + i.x
        return layer.softmax(
            layer.decode(i.ids[:, ::-1], encoded=encoded, input_paddings=i.paddings)[0]
        )

    unbiased = partial(BLOCK, tr_atten_tpl=partial(ATTENTION, **NO_BIAS))
    masked_and_not = [
        partial(
            block,
            mask_self_attention=is_masked,
            norm_policy="primer_hybrid",
            tr_atten_tpl=partial(ATTENTION, **NO_BIAS),
        )
        for is_masked in (True, False)
    ]
    return {
        "pattern of masked and unmasked blocks": Case(
            partial(KEEPS_ALL, partial(layers.StackedTransformer, masked_and_not, 2), 2),
            of_padded_tokens,
        ),
        "lm of blocks in a row": language_model(
            s, stacked_transformer_tpl=layers.StackedTransformer
        ),
        "encoder and decoder": Case(
            partial(
                layers.TransformerEncoderDecoder,
                s.vocab,
                s.model,
                s.hidden,
                s.heads,
                1,
                1,
                dim_per_head=s.per_head,
                encoder_layer_tpl=unbiased,
                decoder_layer_tpl=unbiased,
                encoder_stacked_transformer_tpl=layers.StackedTransformer,
                decoder_stacked_transformer_tpl=layers.StackedTransformer,
                softmax_tpl=SHARED_SOFTMAX,
            ),
            translated,
        ),
        "resnet": resnet(block_params=partial(layers.ResNetBlock, residual_droppath_prob=0.4)),
        "basic resnet": resnet(block_params=layers.ResNetBasicBlock),
        "vit": Case(vit, of_image_with_key, "image"),
        "vit with a class token": Case(
            partial(vit, pooling_tpl=layers.ClassTokenPooling), of_image_with_key, "image"
        ),
    }


# By group: what is compiled together.
GROUPS: dict[str, Callable[[Sizes], dict[str, Case]]] = {
    "dense": dense_cases,
    "adapters": adapter_cases,
    "embedding": embedding_cases,
    "norms": norm_cases,
    "attention": attention_cases,
    "attention_options": attention_option_cases,
    "experts": expert_cases,
    "vision": vision_cases,
    "models": model_cases,
    "networks": network_cases,
}
# (group, name) of every case.
NAMES = [(group, name) for group, cases in GROUPS.items() for name in cases(SIZES["even"])]
