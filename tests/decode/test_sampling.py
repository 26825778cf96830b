"""What can be drawn, and how often; penalties and ends: against NumPy, token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.decode import BeamSearch, Greedy, Sample
from praxis_lite.decode.continuous_batching import ContinuousBatching
from praxis_lite.decode.sampling_by_row import SampleByRow
from praxis_lite.decode.stop_strings import for_tokenizer
from praxis_lite.inputs.tokenizers.plain import ByteTokenizer
from tests.decode.toy_models import Recurrent, Summing, logprobs_after, row_keys
from tests.support.every_case import assert_each
from tests.support.marks import slow_but

V = 13
TABLE = np.random.default_rng(9).normal(scale=1.5, size=(V, V)).astype(np.float32)
NEVER = ()  # A row never ends by itself.
NUM_DRAWS = 20_011


def probabilities(logits, temperature=1.0, k=0, p=None, min_p=0.0):
    """Returns the probability of each token, found by sorting, token by token."""
    probs = np.exp(logits.astype(np.float64) - logits.max())
    order = np.argsort(-probs)[: k or None]
    kept, total = [], 0.0
    for token in order:
        if p is None or total <= p * probs[order].sum():
            kept.append(token)
        total += probs[token]
    kept = [token for token in kept if probs[token] >= min_p * probs.max()]
    result = np.zeros(V)
    result[kept] = probs[kept] ** (1.0 / temperature)
    return result / result.sum()


SETTINGS = {
    "temperature": {"temperature": 0.7, "k": 0},
    "hot": {"temperature": 2.5, "k": 0},
    "k": {"k": 3},
    "k of all": {"k": 99},
    "p": {"p": 0.8, "k": 0},
    "p tiny": {"p": 1e-6, "k": 0},
    "p before temperature": {"p": 0.6, "k": 0, "temperature": 3.0},
    "p among k": {"p": 0.9, "k": 4, "temperature": 1.5},
    "min_p": {"min_p": 0.2, "k": 0, "temperature": 2.0},
    "all": {"temperature": 1.3, "k": 7, "p": 0.9, "min_p": 0.05},
}


@functools.cache
def all_candidates():
    """Returns by setting the probabilities of the candidates, and their ids, from one program."""

    @jax.jit
    def run(table):
        result = {}
        for name, settings in SETTINGS.items():
            sample = Sample(**settings)
            logits, ids = sample.candidates(table)
            result[name] = jax.nn.softmax(logits / sample.temperature, axis=-1), ids
        return result

    return jax.device_get(run(TABLE))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_candidates_have_the_probabilities_that_numpy_gives(name):
    actual, ids = all_candidates()[name]
    expected = np.stack([probabilities(row, **SETTINGS[name]) for row in TABLE])
    if ids is not None:
        scattered = np.zeros((V, V))
        np.put_along_axis(scattered, np.asarray(ids), actual, axis=1)
        actual = scattered
    np.testing.assert_array_equal(actual > 0, expected > 0)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("name", slow_but({"all"}, ["temperature", "p before temperature", "all"]))
def test_tokens_are_drawn_as_often_as_they_are_likely(name):
    decoder = Sample(
        max_decode_steps=1,
        eos_id=NEVER,
        num_samples=NUM_DRAWS,
        sort_samples=False,
        **SETTINGS[name],
    )
    prompts = np.arange(5, dtype=np.int32)[:, None]
    model, lengths = Recurrent(V, table=TABLE), jnp.ones((5,), jnp.int32)
    run = jax.jit(lambda ids, keys: decoder(model, ids, lengths, keys))
    ids = np.asarray(run(prompts, row_keys(5, seed=17))["output_ids"])[:, :, 0]
    for row in range(5):
        expected = probabilities(TABLE[row], **SETTINGS[name])
        actual = np.bincount(ids[row], minlength=V) / NUM_DRAWS
        assert (actual[expected == 0] == 0).all()
        # Five standard errors of a frequency.
        error = 5 * np.sqrt(expected * (1 - expected) / NUM_DRAWS)
        assert (np.abs(actual - expected) <= error).all()


M, LENGTHS = 8, np.asarray([3, 1, 0, 4], np.int32)
PROMPTS = np.random.default_rng(2).integers(0, V, (4, 4)).astype(np.int32)
MODEL = Recurrent(V, seed=4, scale=1.2)


@functools.cache
def program(decoder, model):
    return jax.jit(functools.partial(decoder, model))


def decoded(decoder, seed=0, model=MODEL, **settings):
    run = program(decoder, model)
    return jax.device_get(run(PROMPTS, LENGTHS, row_keys(len(LENGTHS), seed), **settings))


def greedy_by_hand(prompt, choose_from=lambda logits, prompt, new: logits, ends=lambda new: False):
    """Returns new tokens and their log-probs, each by a pass over all that precedes it."""
    new, logprobs = [], []
    while len(new) < M and not (new and ends(new)):
        after = logprobs_after(MODEL, [*prompt, *new])
        token = int(np.argmax(choose_from(after, prompt, new)))
        new.append(token)
        logprobs.append(after[token])
    return new, logprobs


def assert_each_row(actual, **by_hand):
    for row in np.flatnonzero(LENGTHS):
        new, logprobs = greedy_by_hand(PROMPTS[row, : LENGTHS[row]].tolist(), **by_hand)
        length = actual["decode_lengths"][row, 0]
        assert actual["output_ids"][row, 0, :length].tolist() == new
        assert not actual["output_ids"][row, 0, length:].any()
        np.testing.assert_allclose(actual["logprobs"][row, 0, :length], logprobs, atol=1e-5)
        assert not actual["logprobs"][row, 0, length:].any()
        assert actual["scores"][row, 0] == pytest.approx(sum(logprobs), abs=1e-4)


@pytest.mark.parametrize("fprop_for_prefix", [True, False], ids=["fprop", "stepwise"])
def test_greedy_is_what_a_pass_per_token_gives_and_a_row_of_length_zero_stays_empty(
    fprop_for_prefix,
):
    decoder = Greedy(max_decode_steps=M, eos_id=NEVER, fprop_for_prefix=fprop_for_prefix)
    actual = decoded(decoder)
    assert_each_row(actual)
    assert not actual["output_ids"][2].any() and not actual["decode_lengths"][2].any()
    if fprop_for_prefix:
        assert "prefix_logprobs" not in actual
        return
    for row, length in enumerate(LENGTHS):
        prompt = PROMPTS[row, :length]
        expected = [logprobs_after(MODEL, prompt[:t])[prompt[t]] for t in range(1, length)]
        np.testing.assert_allclose(actual["prefix_logprobs"][row, 1:length], expected, atol=1e-5)
        assert not actual["prefix_logprobs"][row, max(length, 1) :].any()


def test_the_likeliest_of_k_1_is_greedy_whatever_the_key_and_temperature():
    expected = decoded(Greedy(max_decode_steps=M, eos_id=NEVER))
    for seed in (0, 1):
        decoder = Sample(max_decode_steps=M, eos_id=NEVER, k=1, temperature=3.0)
        actual = decoded(decoder, seed)
        np.testing.assert_array_equal(actual["output_ids"], expected["output_ids"])


def test_an_end_of_text_is_kept_and_the_shortest_row_need_not_wait():
    whole = decoded(Greedy(max_decode_steps=M, eos_id=NEVER))
    eos_ids = (int(whole["output_ids"][0, 0, 2]), int(whole["output_ids"][3, 0, 1]))
    actual = decoded(Greedy(max_decode_steps=M, eos_id=eos_ids))
    assert_each_row(actual, ends=lambda new: new[-1] in eos_ids)
    assert actual["decode_lengths"][0, 0] <= 3 and actual["decode_lengths"][3, 0] <= 2


def test_no_end_of_text_comes_before_the_minimum():
    whole = decoded(Greedy(max_decode_steps=M, eos_id=NEVER))
    eos = int(whole["output_ids"][0, 0, 1])

    def without_eos(logits, prompt, new):
        return np.where((np.arange(V) == eos) & (len(new) < 5), -np.inf, logits)

    actual = decoded(Greedy(max_decode_steps=M, eos_id=eos, min_decode_steps=5))
    assert_each_row(actual, choose_from=without_eos, ends=lambda new: new[-1] == eos)
    assert (actual["decode_lengths"][LENGTHS > 0] > 5).all()


def test_penalties_lower_what_occurred():
    def penalized(logits, prompt, new, repetition=1.9, presence=0.7):
        logits = logits.copy()
        for token in {*prompt, *new}:
            logits[token] *= repetition if logits[token] < 0 else 1 / repetition
        for token in set(new):
            logits[token] -= presence
        return logits

    settings = {"repetition_penalty": 1.9, "presence_penalty": 0.7}
    # By hand the logits are log-probs: make the model's so too, for the penalty scales them.
    model = LogProbs()
    actual = decoded(Greedy(max_decode_steps=M, eos_id=NEVER, **settings), model=model)
    assert_each_row(actual, choose_from=penalized)
    none = decoded(Greedy(max_decode_steps=M, eos_id=NEVER))
    only_presence = decoded(Greedy(max_decode_steps=M, eos_id=NEVER, presence_penalty=0.7))
    assert_each_row(only_presence, choose_from=lambda *args: penalized(*args, repetition=1.0))
    assert (actual["output_ids"] != none["output_ids"]).any()


class LogProbs(Recurrent):
    """The model, its logits normalized."""

    def __init__(self):
        super().__init__(V, seed=4, scale=1.2)

    def __call__(self, *args, **kwargs):
        logits, cache = super().__call__(*args, **kwargs)
        return jax.nn.log_softmax(logits, axis=-1), cache


def test_positive_logits_are_divided_by_the_repetition_penalty():
    table = np.zeros((V, V), np.float32)
    table[:, 5], table[:, 6] = 4.0, 3.0
    decoder = Greedy(max_decode_steps=3, eos_id=NEVER, repetition_penalty=2.0)
    actual = decoded(decoder, model=Recurrent(V, table=table))
    # 4 / 2 < 3, then 3 / 2 < 4 / 2.
    rows = [row for row in range(4) if LENGTHS[row] and not {5, 6} & set(PROMPTS[row])]
    assert rows
    for row in rows:
        assert actual["output_ids"][row, 0].tolist() == [5, 6, 5]


def test_a_stop_sequence_ends_a_row_once_its_new_tokens_end_in_it():
    whole = decoded(Greedy(max_decode_steps=M, eos_id=NEVER))
    sequences = (
        tuple(whole["output_ids"][0, 0, 2:5].tolist()),
        # Reaches back into the prompt, which does not count.
        (int(PROMPTS[3, 3]), int(whole["output_ids"][3, 0, 0])),
    )

    def ends(new):
        return any(tuple(new[-len(s) :]) == s for s in sequences if len(new) >= len(s))

    actual = decoded(Greedy(max_decode_steps=M, eos_id=NEVER, stop_sequences=sequences))
    assert_each_row(actual, ends=ends)
    assert actual["decode_lengths"][0, 0] <= 5
    assert actual["decode_lengths"][3, 0] > 1


@pytest.mark.slow
def test_samples_differ_are_sorted_and_each_is_a_function_of_its_key_alone():
    settings = {"max_decode_steps": M, "eos_id": 3, "k": 0, "temperature": 1.5}
    actual = decoded(Sample(num_samples=7, **settings))
    assert actual["output_ids"].shape == (4, 7, M)
    for row in np.flatnonzero(LENGTHS):
        assert len({tuple(ids) for ids in actual["output_ids"][row]}) > 3
        assert (np.diff(actual["scores"][row]) <= 0).all()
        np.testing.assert_allclose(
            actual["scores"][row], actual["logprobs"][row].sum(axis=-1), atol=1e-5
        )
    unsorted = decoded(Sample(num_samples=7, sort_samples=False, **settings))
    order = np.argsort(-unsorted["scores"], axis=1, kind="stable")
    np.testing.assert_array_equal(
        actual["output_ids"], np.take_along_axis(unsorted["output_ids"], order[..., None], axis=1)
    )
    fewer = decoded(Sample(num_samples=2, sort_samples=False, **settings))
    np.testing.assert_array_equal(fewer["output_ids"], unsorted["output_ids"][:, :2])
    other = decoded(Sample(num_samples=7, **settings), seed=1)
    assert (other["output_ids"] != actual["output_ids"]).any()


def test_each_step_draws_anew():
    decoder = Sample(max_decode_steps=M, eos_id=NEVER, k=0, num_samples=3)
    actual = decoded(decoder, model=Recurrent(V, table=np.zeros((V, V), np.float32)))
    for ids in actual["output_ids"][LENGTHS > 0].reshape(-1, M):
        assert len(set(ids)) > 2, "one key for all steps"


def test_rows_have_temperatures_and_limits_of_their_own():
    settings = {"temperature": np.asarray([0.0, 30.0, 1.0, 0.0], np.float32)}
    settings["per_example_max_decode_steps"] = np.asarray([9, 5, 3, 2], np.int32)
    actual = decoded(Sample(max_decode_steps=M, eos_id=NEVER, k=0, num_samples=3), **settings)
    greedy = decoded(Greedy(max_decode_steps=M, eos_id=NEVER))["output_ids"]
    np.testing.assert_array_equal(actual["decode_lengths"][:, 0], [8, 5, 0, 2])
    for sample in range(3):
        np.testing.assert_array_equal(actual["output_ids"][0, sample], greedy[0, 0])
        np.testing.assert_array_equal(actual["output_ids"][3, sample, :2], greedy[3, 0, :2])
    assert (actual["output_ids"][1] != greedy[1]).any()


def test_seqlen_counts_the_prompt():
    actual = decoded(Greedy(max_decode_steps=M, eos_id=NEVER, seqlen=3))
    np.testing.assert_array_equal(actual["decode_lengths"][:, 0], [0, 2, 0, 0])


def test_stop_strings_become_tokens():
    decoder = Greedy(stop_strings=("\n\n", "é"), stop_sequences=((7,),))
    decoder = for_tokenizer(decoder, ByteTokenizer())
    assert decoder.eos_ids == (256, 3)
    assert decoder.stop_sequences == ((7,), (10, 10), tuple("é".encode()))
    assert for_tokenizer(decoder, ByteTokenizer()) == decoder
    assert for_tokenizer(Greedy(eos_id=5), ByteTokenizer()).eos_ids == (5,)


OUT_OF_RANGE = [
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("k", -1),
    ("p", 0.0),
    ("p", 1.1),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("num_samples", 0),
    ("repetition_penalty", 0.0),
    ("presence_penalty", float("inf")),
    ("stop_sequences", ((),)),
    ("stop_strings", ("",)),
    ("stop_strings", "stop"),
    ("stop_strings", (3,)),
    ("stop_strings", None),
    ("stop_sequences", (1, 2)),
    ("stop_sequences", 1),
    ("num_cache_slots", -1),
    ("max_decode_steps", 0),
    ("min_decode_steps", -1),
    ("min_decode_steps", 128),
    ("seqlen", 0),
    ("eos_id", -1),
    ("eos_id", "eos"),
    ("num_cached_prefixes", -1),
    ("num_speculative_tokens", -1),
    ("prompt_lookup_max", 0),
    ("prefill_chunk_size", 0),
]


def test_a_value_out_of_range_names_the_setting():
    def check(case):
        name, value = case
        with pytest.raises(ConfigError, match=rf"Sample\.{name}"):
            Sample(**{name: value})

    assert_each(check, ((str(case), case) for case in OUT_OF_RANGE))


class BytesWithoutChat(ByteTokenizer):
    chat = None


BEYOND = {
    "greedy": Greedy(eos_id=V),
    "one of several": Sample(eos_id=(2, V)),
    "beams": BeamSearch(eos_id=(2, 10**6)),
    "drafts": Greedy(eos_id=V, num_speculative_tokens=2),
    "shared prefixes": Greedy(eos_id=V, num_cached_prefixes=2, prefill_chunk_size=2),
    "rows with their own settings": SampleByRow(eos_id=V),
    "a stop sequence": Greedy(eos_id=(), stop_sequences=((1,), (2, V))),
    # A tokenizer's tokens need not be the model's; but a beam must end somewhere.
    "beams of a tokenizer": for_tokenizer(BeamSearch(), BytesWithoutChat()),
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_token_that_the_model_lacks_is_refused(name):
    decoder, model = BEYOND[name], Summing(V)
    setting = "stop_sequences" if name == "a stop sequence" else "eos_id"
    words = rf"{type(decoder).__name__}\.{setting}.*0 to {V - 1}"
    with pytest.raises(ConfigError, match=words):
        decoded(decoder, model=model)
    if isinstance(decoder, Greedy):
        batching = ContinuousBatching(decoder, lambda _: model, 2, 4)
        with pytest.raises(ConfigError, match=words):
            batching.rows(np.zeros(()))


def test_a_tokenizers_end_that_the_model_lacks_ends_no_row():
    decoder = Greedy(max_decode_steps=M, stop_strings=("~",))
    decoder = for_tokenizer(decoder, BytesWithoutChat())
    assert decoder.eos_ids == (256,)
    expected = decoded(Greedy(max_decode_steps=M, eos_id=NEVER))
    np.testing.assert_array_equal(decoded(decoder)["output_ids"], expected["output_ids"])
