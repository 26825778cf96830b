"""A wrong setting of a layer is an error that names the layer and the setting, before any maths."""

import ast
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers

LM = functools.partial(layers.TransformerLm, 11, 8, 12, 2, 2)
ROTARY_BLOCK = functools.partial(
    layers.Transformer,
    tr_atten_tpl=functools.partial(layers.DotProductAttention, use_rotary_position_emb=True),
)
TOKENS = jnp.ones((1, 3), jnp.int32)
X = jnp.ones((1, 3, 8))
WRONG = {
    # What is handed to a call, and to a method.
    r"Transformer .*'padings'.*paddings\?": lambda r: layers.Transformer(8, 12, 2, rngs=r)(
        X, padings=TOKENS
    ),
    "Transformer .*'padings'.*inputs, positions": lambda r: layers.Repeat(
        functools.partial(layers.Transformer, 8, 12, 2), 2, rngs=r
    )(X, padings=TOKENS),
    r"RgLruBlock.*'segment_id'.*segment_ids\?": lambda r: layers.RgLruBlock(8, 2, rngs=r)(
        X, segment_id=TOKENS
    ),
    r"RgLruBlock\.init_cache.*'dtpye'.*dtype\?": lambda r: layers.RgLruBlock(
        8, 2, rngs=r
    ).init_cache(1, 3, dtpye=jnp.float32),
    r"TransformerLm\.compute_loss.*'segments'.*segment_ids": lambda r: LM(rngs=r).compute_loss(
        TOKENS, TOKENS, TOKENS, segments=TOKENS
    ),
    r"TransformerEncoderDecoder\.decode.*'target_padings'.*target_paddings": (
        lambda r: layers.TransformerEncoderDecoder(11, 8, 12, 2, 1, 1, rngs=r)(
            TOKENS, TOKENS, target_padings=TOKENS
        )
    ),
    r"Linear\.output_dims.*0": lambda r: layers.Linear(3, 0, rngs=r),
    r"Linear\.input_dims.*2\.5": lambda r: layers.Linear(2.5, 3, rngs=r),
    r"Bias\.dims.*-1": lambda r: layers.Bias(-1, rngs=r),
    r"FeedForward\.input_dims.*0": lambda r: layers.FeedForward(0, 3, rngs=r),
    r"FeedForward\.activation.*'gleu'.*gelu": lambda r: layers.FeedForward(
        3, 3, activation="gleu", rngs=r
    ),
    r"Mlp\.hidden_dims\[1\].*0": lambda r: layers.Mlp(3, (5, 0), 2, rngs=r),
    r"Mlp\.activation.*'rule'.*relu": lambda r: layers.Mlp(3, (), 2, activation="rule", rngs=r),
    r"Embedding\.num_classes.*True": lambda r: layers.Embedding(True, 3, rngs=r),
    r"SharedEmbeddingSoftmax\.num_classes.*0": lambda r: layers.SharedEmbeddingSoftmax(
        0, 3, rngs=r
    ),
    r"LayerNorm\.dim.*0": lambda r: layers.LayerNorm(0, rngs=r),
    r"RmsNorm\.dim.*0": lambda r: layers.RmsNorm(0, rngs=r),
    r"Dropout\.dropout_prob.*1\.0": lambda r: layers.Dropout(1.0),
    r"RotaryPositionalEmbedding\.embedding_dims.*7.*dim_per_head": lambda r: (
        layers.RotaryPositionalEmbedding(7)
    ),
    r"TrainablePositionalEmbedding\.max_seq_length.*0": lambda r: (
        layers.TrainablePositionalEmbedding(0, 3, rngs=r)
    ),
    "DotProductAttention.*3.*8.*dim_per_head": lambda r: layers.DotProductAttention(8, 3, rngs=r),
    r"DotProductAttention\.num_heads.*0": lambda r: layers.DotProductAttention(8, 0, rngs=r),
    "DotProductAttention.*3.*10": lambda r: layers.DotProductAttention(9, 3, hidden_dim=10, rngs=r),
    r"num_kv_heads.*3.*4.*\[1, 2, 4\]": lambda r: layers.DotProductAttention(
        8, 4, num_kv_heads=3, rngs=r
    ),
    r"DotProductAttention\.window.*0": lambda r: layers.DotProductAttention(8, 4, window=0, rngs=r),
    r"DotProductAttention\.right_context.*2": lambda r: layers.DotProductAttention(
        8, 4, right_context=2, rngs=r
    ),
    r"atten_kernel.*'einsun'.*einsum\?": lambda r: layers.DotProductAttention(
        8, 4, atten_kernel="einsun", rngs=r
    ),
    "atten_kernel.*'splash'.*relative_bias_tpl.*'einsum'": lambda r: layers.DotProductAttention(
        8, 4, atten_kernel="splash", relative_bias_tpl=layers.RelativeBias, rngs=r
    ),
    "embedding_dims.*3.*dim_per_head": lambda r: layers.DotProductAttention(
        8, 2, dim_per_head=3, use_rotary_position_emb=True, rngs=r
    ),
    r"combine_qkv .*num_kv_heads": lambda r: layers.DotProductAttention(
        8, 4, combine_qkv=True, num_kv_heads=2, rngs=r
    ),
    "is_cross_attention=True": lambda r: layers.DotProductAttention(
        8, 4, is_cross_attention=True, window=3, rngs=r
    ),
    r"input_dim.*\['query'\]": lambda r: layers.DotProductAttention({"query": 8}, 4, rngs=r),
    r"atten_logit_cap.*-1\.0": lambda r: layers.DotProductAttention(
        8, 4, atten_logit_cap=-1.0, rngs=r
    ),
    "hidden_dim / num_heads": lambda r: layers.DotProductAttention(
        3, 4, dim_per_head=2, internal_enable_per_dim_scale=False, rngs=r
    ),
    "attention_combine_dims": lambda r: layers.AttentionProjection(
        8, 2, 4, attention_combine_dims=True, rngs=r
    ),
    "relative_attention_num_buckets.*3.*4": lambda r: layers.RelativeBias(
        2, relative_attention_num_buckets=3, bidirectional=True, rngs=r
    ),
    "relative_attention_max_distance.*4": lambda r: layers.RelativeBias(
        2, relative_attention_num_buckets=8, relative_attention_max_distance=4, rngs=r
    ),
    r"TransformerFeedForward\.hidden_dims.*0": lambda r: layers.TransformerFeedForward(
        3, 0, rngs=r
    ),
    r"TransformerFeedForwardMoe\.hidden_dims.*0": lambda r: layers.TransformerFeedForwardMoe(
        3, 0, num_experts=2, rngs=r
    ),
    r"Pipeline\.num_stages.*0": lambda r: layers.Pipeline(
        lambda rngs: None, 2, num_stages=0, num_microbatches=2, rngs=r
    ),
    r"Repeat\.num_layers.*0": lambda r: layers.Repeat(lambda rngs: None, 0, rngs=r),
    r"TransformerLm\.vocab_size.*0": lambda r: layers.TransformerLm(0, 8, 12, 2, 2, rngs=r),
    r"TransformerFeedForward\.hidden_dims.* 0;": lambda r: layers.TransformerLm(
        11, 8, 0, 2, 2, rngs=r
    ),
    r"RotaryPositionalEmbedding\.embedding_dims.*5": lambda r: LM(
        dim_per_head=5, transformer_layer_tpl=ROTARY_BLOCK, rngs=r
    ),
    "max_seq_length.*5.*6": lambda r: LM(max_seq_length=5, rngs=r)(jnp.zeros((1, 6), jnp.int32)),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_setting_names_the_layer_and_the_setting(message):
    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(lambda: WRONG[message](nnx.Rngs(0)))


def test_no_function_takes_keywords_that_it_does_not_use():
    files = [*Path(layers.__file__).parents[1].rglob("*.py")]
    assert len(files) > 100

    def only_text(node):
        return all(isinstance(item, ast.Expr) for item in node.body)

    for path in files:
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if "**" in source else ():
            # One that is nothing but a docstring is not there to be called.
            if isinstance(node, ast.FunctionDef) and node.args.kwarg and not only_text(node):
                used = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
                assert node.args.kwarg.arg in used, f"{path.name}: {node.name} swallows keywords"
