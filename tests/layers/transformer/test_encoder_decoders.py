"""The encoder-decoder: the real Pax's numbers, decoding from a cache, wrong settings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.core import NnxModel
from praxis_lite.decode import BeamSearch, Greedy
from praxis_tools.check.asserts.layers import assert_near, drawn
from tests.support.goldens import pax_options
from tests.support.pax_options import flat, mdl_vars_from

partial = functools.partial
STACKS = {
    f"{part}_stacked_transformer_tpl": layers.StackedTransformer for part in ("encoder", "decoder")
}
MODEL = partial(layers.TransformerEncoderDecoder, 7, 4, 6, 2, 2, 1, **STACKS)
PADDINGS = ("input_paddings", "target_paddings")
SEGMENTS = ("input_segment_ids", "input_segment_pos", "target_segment_ids", "target_segment_pos")
PAX = {
    "plain": (MODEL, PADDINGS),
    "packed": (MODEL, PADDINGS + SEGMENTS),
    "separate": (
        partial(
            MODEL,
            encoder_embedding_tpl=layers.Embedding,
            decoder_embedding_tpl=layers.Embedding,
            softmax_tpl=layers.FullSoftmax,
            position_emb_tpl=None,
            encoder_position_emb_tpl=partial(layers.TrainablePositionalEmbedding, max_seq_length=6),
            decoder_position_emb_tpl=layers.PositionalEmbedding,
        ),
        PADDINGS,
    ),
    "decoder_embedding": (
        partial(MODEL, decoder_embedding_tpl=layers.Embedding, softmax_tpl=layers.FullSoftmax),
        PADDINGS,
    ),
}


def test_every_case_of_the_real_pax_is_compared():
    assert set(PAX) == set(pax_options("encoder_decoders")) - {""}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "packed")) for name in PAX]
)
def test_losses_and_gradients_equal_pax(name):
    numbers, (build, names) = pax_options("encoder_decoders"), PAX[name]
    case, inputs = numbers[name], numbers[""]["in"]
    model, given = NnxModel(build), {name: inputs[name] for name in names}
    ids = [inputs[name] for name in ("inputs", "targets", "labels", "weights")]

    def objective(params):
        module = model.module({"params": params, "non_trainable": {}})
        outputs = module.compute_loss(*ids, **given)
        return outputs["total_loss"], outputs

    grads, outputs = jax.jit(jax.grad(objective, has_aux=True))(
        mdl_vars_from(model, case)["params"]
    )
    for path, expected in case["out"].items():
        np.testing.assert_allclose(outputs[path], expected, rtol=1e-5, atol=3e-6, err_msg=path)
    assert_near(flat(grads), case["grad"], tolerance=5e-6)


SMALL = partial(layers.TransformerEncoderDecoder, 11, 6, 10, 2, 1, 1)
RNG = np.random.default_rng(3)
SOURCES = RNG.integers(2, 11, (3, 4), dtype=np.int32)
IS_PADDING = np.asarray([[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 1]], np.float32)


@pytest.mark.slow
def test_greedy_and_beam_decoding_from_the_cache_equal_calls_without_one():
    model, num_steps = NnxModel(SMALL), 5
    mdl_vars = drawn(model)
    beginnings, lengths = np.asarray([[1, 7], [1, 0], [1, 3]], np.int32), np.asarray([2, 1, 2])
    keys = jax.random.split(jax.random.key(0), 3)

    @partial(jax.jit, static_argnums=1)
    def decode(mdl_vars, decoder):
        given = model.module(mdl_vars).given(SOURCES, input_paddings=IS_PADDING)
        return decoder(given, jnp.asarray(beginnings), jnp.asarray(lengths), keys)

    @jax.jit
    def log_probs_of(mdl_vars, targets):
        logits = model.module(mdl_vars)(SOURCES, targets, input_paddings=IS_PADDING)[0]
        return jax.nn.log_softmax(logits)

    greedy = decode(mdl_vars, Greedy(max_decode_steps=num_steps))
    targets = np.zeros((3, 2 + num_steps), np.int32)
    targets[:, :2] = beginnings
    for step in range(num_steps):
        log_probs = np.asarray(log_probs_of(mdl_vars, targets))
        for row, length in enumerate(lengths):
            at = length + step
            targets[row, at] = log_probs[row, at - 1].argmax()
    for row, length in enumerate(lengths):
        expected = targets[row, length : length + num_steps]
        np.testing.assert_array_equal(greedy["output_ids"][row, 0], expected)
    with_drafts = decode(mdl_vars, Greedy(max_decode_steps=num_steps, num_speculative_tokens=2))
    np.testing.assert_array_equal(with_drafts["output_ids"], greedy["output_ids"])

    # Beams are reordered at each step, and what is encoded with them: they stay with their row.
    # Their prompts come a token at a time, the greedy ones in one pass.
    beam_search = BeamSearch(
        max_decode_steps=num_steps,
        min_decode_steps=num_steps - 1,
        beam_size=3,
        eos_id=1,
        fprop_for_prefix=False,
    )
    beams = decode(mdl_vars, beam_search)
    for outputs in (greedy, beams):
        for hyp in range(outputs["output_ids"].shape[1]):
            for row, length in enumerate(lengths):
                targets[row, length : length + num_steps] = outputs["output_ids"][row, hyp]
            log_probs = np.asarray(log_probs_of(mdl_vars, targets))
            for row, length in enumerate(lengths):
                num_new = outputs["decode_lengths"][row, hyp]
                at = np.arange(length - 1, length + num_new - 1)
                expected = log_probs[row, at, targets[row, at + 1]]
                actual = outputs["logprobs"][row, hyp, :num_new]
                np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


WRONG = {
    r"TransformerEncoderDecoder\.num_decoder_layers.*0": lambda r: layers.TransformerEncoderDecoder(
        11, 6, 10, 2, 1, 0, rngs=r
    ),
    "position_emb_tpl.*encoder_position_emb_tpl.*position_emb_tpl=None": lambda r: SMALL(
        encoder_position_emb_tpl=layers.PositionalEmbedding, rngs=r
    ),
    r"TransformerEncoderDecoder\.num_layers.*1.*2": lambda r: SMALL(
        encoder_layer_tpl=[layers.Transformer, layers.Transformer], rngs=r
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_setting_names_the_layer_and_the_setting(message):
    with pytest.raises(ConfigError, match=message):
        WRONG[message](nnx.Rngs(0))


def test_a_cache_for_more_tokens_than_the_decoder_has_positions_is_refused():
    learned = partial(layers.TrainablePositionalEmbedding, max_seq_length=6)
    model = SMALL(position_emb_tpl=None, decoder_position_emb_tpl=learned, rngs=nnx.Rngs(0))
    model.init_cache(2, 6, encoded_length=4)
    with pytest.raises(ConfigError, match=r"max_seq_length is 6, but a sequence has up to 7"):
        model.init_cache(2, 7, encoded_length=4)
