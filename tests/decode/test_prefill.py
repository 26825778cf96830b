"""Prompts in one pass, in chunks or by tokens: the same continuation, whatever a layer keeps."""

import dataclasses
import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.core import NnxModel
from praxis_lite.decode import BeamSearch, Greedy, Sample
from praxis_lite.decode.continuous_batching import ContinuousBatching, Prompt
from praxis_lite.decode.decoder import Prompts
from praxis_lite.decode.prefill import prefill
from praxis_lite.layers import DotProductAttention, RgLruBlock, Transformer, TransformerLm
from praxis_lite.layers.attention.kv_cache import SPARE_PLACES
from tests.decode.toy_models import row_keys
from tests.support.marks import slow_or_nightly

V, P, M, W = 29, 28, 5, 3
R = W + SPARE_PLACES
# Prompts are shorter than a window's ring, longer, and of all lengths modulo a chunk's.
LENGTHS = np.asarray([P, 2, 0, R + 1, 14], np.int32)
PROMPTS = np.where(
    np.arange(P) < LENGTHS[:, None],
    np.random.default_rng(12).integers(1, V, (len(LENGTHS), P)),
    7,  # What stands in the padding must not matter.
).astype(np.int32)
GREEDY = Greedy(max_decode_steps=M, eos_id=())
DECODERS = {
    "chunks": dataclasses.replace(GREEDY, prefill_chunk_size=7),
    "wide chunks": dataclasses.replace(GREEDY, prefill_chunk_size=SPARE_PLACES + 2),
    "one pass": GREEDY,
    "tokens": dataclasses.replace(GREEDY, fprop_for_prefix=False),
    "sample": Sample(max_decode_steps=M, eos_id=(), num_samples=2, prefill_chunk_size=5),
    "beam": BeamSearch(max_decode_steps=M, eos_id=3, beam_size=3, prefill_chunk_size=7),
}


@functools.cache
def model_and_vars():
    """Returns a model with a window, a layer without, and a recurrent one."""

    def layer(template, **settings):
        return fdl.Partial(Transformer, tr_atten_tpl=fdl.Partial(template, **settings))

    pattern = [
        layer(DotProductAttention, window=W, use_rotary_position_emb=True, num_kv_heads=1),
        layer(DotProductAttention, use_rotary_position_emb=True),
        layer(RgLruBlock),
    ]
    model = NnxModel(
        fdl.build(
            fdl.Partial(
                TransformerLm,
                V,
                12,
                17,
                num_heads=3,
                num_layers=3,
                dim_per_head=4,
                position_emb_tpl=None,
                transformer_layer_tpl=pattern,
            )
        )
    )
    rng = np.random.default_rng(13)
    mdl_vars = jax.tree.map(
        lambda w: rng.normal(scale=0.3, size=w.shape).astype(np.float32),
        jax.eval_shape(model.init, jax.random.key(0)),
    )
    return model, mdl_vars


@functools.cache
def decoded(name):
    model, mdl_vars = model_and_vars()
    run = jax.jit(lambda v, *args: DECODERS[name](model.module(v), *args))
    return jax.device_get(run(mdl_vars, PROMPTS, LENGTHS, row_keys(len(LENGTHS))))


@functools.cache
def whole():
    """Returns a function from ids [T] to the log-probs of the next tokens, without a cache."""
    model, mdl_vars = model_and_vars()
    run = jax.jit(lambda v, ids: jax.nn.log_softmax(model.module(v)(ids)[0], axis=-1))
    return lambda ids: np.asarray(run(mdl_vars, np.pad(ids, (0, P + M - len(ids)))[None])[0])


@pytest.mark.parametrize("name", slow_or_nightly({"chunks"}, {"tokens", "beam"}, DECODERS))
def test_continuations_have_the_log_probs_of_the_whole_sequence_without_a_cache(name):
    actual = decoded(name)
    for row in np.flatnonzero(LENGTHS):
        start = LENGTHS[row]
        for hyp, length in enumerate(actual["decode_lengths"][row]):
            ids = actual["output_ids"][row, hyp, :length]
            expected = whole()(np.concatenate([PROMPTS[row, :start], ids]))
            at = start - 1 + np.arange(length)
            if isinstance(DECODERS[name], Greedy) and DECODERS[name].num_hyps == 1:
                np.testing.assert_array_equal(ids, expected[at].argmax(axis=-1))
            np.testing.assert_allclose(
                actual["logprobs"][row, hyp, :length], expected[at, ids], rtol=1e-4, atol=2e-5
            )
            assert length == M or name == "beam"
    assert actual["output_ids"].std() > 3


@pytest.mark.slow
def test_shared_beginnings_that_are_longer_than_a_ring_change_no_token():
    model, mdl_vars = model_and_vars()
    ids = np.where(np.arange(P) < R + 4, PROMPTS[0], PROMPTS[::-1])
    lengths = np.asarray([P, R + 5, P - 1, R + 6, P], np.int32)
    keys = row_keys(len(ids))
    run = jax.jit(lambda v, *args: GREEDY(model.module(v), *args))
    expected = jax.device_get(run(mdl_vars, ids, lengths, keys))["output_ids"][:, 0]
    assert len(set(map(tuple, expected))) > 2
    decoder = dataclasses.replace(DECODERS["chunks"], num_cached_prefixes=2)
    batching = ContinuousBatching(decoder, model.module, 2, P)
    prompts = [Prompt(*item) for item in zip(ids, lengths, keys, strict=True)]
    actual = [[] for _ in ids]
    for new in batching.stream(mdl_vars, prompts):
        actual[new.index].extend(new.ids)
    np.testing.assert_array_equal(actual, expected)
    assert batching.latest.num_read_tokens < batching.latest.num_prompt_tokens


def test_chunks_take_less_memory_than_the_whole_prompt():
    length, size = 512, 32
    lm = fdl.Partial(TransformerLm, V, 12, 17, num_heads=3, num_layers=1, position_emb_tpl=None)
    model = NnxModel(fdl.build(lm))
    mdl_vars = jax.eval_shape(model.init, jax.random.key(0))

    def temporary_bytes(decoder):
        def run(mdl_vars, ids, lengths):
            return prefill(decoder, model.module(mdl_vars), Prompts(ids, lengths, None))

        ids = jax.ShapeDtypeStruct((2, length), jnp.int32)
        args = mdl_vars, ids, jax.ShapeDtypeStruct((2,), jnp.int32)
        return jax.jit(run).lower(*args).compile().memory_analysis().temp_size_in_bytes

    logits = 2 * 3 * length * length * 4  # Of a layer: rows, heads, queries, keys.
    chunks = dataclasses.replace(GREEDY, prefill_chunk_size=size)
    assert temporary_bytes(GREEDY) > logits
    assert temporary_bytes(chunks) < 4 * logits * size / length


def test_chunks_of_prompts_that_are_read_by_tokens_are_refused():
    with pytest.raises(ConfigError, match="Greedy.prefill_chunk_size.*None"):
        Greedy(prefill_chunk_size=4, fprop_for_prefix=False)
