"""Speculation gives the tokens that decoding gives without it, in fewer calls of the model."""

import dataclasses
import functools

import fiddle as fdl
import jax
import numpy as np
import optax
import pytest

from praxis_lite import ConfigError, layers
from praxis_lite.core import Learner, MeshConfig, Partitioner, make_mesh
from praxis_lite.decode import BeamSearch, Greedy, Sample
from praxis_lite.decode.continuous_batching import ContinuousBatching, Prompt
from praxis_lite.decode.speculation import lookup_drafts
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_lite.trained_model.generation import changed_decoder
from tests.decode.toy_models import Summing, row_keys
from tests.support.lm_runs import drawn_weights
from tests.support.marks import slow_but

V, P, M = 7, 5, 23
RNG = np.random.default_rng(3)
LENGTHS = np.asarray([5, 2, 0, 1, 4, 3], np.int32)
PROMPTS = RNG.integers(0, V, (len(LENGTHS), P)).astype(np.int32)
LIMITS = np.asarray([23, 3, 23, 11, 0, 17], np.int32)
MODEL = Summing(V, seed=2, periodic=3.0)


def drafts_by_hand(tokens, longest_ngram, num_drafts):
    """Returns the drafts of a text, found by looking at every place in it."""
    tokens = list(tokens)
    for n in range(min(longest_ngram, len(tokens) - 1), 0, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                following = tokens[end:]
                return [following[i % len(following)] for i in range(num_drafts)]
    return [tokens[-1]] * num_drafts


@pytest.mark.parametrize("sizes", slow_but({(3, 5)}, [(1, 4), (3, 5), (4, 1)]), ids=str)
def test_drafts_are_those_found_by_looking_at_every_place(sizes):
    longest_ngram, num_drafts = sizes
    history = RNG.integers(0, 3, (199, 11)).astype(np.int32)
    history[:50] = RNG.integers(0, 9, (50, 11))
    lengths = RNG.integers(1, 12, len(history)).astype(np.int32)
    run = jax.jit(lookup_drafts, static_argnums=(2, 3))
    actual = np.asarray(run(history, lengths, longest_ngram, num_drafts))
    for row, length in enumerate(lengths):
        expected = drafts_by_hand(history[row, :length], longest_ngram, num_drafts)
        assert actual[row].tolist() == expected, history[row, :length]


@functools.cache
def program(decoder):
    return jax.jit(functools.partial(decoder, MODEL))


def decoded(decoder, **settings):
    outputs = program(decoder)(PROMPTS, LENGTHS, row_keys(len(LENGTHS)), **settings)
    return jax.device_get(outputs)


DECODERS = {
    "greedy": Greedy(max_decode_steps=M, eos_id=()),
    "ends": Greedy(max_decode_steps=M, eos_id=(0, 4), min_decode_steps=9),
    "stop sequences": Greedy(max_decode_steps=M, eos_id=(), stop_sequences=((3, 2), (5,))),
    "limits": Greedy(max_decode_steps=M, eos_id=(), seqlen=19),
    "sample": Sample(max_decode_steps=M, eos_id=2, k=0, temperature=0.7, num_samples=3),
    "penalties": Sample(
        max_decode_steps=M, eos_id=2, k=4, repetition_penalty=1.3, presence_penalty=0.2
    ),
}


QUICK = {("ends", 4)}
# More drafts than a row has tokens, and one, do not depend on how tokens are chosen.
CASES = slow_but(QUICK, [*((name, 4) for name in DECODERS), ("greedy", 1), ("sample", 64)])


def num_steps_by_hand(decoder, num_drafts, prompt, output):
    """Returns how many calls of a model give the output, if right drafts cost none."""
    tokens, end, num_steps = [*prompt], [*prompt, *output], 0
    while len(tokens) < len(end):
        tokens, num_steps = end[: len(tokens) + 1], num_steps + 1
        for draft in drafts_by_hand(tokens, decoder.prompt_lookup_max, num_drafts):
            if end[len(tokens) :][:1] != [draft]:
                break
            tokens = [*tokens, draft]
    return num_steps


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_tokens_are_those_without_speculation_in_as_few_steps_as_drafts_are_right(case):
    name, num_drafts = case
    decoder = DECODERS[name]
    speculative = dataclasses.replace(decoder, num_speculative_tokens=num_drafts)
    settings = {"per_example_max_decode_steps": LIMITS} if name == "limits" else {}
    expected, actual = decoded(decoder, **settings), decoded(speculative, **settings)
    for output in ("output_ids", "decode_lengths"):
        np.testing.assert_array_equal(actual[output], expected[output])
    for output in ("logprobs", "scores"):
        np.testing.assert_allclose(actual[output], expected[output], atol=1e-4)
    for row, hyp in np.ndindex(expected["decode_lengths"].shape):
        output = expected["output_ids"][row, hyp, : expected["decode_lengths"][row, hyp]]
        num_steps = num_steps_by_hand(speculative, num_drafts, PROMPTS[row, : LENGTHS[row]], output)
        assert actual["num_model_steps"][row, hyp] == num_steps
    saved = expected["decode_lengths"] - actual["num_model_steps"]
    assert len(set(saved.ravel())) > 2, "all rows accept as many drafts"


def test_a_row_of_a_continuous_batch_gets_the_tokens_that_it_gets_alone():
    decoder = dataclasses.replace(DECODERS["ends"], num_speculative_tokens=3)
    batching = ContinuousBatching(decoder, lambda mdl_vars: MODEL, 2, P)
    rows = np.flatnonzero(LENGTHS)
    prompts = [Prompt(PROMPTS[row], LENGTHS[row], row_keys(1)[0]) for row in rows]
    actual, num_pieces = [[] for _ in rows], [0 for _ in rows]
    for new in batching.stream(None, prompts, num_steps=1):
        actual[new.index] += new.ids.tolist()
        num_pieces[new.index] += 1
    expected = decoded(DECODERS["ends"])
    for row, ids, num in zip(rows, actual, num_pieces, strict=True):
        output = expected["output_ids"][row, 0, : expected["decode_lengths"][row, 0]].tolist()
        assert ids == output
        assert num == num_steps_by_hand(decoder, 3, PROMPTS[row, : LENGTHS[row]], output)


def lm_task(decoder, **layer):
    lm = fdl.Partial(
        layers.TransformerLm,
        V,
        12,
        17,
        num_heads=3,
        num_layers=1,
        dim_per_head=4,
        max_seq_length=P + M,
        **layer,
    )
    return LanguageModelTask(fdl.build(lm), Learner(optax.sgd, 0.1), decoder=decoder)


BATCH = {"ids": PROMPTS, "prefix_lengths": np.maximum(LENGTHS, 1), "weights": np.ones(6)}


# Its cache is a ring, which is shorter than a row.
WINDOW = {
    "transformer_layer_tpl": fdl.Partial(
        layers.Transformer, tr_atten_tpl=fdl.Partial(layers.DotProductAttention, window=3)
    )
}


@pytest.mark.parametrize(
    "shape, most, layer",
    [
        pytest.param((1, 1, 1), 3, {}, marks=pytest.mark.nightly),
        pytest.param((1, 4, 2), 3, {}, marks=pytest.mark.slow),
        pytest.param((1, 1, 1), 16, WINDOW, marks=pytest.mark.nightly),
    ],
)
def test_a_transformer_gives_the_same_tokens_up_to_its_last_position(shape, most, layer):
    """Its positions are learned and as many as there are tokens."""
    results, weights = [], None
    for num_drafts in (0, most):
        decoder = Greedy(max_decode_steps=M, eos_id=(), num_speculative_tokens=num_drafts)
        task = lm_task(decoder, **layer)
        partitioner = Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=shape)))
        if weights is None:
            weights = partitioner.for_decoding(drawn_weights(partitioner))
        batch = partitioner.global_batch(BATCH)
        outputs = partitioner.decode_step(weights, batch, partitioner.key(0))
        results.append(jax.device_get(outputs))
    expected, actual = results
    np.testing.assert_array_equal(actual["output_ids"], expected["output_ids"])
    np.testing.assert_allclose(actual["logprobs"], expected["logprobs"], rtol=1e-4, atol=1e-5)
    assert (actual["decode_lengths"] == M).all()
    assert 2 * actual["num_model_steps"].min() < M, "nearly no draft is right"
    records = task.decode_to_records(BATCH, actual)
    assert [record["model_steps"] for record in records] == actual["num_model_steps"][:, 0].tolist()


RECURRENT = {
    "transformer_layer_tpl": fdl.Partial(layers.Transformer, tr_atten_tpl=layers.RgLruBlock)
}
EXPERTS = {
    "transformer_layer_tpl": fdl.Partial(
        layers.Transformer,
        tr_fflayer_tpl=fdl.Partial(layers.TransformerFeedForwardMoe, num_experts=3),
    )
}


GROWING = {
    "transformer_layer_tpl": fdl.Partial(
        layers.Transformer,
        tr_atten_tpl=fdl.Partial(
            layers.DotProductAttention,
            use_rotary_position_emb=True,
            rotary_position_emb_tpl=fdl.Partial(
                layers.DynamicRotary, factor=2.0, original_max_positions=4
            ),
        ),
    )
}


@pytest.mark.parametrize(
    "layer, most, message",
    [
        (GROWING, 2, r"num_speculative_tokens.*rotary_position_emb has angles that grow"),
        (RECURRENT, 2, r"Greedy\.num_speculative_tokens.*recurrent layer: h, window\..*to 0"),
        (EXPERTS, 2, r"num_speculative_tokens.*ff_layer.*experts with a capacity.*dropless"),
        (WINDOW, 17, r"num_speculative_tokens is 17; expected at most 16.*self_attention.*window"),
    ],
)
def test_a_model_that_cannot_take_drafts_back_is_refused_before_anything_compiles(
    layer, most, message
):
    task = lm_task(Greedy(max_decode_steps=M, num_speculative_tokens=most), **layer)
    with pytest.raises(ConfigError, match=message):
        task.check_inputs(BATCH, task.required_decode_inputs, "decode_datasets.x")
    lm_task(Greedy(max_decode_steps=M), **layer).check_inputs(
        BATCH, task.required_decode_inputs, "decode_datasets.x"
    )


def test_beams_with_drafts_are_refused():
    config = fdl.Config(LanguageModelTask, decoder=BeamSearch())
    with pytest.raises(ConfigError, match="BeamSearch has no setting 'num_speculative_tokens'"):
        changed_decoder(lm_task(BeamSearch()), config, None, {"num_speculative_tokens": 2})
