"""Rows with settings of their own in one program: each gets the tokens of its own decoder alone."""

import functools

import jax
import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.decode import Greedy, Sample
from praxis_lite.decode.continuous_batching import ContinuousBatching, Prompt
from praxis_lite.decode.loop import sample_keys
from praxis_lite.decode.sampling_by_row import SampleByRow
from tests.decode.toy_models import Recurrent, logprobs_after, num_compiled, row_keys

# Prompts of two lengths, in rows of L tokens.
V, LENGTHS, L, EOS = 23, (3, 7), 20, 1
MODEL = Recurrent(V, dims=7, seed=1)
DECODER = SampleByRow(max_decode_steps=L, seqlen=L, eos_id=EOS)
BATCHING = ContinuousBatching(DECODER, lambda mdl_vars: MODEL, 3, LENGTHS)
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(1, V, length) for length in (1, 7, 3, 5, 2, 4)]
SETTINGS = [
    {}, {"temperature": 1.3}, {"temperature": 0.8, "top_p": 0.6}, {"temperature": 2.0},
    {"temperature": 0.0, "top_p": 0.3, "top_k": 2}, {"temperature": 1.0, "top_p": 0.6},
]  # fmt: skip


def prompt(row, **more):
    ids, key = PROMPTS[row], sample_keys(row_keys(len(PROMPTS)), 1)[row]
    padded = np.pad(ids, (0, min(n for n in LENGTHS if n >= len(ids)) - len(ids)))
    return Prompt(padded, len(ids), key, **{**SETTINGS[row], **more})


@functools.cache
def program_of(decoder):
    return jax.jit(
        lambda ids, lengths, keys, temperature: decoder(
            MODEL, ids, lengths, keys, temperature=temperature
        )
    )


def alone(row):
    """Returns a prompt's tokens by Greedy, or by Sample with its settings, in a batch of one."""
    given = SETTINGS[row]
    general = {"max_decode_steps": L, "seqlen": L, "eos_id": EOS}
    decoder, temperature = Greedy(**general), given.get("temperature", 0.0)
    if temperature:
        decoder = Sample(**general, k=0, p=given.get("top_p"))
    ids = np.pad(PROMPTS[row], (0, max(LENGTHS) - len(PROMPTS[row])))[None]
    outputs = program_of(decoder)(
        ids,
        np.asarray([len(PROMPTS[row])]),
        row_keys(len(PROMPTS))[row : row + 1],
        np.asarray([temperature], np.float32),
    )
    return outputs["output_ids"][0, 0, : int(outputs["decode_lengths"][0, 0])].tolist()


def collected(rows, num_prompts, num_steps=2):
    """Returns the tokens of prompts that come one after the other while others decode."""
    ids, waiting, row_of = {}, list(range(num_prompts)), {}
    while waiting or rows.num_taken:
        if waiting and rows.num_free:
            row = waiting.pop(0)
            row_of[rows.submit(prompt(row))] = row
        for new in rows.advance(num_steps):
            ids.setdefault(row_of[new.index], []).extend(new.ids.tolist())
    return [ids[row] for row in range(num_prompts)]


def test_each_row_gets_the_tokens_of_its_own_decoder_alone():
    expected = [alone(row) for row in range(len(PROMPTS))]
    assert len({len(ids) for ids in expected}) > 2
    assert collected(BATCHING.rows(None), len(PROMPTS)) == expected
    before = num_compiled()
    assert collected(BATCHING.rows(None), len(PROMPTS), 5) == expected
    assert num_compiled() == before, "another program for other settings or lengths"


def test_top_k_leaves_the_k_most_likely_tokens_alone():
    rows, seen = BATCHING.rows(None), set()
    for key in row_keys(3, seed=8):
        rows.submit(prompt(1)._replace(key=key, temperature=9.0, top_k=3, top_p=1.0))
    for new in rows.advance(L):
        ids = list(PROMPTS[1])
        for token in new.ids.tolist():
            rank = int(np.argsort(-logprobs_after(MODEL, ids)).tolist().index(token))
            seen.add(rank)
            ids.append(token)
    assert seen == {0, 1, 2}


def test_a_prompt_that_is_cancelled_leaves_its_row_and_changes_no_other():
    rows = BATCHING.rows(None)
    first, second = rows.submit(prompt(0)), rows.submit(prompt(3))
    rows.advance(1)
    rows.cancel(first)
    rows.cancel(first)  # Has left already: nothing happens.
    assert (rows.num_taken, rows.num_free) == (1, 2)
    ids = [token for new in rows.advance(L) for token in new.ids.tolist() if new.index == second]
    assert ids == alone(3)[1:] != []
    assert rows.num_free == 3


def test_lengths_whose_caches_differ_are_an_error():
    with pytest.raises(ConfigError, match=r"\[23, 27\].*seqlen"):
        ContinuousBatching(SampleByRow(max_decode_steps=L), lambda mdl_vars: MODEL, 3, LENGTHS)


@pytest.mark.parametrize(
    "setting", [{"top_p": 0.0}, {"top_k": -1}, {"temperature": -1.0}, {"seqlen": 0}]
)
def test_a_setting_that_leaves_no_token_is_an_error(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        SampleByRow(**setting)
