"""Layers for sharding tests, as functions of `rngs`, with or without a mapping."""

import functools

from praxis_lite.layers import (
    AttentionProjection,
    DotProductAttention,
    Linear,
    Pipeline,
    Repeat,
    TransformerFeedForward,
    lora,
)

# D model dims, F hidden dims, N heads; D and F are not divisible by any mesh axis.
D, F, N = 7, 13, 4


def made(layer, *sizes, **settings):
    return lambda rngs: layer(*sizes, **settings, rngs=rngs)


def feed_forward(mapping=None, **settings):
    settings |= {} if mapping is None else {"weight_split_dims_mapping": mapping}
    return made(TransformerFeedForward, D, F, has_bias=False, **settings)


def attention(mapping=None, **settings):
    settings |= {} if mapping is None else {"weight_split_dims_mapping": mapping}
    return made(DotProductAttention, 8, N, use_bias=False, **settings)


def linear(mapping=None, dims=(D, F)):
    settings = {} if mapping is None else {"weight_split_dims_mapping": mapping}
    return made(Linear, *dims, **settings)


def repeated(make, **settings):
    return lambda rngs: Repeat(lambda rngs: make(rngs), 4, rngs=rngs, **settings)


def piped(make, **settings):
    return lambda rngs: Pipeline(
        lambda rngs: make(rngs), 4, num_stages=2, num_microbatches=2, rngs=rngs, **settings
    )


def adapted(make, only=None):
    return lambda rngs: lora(lambda rngs: make(rngs), rank=3, only=only)(rngs=rngs)


def rule(*pairs, **settings):
    return {"strategy": pairs, **settings}


COMBINED = functools.partial(AttentionProjection, attention_combine_dims=True)
NONE: dict = {}
IN, OUT = "ffn_layer1/linear/w", "ffn_layer2/linear/w"
