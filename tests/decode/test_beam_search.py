"""Beam search against enumeration of every text, and its limits."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.decode import BeamSearch, Greedy
from tests.decode.toy_models import Recurrent, logprobs_after, row_keys
from tests.support.marks import slow_but

V, M, EOS = 5, 3, 2
MODEL = Recurrent(V, seed=3, scale=1.3)
PROMPTS = np.asarray([[3, 1, 4], [4, 9, 9], [9, 9, 9], [1, 0, 9]], np.int32) % V
LENGTHS = np.asarray([3, 1, 0, 2], np.int32)


def decoded(decoder, rows=slice(None), **per_row):
    run = jax.jit(lambda ids, lengths, keys: decoder(MODEL, ids, lengths, keys, **per_row))
    return jax.device_get(run(PROMPTS[rows], LENGTHS[rows], row_keys(len(LENGTHS[rows]))))


def search(**settings):
    return decoded(BeamSearch(**{"max_decode_steps": M, "eos_id": EOS, **settings}))


def all_texts(prompt, alpha, eos_ids=(EOS,), min_steps=0, num_steps=M):
    """Returns (score, tokens, log-probs) of every text that ends within `num_steps`, best first."""
    others = [token for token in range(V) if token not in eos_ids]
    texts = []
    for length in range(min_steps, num_steps):
        for words in itertools.product(others, repeat=length):
            for eos in eos_ids:
                tokens = (*words, eos)
                logprobs = [
                    logprobs_after(MODEL, (*prompt, *tokens[:i]))[token]
                    for i, token in enumerate(tokens)
                ]
                norm = ((len(tokens) + 5) / 5) ** alpha
                texts.append((sum(logprobs) / norm, tokens, logprobs))
    return sorted(texts, key=lambda text: -text[0])


WIDE = {
    "alpha 0.8": {"length_norm_alpha": 0.8},
    "alpha 0": {"length_norm_alpha": 0.0},
    "alpha 1": {"length_norm_alpha": 1.0},
    "minimum": {"min_decode_steps": 2, "length_norm_alpha": 0.8},
    "step by step": {"fprop_for_prefix": False, "length_norm_alpha": 0.8},
}


@pytest.mark.parametrize("name", slow_but({"alpha 0.8"}, WIDE))
def test_a_beam_as_wide_as_all_there_is_finds_what_enumeration_finds(name):
    settings = WIDE[name]
    # Hypotheses that go on: at most 4 x 4; the beam holds them all.
    actual = search(beam_size=17, tokens_per_beam=V, **settings)
    for row in np.flatnonzero(LENGTHS):
        prompt = PROMPTS[row, : LENGTHS[row]]
        min_steps = settings.get("min_decode_steps", 0)
        expected = all_texts(prompt, settings["length_norm_alpha"], min_steps=min_steps)[:17]
        for hyp, (score, tokens, logprobs) in enumerate(expected):
            length = actual["decode_lengths"][row, hyp]
            assert tuple(actual["output_ids"][row, hyp, :length]) == tokens
            assert not actual["output_ids"][row, hyp, length:].any()
            np.testing.assert_allclose(actual["logprobs"][row, hyp, :length], logprobs, atol=1e-5)
            assert actual["scores"][row, hyp] == pytest.approx(score, abs=1e-5)
        # Where there are fewer texts than places, the others are empty.
        for hyp in range(len(expected), 17):
            assert actual["decode_lengths"][row, hyp] == 0 and actual["scores"][row, hyp] < -1e8


def test_two_ends_of_text_keep_the_likelier_of_each_hypothesis():
    actual = search(beam_size=10, tokens_per_beam=V, eos_id=(EOS, 4), length_norm_alpha=0.0)
    for row in np.flatnonzero(LENGTHS):
        texts = all_texts(PROMPTS[row, : LENGTHS[row]], 0.0, eos_ids=(EOS, 4))
        best = {}
        for score, tokens, _ in texts:
            best.setdefault(tokens[:-1], (score, tokens))
        expected = [tokens for _, tokens in sorted(best.values(), key=lambda item: -item[0])]
        ids = zip(actual["output_ids"][row], actual["decode_lengths"][row], strict=True)
        assert [tuple(tokens[:length]) for tokens, length in ids] == expected[:10]


@pytest.mark.slow
def test_the_empty_row_is_empty_and_the_others_need_no_company():
    actual = search(beam_size=3)
    empty = list(LENGTHS).index(0)
    assert not actual["output_ids"][empty].any() and not actual["decode_lengths"][empty].any()
    decoder = BeamSearch(max_decode_steps=M, eos_id=EOS, beam_size=3)
    for row in (1, 3):
        alone = decoded(decoder, slice(row, row + 1))
        np.testing.assert_array_equal(alone["output_ids"][0], actual["output_ids"][row])
        np.testing.assert_allclose(alone["scores"][0], actual["scores"][row], rtol=1e-5)


def test_a_rows_own_limits_end_its_texts():
    limits = np.asarray([1, 2, 3, 3], np.int32)
    decoder = BeamSearch(max_decode_steps=M, eos_id=EOS, beam_size=17, tokens_per_beam=V, seqlen=4)
    actual = decoded(decoder, per_example_max_decode_steps=limits)
    for row, num_steps in ((0, 1), (1, 2), (3, 2)):
        expected = all_texts(PROMPTS[row, : LENGTHS[row]], 0.8, num_steps=num_steps)[:17]
        lengths = np.asarray(actual["decode_lengths"][row])
        assert (lengths > 0).sum() == len(expected)
        for hyp, (_, tokens, _) in enumerate(expected):
            assert tuple(actual["output_ids"][row, hyp, : lengths[hyp]].tolist()) == tokens


def test_logits_in_bfloat16_give_scores_in_float32():
    class Bfloat16(Recurrent):
        def __call__(self, *args, **kwargs):
            logits, cache = super().__call__(*args, **kwargs)
            return logits.astype(jnp.bfloat16), cache

    decoder, model = BeamSearch(max_decode_steps=M, eos_id=EOS), Bfloat16(V)
    actual = jax.eval_shape(lambda: decoder(model, PROMPTS, LENGTHS, row_keys(len(LENGTHS))))
    assert actual["scores"].dtype == actual["logprobs"].dtype == np.float32


def test_early_exit_with_one_hypothesis_stops_where_greedy_does():
    decoder = BeamSearch(max_decode_steps=9, eos_id=EOS, beam_size=1, early_exit=True)
    expected = decoded(Greedy(max_decode_steps=9, eos_id=EOS))["decode_lengths"]
    assert 0 < expected.max() < 9
    actual = decoded(decoder)
    assert (actual["decode_lengths"][:, 0] <= expected.max()).all()
    assert actual["done"].all() and not actual["hyp_ids"].any()


def test_a_place_without_a_hypothesis_is_empty_however_long_the_search_is():
    # A norm of 21 brings Pax's -1e9 above -1e8.
    limits = np.asarray([100, 111, 0, 118], np.int32)
    decoder = BeamSearch(
        max_decode_steps=120, min_decode_steps=110, eos_id=EOS, beam_size=3, length_norm_alpha=1.0
    )
    actual = decoded(decoder, per_example_max_decode_steps=limits)
    lengths = actual["decode_lengths"]
    assert lengths[1].tolist() == [111] * 3 and (lengths[3] > 110).all()
    assert (actual["scores"][[1, 3]] > -1e4).all()
    for row in (0, 2):
        assert not lengths[row].any() and not actual["output_ids"][row].any()
        assert (actual["scores"][row] <= -1e8).all() and not actual["logprobs"][row].any()


def test_there_are_no_more_hypotheses_than_texts():
    model = Recurrent(2, seed=3)  # Of two tokens: a text of each length.
    decoder = BeamSearch(max_decode_steps=12, eos_id=1, beam_size=17, tokens_per_beam=2)
    run = jax.jit(functools.partial(decoder, model))
    actual = run(PROMPTS % 2, LENGTHS, row_keys(len(LENGTHS)))
    assert sorted(actual["decode_lengths"][0].tolist()) == [0] * 5 + list(range(1, 13))
    assert (actual["scores"][0, 12:] <= -1e8).all()


class Counting(Recurrent):
    """Lists its calls."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.calls = []

    def __call__(self, ids, *, positions=None, paddings=None, cache):
        jax.debug.callback(lambda calls: self.calls.append(int(calls)), cache["num_calls"])
        return super().__call__(ids, positions=positions, paddings=paddings, cache=cache)


@pytest.mark.parametrize("alpha", slow_but({0.8}, [0.8, 0.0, -0.6]))
def test_a_search_that_is_decided_ends_with_the_same_texts(alpha):
    model, num_steps = Counting(V, seed=3, scale=2.0), 31
    outputs, num_calls = [], []
    for ends in (False, True):
        model.calls = []
        decoder = BeamSearch(
            max_decode_steps=num_steps,
            eos_id=EOS,
            beam_size=3,
            length_norm_alpha=alpha,
            ends_when_decided=ends,
        )
        run = jax.jit(functools.partial(decoder, model))
        outputs.append(jax.device_get(run(PROMPTS, LENGTHS, row_keys(len(LENGTHS)))))
        jax.effects_barrier()
        num_calls.append(max(model.calls))
    expected, actual = outputs
    for name in ("output_ids", "decode_lengths", "logprobs", "scores"):
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)
    assert num_calls[0] == num_steps and 2 < num_calls[1] < num_steps


@pytest.mark.slow
def test_a_search_makes_no_more_steps_than_its_rows_may_have_and_stops_where_all_have_ended():
    # The third row is empty, so its limit is none.
    of_rows = np.asarray([2, 5, 31, 4], np.int32)
    one = BeamSearch(max_decode_steps=9, eos_id=EOS, beam_size=1, early_exit=True)
    likeliest = decoded(Greedy(max_decode_steps=9, eos_id=EOS))["decode_lengths"]
    for decoder, limits, num_steps in (
        (BeamSearch(max_decode_steps=31, eos_id=EOS, beam_size=3), of_rows, 5),
        (one, None, likeliest.max()),
    ):
        model = Counting(V, seed=3, scale=1.3)  # As MODEL.
        run = jax.jit(functools.partial(decoder, model))
        run(PROMPTS, LENGTHS, row_keys(4), per_example_max_decode_steps=limits)
        jax.effects_barrier()
        assert max(model.calls) == num_steps < decoder.max_decode_steps


def test_what_went_on_says_where_it_was_a_step_before_and_whether_it_ended():
    actual = search(beam_size=17, tokens_per_beam=V, length_norm_alpha=0.0)
    others = [token for token in range(V) if token != EOS]
    for row in np.flatnonzero(LENGTHS):
        # 4 x 4 hypotheses of two tokens, best first, go on to 17 of three.
        def sums(num_tokens, row=row):
            prompt = tuple(PROMPTS[row, : LENGTHS[row]])
            totals = {
                words: sum(
                    logprobs_after(MODEL, prompt + words[:i])[word] for i, word in enumerate(words)
                )
                for words in itertools.product(others, repeat=num_tokens)
            }
            return sorted(totals, key=totals.get, reverse=True)

        two, three = sums(2), sums(3)[:17]
        assert actual["hyp_ids"][row].tolist() == [two.index(words[:2]) for words in three]
        assert not actual["done"][row].any()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"beam_size": 0}, r"BeamSearch\.beam_size.*0"),
        ({"tokens_per_beam": 0}, r"BeamSearch\.tokens_per_beam.*0"),
        ({"length_norm_alpha": float("nan")}, r"BeamSearch\.length_norm_alpha.*nan"),
        ({"eos_id": None}, r"BeamSearch\.eos_id.*None"),
    ],
)
def test_ill_formed_settings_are_errors_that_name_them(settings, words):
    with pytest.raises(ConfigError, match=words):
        search(**settings)
