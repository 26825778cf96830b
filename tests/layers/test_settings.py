"""A wrong setting of a layer is an error that names the layer and the setting, before any maths."""

import functools

import jax.numpy as jnp
import pytest
from flax import nnx

from praxis_lite import layers
from praxis_lite.errors import ConfigError

LM = functools.partial(layers.TransformerLm, 11, 8, 12, 2, 2)
WRONG = {
    r"Linear\.output_dims is 0": lambda r: layers.Linear(3, 0, rngs=r),
    r"Linear\.input_dims is 2\.5": lambda r: layers.Linear(2.5, 3, rngs=r),
    r"Bias\.dims is -1": lambda r: layers.Bias(-1, rngs=r),
    r"FeedForward\.input_dims is 0": lambda r: layers.FeedForward(0, 3, rngs=r),
    r"FeedForward\.activation is 'gleu'.*gelu": lambda r: layers.FeedForward(
        3, 3, activation="gleu", rngs=r
    ),
    r"Mlp\.hidden_dims\[1\] is 0": lambda r: layers.Mlp(3, (5, 0), 2, rngs=r),
    r"Mlp\.activation is 'rule'.*relu": lambda r: layers.Mlp(3, (), 2, activation="rule", rngs=r),
    r"Embedding\.num_classes is True": lambda r: layers.Embedding(True, 3, rngs=r),
    r"SharedEmbeddingSoftmax\.num_classes is 0": lambda r: layers.SharedEmbeddingSoftmax(
        0, 3, rngs=r
    ),
    r"LayerNorm\.dim is 0": lambda r: layers.LayerNorm(0, rngs=r),
    r"RmsNorm\.dim is 0": lambda r: layers.RmsNorm(0, rngs=r),
    r"Dropout\.dropout_prob is 1\.0": lambda r: layers.Dropout(1.0),
    r"RotaryPositionalEmbedding\.embedding_dims is 7.*dim_per_head": lambda r: (
        layers.RotaryPositionalEmbedding(7)
    ),
    r"TrainablePositionalEmbedding\.max_seq_length is 0": lambda r: (
        layers.TrainablePositionalEmbedding(0, 3, rngs=r)
    ),
    r"DotProductAttention: 3 heads do not divide the 8 .*dim_per_head": lambda r: (
        layers.DotProductAttention(8, 3, rngs=r)
    ),
    r"DotProductAttention\.num_heads is 0": lambda r: layers.DotProductAttention(8, 0, rngs=r),
    r"TransformerFeedForward\.hidden_dims is 0": lambda r: layers.TransformerFeedForward(
        3, 0, rngs=r
    ),
    r"Repeat\.num_layers is 0": lambda r: layers.Repeat(lambda rngs: None, 0, rngs=r),
    r"TransformerLm\.vocab_size is 0": lambda r: layers.TransformerLm(0, 8, 12, 2, 2, rngs=r),
    r"TransformerFeedForward\.hidden_dims is 0.*": lambda r: layers.TransformerLm(
        11, 8, 0, 2, 2, rngs=r
    ),
    r"RotaryPositionalEmbedding\.embedding_dims is 5": lambda r: LM(dim_per_head=5, rngs=r),
    r"max_seq_length is 5, but a sequence has up to 6": lambda r: LM(max_seq_length=5, rngs=r)(
        jnp.zeros((1, 6), jnp.int32)
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_setting_names_the_layer_and_the_setting(message):
    with pytest.raises(ConfigError, match=message):
        WRONG[message](nnx.Rngs(0))
