"""Layers that know nothing of padding continue ragged prompts as each prompt alone."""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.decode import BeamSearch, Greedy
from praxis_lite.decode.continuous_batching import ContinuousBatching, Prompt
from praxis_lite.decode.prompt_padding import layers_that_keep_padding
from praxis_lite.layers import BaseLayer, rotary_lm
from tests.decode.cached_layers import (
    Block,
    GatedConv,
    Mean,
    Memory,
    SharedCounter,
    ShiftedFeedForward,
    StateSpace,
)
from tests.decode.toy_models import row_keys
from tests.support.marks import slow_but, slow_or_nightly

# D model dims.
V, D, P, M = 13, 6, 7, 3
LENGTHS = np.asarray([2, 7, 0, 5], np.int32)
PROMPTS = np.random.default_rng(0).integers(0, V, (len(LENGTHS), P)).astype(np.int32)
ROWS = np.flatnonzero(LENGTHS)


class WholeModel(nnx.Module):
    """A model without a layer of the library."""

    def __init__(self, *, rngs):
        self.embedding = nnx.Embed(V, D, rngs=rngs)
        self.mean, self.out = Mean(D, rngs=rngs), nnx.Linear(D, V, rngs=rngs)

    def init_cache(self, batch_size, max_seq_length):
        return self.mean.init_cache(batch_size, max_seq_length, jnp.float32)

    def __call__(self, ids, *, positions=None, paddings=None, cache=None):
        x, cache = self.mean(self.embedding(ids), cache=cache)
        return 3.0 * self.out(jnp.tanh(x)), cache


def lm(layer, slot="tr_atten_tpl", **settings):
    config = rotary_lm(
        vocab_size=V, model_dims=D, hidden_dims=11, num_heads=2, dim_per_head=4, num_layers=2
    )
    config.softmax_tpl.scale_sqrt_depth = True
    if slot == "block":
        config.transformer_layer_tpl = layer
    else:
        setattr(config.transformer_layer_tpl, slot, layer)
    return fdl.build(config)(rngs=nnx.Rngs(1))


MODELS = {
    **{
        layer.__name__: functools.partial(lm, layer)
        for layer in (GatedConv, StateSpace, Mean, Memory)
    },
    "feed-forward": functools.partial(lm, ShiftedFeedForward, "tr_fflayer_tpl"),
    "block": functools.partial(lm, Block, "block"),
    "model": lambda: WholeModel(rngs=nnx.Rngs(0)),
}


@functools.cache
def model_of(name):
    return jax.jit(MODELS[name])()


@functools.cache
def by_hand(name, num_steps=M):
    """Returns the likeliest tokens after each prompt, each from a pass over all tokens so far."""
    model = model_of(name)
    run = jax.jit(lambda ids: model(ids)[0])
    rows = []
    for row in ROWS:
        ids = np.zeros((1, P + num_steps), np.int32)
        ids[0, : LENGTHS[row]] = PROMPTS[row, : LENGTHS[row]]
        for n in range(LENGTHS[row], LENGTHS[row] + num_steps):
            ids[0, n] = int(np.argmax(run(ids)[0, n - 1]))
        rows.append(ids[0, LENGTHS[row] : LENGTHS[row] + num_steps].tolist())
    return rows


# Every way below reads prompts with "Mean", and continuous batches with "Memory". As in
# "StateSpace", the batch is not the first dim in a cache of tests/decode/toy_models.py.
@pytest.mark.parametrize("name", slow_or_nightly({"model"}, {"block", "GatedConv"}, MODELS))
def test_ragged_prompts_are_continued_as_by_hand(name):
    run = jax.jit(functools.partial(Greedy(max_decode_steps=M), model_of(name)))
    actual = run(PROMPTS, LENGTHS, row_keys(len(LENGTHS)))
    assert actual["output_ids"][ROWS, 0].tolist() == by_hand(name)


WAYS = {
    "chunks": Greedy(max_decode_steps=M, prefill_chunk_size=3),
    "stepwise": Greedy(max_decode_steps=M, fprop_for_prefix=False),
    "shared prefixes": Greedy(max_decode_steps=M, num_cached_prefixes=2),
    "beams": BeamSearch(max_decode_steps=M, beam_size=2, eos_id=3),
}


# Continuous batches read in chunks, and share prefixes.
@pytest.mark.parametrize("way", slow_but({"stepwise"}, WAYS))
def test_every_way_to_read_prompts_leaves_padding_out(way):
    run = jax.jit(functools.partial(WAYS[way], model_of("Mean")))
    actual = run(PROMPTS, LENGTHS, row_keys(len(LENGTHS)))
    if way == "beams":
        row = 0  # Two tokens in a row of seven.
        alone = run(PROMPTS[row, None, : LENGTHS[row]], LENGTHS[row, None], row_keys(1))
        np.testing.assert_array_equal(actual["output_ids"][row], alone["output_ids"][0])
        np.testing.assert_allclose(actual["scores"][row], alone["scores"][0], atol=1e-5)
        return
    assert actual["output_ids"][ROWS, 0].tolist() == by_hand("Mean")
    if way == "stepwise":
        alone = run(PROMPTS[:1, :2], LENGTHS[:1], row_keys(1))
        np.testing.assert_allclose(
            actual["prefix_logprobs"][0, :2], alone["prefix_logprobs"][0], atol=1e-5
        )


@pytest.mark.parametrize("way", slow_but({"shared prefixes"}, ["chunks", "shared prefixes"]))
def test_continuous_batches_and_their_kept_prefixes_leave_padding_out(way):
    prompts, model = np.concatenate([PROMPTS[ROWS]] * 2), model_of("Memory")
    batching = ContinuousBatching(WAYS[way], lambda mdl_vars: model, 4, P)
    ids = [[] for _ in prompts]
    for new in batching.stream(
        None,
        [
            Prompt(*given)
            for given in zip(
                prompts,
                np.concatenate([LENGTHS[ROWS]] * 2),
                row_keys(len(prompts)),
                strict=True,
            )
        ],
    ):
        ids[new.index] += new.ids.tolist()
    assert ids == by_hand("Memory") * 2


def test_what_cannot_be_right_is_refused():
    greedy = Greedy(max_decode_steps=M)
    with pytest.raises(ConfigError, match="position.*batch"):
        greedy.check_model(nnx.eval_shape(lambda: lm(SharedCounter)))
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        decoder = Greedy(max_decode_steps=M, num_speculative_tokens=2)
        decoder.check_model(nnx.eval_shape(MODELS["block"]))


class ByPosition(layers.DotProductAttention):
    """Attention whose subclass does not say whether it still leaves padding out."""

    def __call__(self, inputs, **rows):
        return super().__call__(inputs, **rows)


class ByPositionToo(ByPosition):
    cache_skips_padding = True


def test_the_librarys_layers_read_prompts_in_one_pass_and_a_new_call_declares_it_again():
    for name in dir(layers):
        item = getattr(layers, name)
        if isinstance(item, type) and issubclass(item, BaseLayer) and hasattr(item, "init_cache"):
            assert item.cache_skips_padding, name
    recurrent, by_position, declared = (
        nnx.eval_shape(functools.partial(lm, layer))
        for layer in (layers.RgLruBlock, ByPosition, ByPositionToo)
    )
    assert not layers_that_keep_padding(recurrent)
    assert layers_that_keep_padding(by_position) == ["ByPosition"]
    assert not layers_that_keep_padding(declared)
