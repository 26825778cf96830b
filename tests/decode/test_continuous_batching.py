"""Continuous batching: each prompt gets the tokens it would get alone, in the fewest steps."""

import functools
import heapq
import itertools

import jax
import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.decode import BeamSearch, Greedy, Sample
from praxis_lite.decode.continuous_batching import ContinuousBatching, Prompt
from praxis_lite.decode.loop import sample_keys
from tests.decode.toy_models import Recurrent, num_compiled, row_keys

V, P, M, EOS, NUM_PROMPTS, NUM_ROWS = 23, 4, 20, 0, 17, 5
RNG = np.random.default_rng(5)
LENGTHS = RNG.integers(1, P + 1, NUM_PROMPTS).astype(np.int32)
PROMPTS = np.where(np.arange(P) < LENGTHS[:, None], RNG.integers(1, V, (NUM_PROMPTS, P)), 9).astype(
    np.int32
)
# The token after t is t - 1: a prompt that ends in t goes on for t steps, down to the end, 0.
COUNTDOWN = Recurrent(V, table=9.0 * np.roll(np.eye(V), -1, axis=1).astype(np.float32))
RECURRENT = Recurrent(V, dims=7, seed=1)


@functools.cache
def batching_of(model, decoder):
    """Returns a decoder whose programs are compiled by whichever test is first."""
    return ContinuousBatching(decoder, lambda mdl_vars: model, NUM_ROWS, P)


def queue(decoder, **settings):
    keys = sample_keys(row_keys(NUM_PROMPTS), decoder.num_hyps)
    for row in range(NUM_PROMPTS):
        for sample in range(decoder.num_hyps):
            item = {name: x[row] for name, x in settings.items()}
            yield Prompt(PROMPTS[row], LENGTHS[row], keys[row * decoder.num_hyps + sample], **item)


def gathered(stream, num_rows):
    """Returns ids and log-probs of each prompt, all its pieces together."""
    ids, logprobs, done = ([[] for _ in range(num_rows)] for _ in range(3))
    for new in stream:
        assert not done[new.index], "tokens after the end"
        ids[new.index] += new.ids.tolist()
        logprobs[new.index] += new.logprobs.tolist()
        done[new.index] += [True] * new.done
    assert all(map(bool, done))
    return ids, logprobs


DECODERS = {
    "greedy": Greedy(max_decode_steps=M, eos_id=EOS),
    "sample": Sample(
        max_decode_steps=M, eos_id=EOS, k=5, temperature=1.3, num_samples=2, sort_samples=False
    ),
    "penalties": Sample(
        max_decode_steps=M, eos_id=EOS, k=0, p=0.9, repetition_penalty=1.7, presence_penalty=0.4
    ),
    "short and stepwise": Greedy(max_decode_steps=M, eos_id=EOS, seqlen=11, fprop_for_prefix=False),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "greedy")) for name in DECODERS],
)
def test_a_prompt_gets_the_tokens_that_a_batch_gives_it(name):
    decoder = DECODERS[name]
    run = jax.jit(lambda ids, lengths, keys: decoder(RECURRENT, ids, lengths, keys))
    expected = jax.device_get(run(PROMPTS, LENGTHS, row_keys(NUM_PROMPTS)))
    num_rows = NUM_PROMPTS * decoder.num_hyps
    batching = batching_of(RECURRENT, decoder)
    ids, logprobs = gathered(batching.stream(None, queue(decoder)), num_rows)
    lengths = expected["decode_lengths"].reshape(-1)
    assert len(set(lengths)) > 2, "all rows are of one length"
    for row in range(num_rows):
        sequence = expected["output_ids"].reshape(num_rows, M)[row, : lengths[row]]
        np.testing.assert_array_equal(ids[row], sequence)
        np.testing.assert_allclose(
            logprobs[row], expected["logprobs"].reshape(num_rows, M)[row, : lengths[row]], atol=1e-5
        )


def test_whatever_comes_later_compiles_nothing():
    batching, num_rows = batching_of(RECURRENT, DECODERS["sample"]), 2 * NUM_PROMPTS
    gathered(batching.stream(None, queue(DECODERS["sample"])), num_rows)
    before = num_compiled()
    for steps in (None, 1, 3):
        gathered(batching.stream(None, queue(DECODERS["sample"]), num_steps=steps), num_rows)
    assert num_compiled() == before


def test_prompts_that_enter_at_once_go_through_the_model_together():
    batching = batching_of(RECURRENT, DECODERS["greedy"])
    ids, _ = gathered(batching.stream(None, queue(DECODERS["greedy"])), NUM_PROMPTS)
    rows = batching.rows(None)
    prompts = list(queue(DECODERS["greedy"]))
    left = rows.submit(prompts[0])
    rows.cancel(left)  # It has not entered yet, and never does.
    for prompt in prompts[:NUM_ROWS]:
        rows.submit(prompt)
    actual = {new.index - 1: new.ids.tolist() for new in rows.advance(M)}
    assert actual == dict(enumerate(ids[:NUM_ROWS]))
    assert (rows.num_passes, rows.num_prefills) == (2, NUM_ROWS + 1)  # 4 of them, and 1.
    # Each number compiles; of long prompts fewer take the memory of as many tokens.
    many = ContinuousBatching(DECODERS["greedy"], lambda mdl_vars: RECURRENT, 70, P)
    assert [many.sizes(length) for length in (4, 256, 2048)] == [[64, 16, 4, 1], [4, 1], [1]]


def test_the_state_is_donated():
    batching = batching_of(RECURRENT, DECODERS["greedy"])
    state = batching.empty(None)
    new = batching.insert(None, state, [1], [next(queue(DECODERS["greedy"]))])
    # But for the scalar that all rows share, which nothing reads.
    assert all(x.is_deleted() for x in jax.tree.leaves(state) if x.ndim)
    batching.advance(None, new, 2, False, set(range(NUM_ROWS)))
    assert all(x.is_deleted() for x in jax.tree.leaves(new))


def steps_of_rows(lengths, num_rows):
    """Returns when the last sequence ends, if each goes to the row that is free first."""
    free_at = [0] * num_rows
    for length in lengths:
        heapq.heapreplace(free_at, free_at[0] + length)
    return max(free_at)


def test_skewed_lengths_take_the_steps_of_list_scheduling_and_fewer_than_batches():
    decoder = DECODERS["greedy"]
    batching = batching_of(COUNTDOWN, decoder)
    ids, _ = gathered(batching.stream(None, queue(decoder)), NUM_PROMPTS)
    expected = np.minimum(PROMPTS[np.arange(NUM_PROMPTS), LENGTHS - 1], M)
    assert [len(row) for row in ids] == expected.tolist()
    of_batches = sum(expected[i : i + NUM_ROWS].max() for i in range(0, NUM_PROMPTS, NUM_ROWS))
    assert batching.latest.num_steps == steps_of_rows(expected, NUM_ROWS)
    assert batching.latest.num_steps < of_batches
    assert batching.latest.num_prefills == NUM_PROMPTS


def test_tokens_come_in_pieces_of_at_most_so_many_steps():
    decoder = DECODERS["greedy"]
    batching = batching_of(COUNTDOWN, decoder)
    pieces = list(batching.stream(None, queue(decoder), num_steps=4))
    assert max(len(piece.ids) for piece in pieces) == 4
    whole, _ = gathered(pieces, NUM_PROMPTS)
    expected, _ = gathered(batching.stream(None, queue(decoder)), NUM_PROMPTS)
    assert whole == expected
    # As they come: prompts do not wait for each other.
    first_done = next(i for i, piece in enumerate(pieces) if piece.done)
    assert any(piece.index > pieces[first_done].index for piece in pieces[first_done:])


class StopsAfter:
    """Stands for a text that has a stop string after a number of tokens."""

    def __init__(self, num_tokens):
        self.num_left = num_tokens

    def push(self, token):
        self.num_left -= 1

    @property
    def is_stopped(self):
        return self.num_left <= 0


def test_a_prompt_that_is_told_to_stop_leaves_its_row_to_the_next():
    decoder = DECODERS["greedy"]
    batching = batching_of(COUNTDOWN, decoder)

    numbers = itertools.count()
    stream = batching.stream(
        None,
        queue(decoder),
        num_steps=1,
        text_of=lambda prompt: StopsAfter(M if next(numbers) % 2 else 3),
    )
    ids, _ = gathered(stream, NUM_PROMPTS)
    expected = np.minimum(PROMPTS[np.arange(NUM_PROMPTS), LENGTHS - 1], M)
    expected[::2] = np.minimum(expected[::2], 3)
    assert [len(row) for row in ids] == expected.tolist()
    assert batching.latest.num_steps == steps_of_rows(expected, NUM_ROWS)


def test_a_stopped_row_keeps_no_step_going():
    batching, key = batching_of(COUNTDOWN, DECODERS["greedy"]), row_keys(1)[0]
    prompts = [Prompt(np.asarray([token, 9, 9, 9]), 1, key) for token in (20, 6)]
    stream = batching.stream(
        None,
        prompts,
        num_steps=4,
        text_of=lambda prompt: StopsAfter(1 if prompt is prompts[0] else M),
    )
    ids, _ = gathered(stream, 2)
    assert [len(row) for row in ids] == [4, 6]
    assert batching.latest.num_steps == 6


def test_each_prompt_has_its_own_temperature_and_limit():
    decoder = Sample(max_decode_steps=M, eos_id=EOS, k=0)
    temperature = np.linspace(0, 2, NUM_PROMPTS).astype(np.float32)
    limits = RNG.integers(0, M, NUM_PROMPTS).astype(np.int32)
    settings = {"temperature": temperature, "per_example_max_decode_steps": limits}
    run = jax.jit(lambda ids, lengths, keys: decoder(RECURRENT, ids, lengths, keys, **settings))
    expected = jax.device_get(run(PROMPTS, LENGTHS, row_keys(NUM_PROMPTS)))
    ids, _ = gathered(
        batching_of(RECURRENT, decoder).stream(None, queue(decoder, **settings)), NUM_PROMPTS
    )
    for row, actual in enumerate(ids):
        length = expected["decode_lengths"][row, 0]
        assert length <= limits[row]
        np.testing.assert_array_equal(actual, expected["output_ids"][row, 0, :length])


def test_a_prompt_that_is_not_padded_is_an_error():
    batching = batching_of(COUNTDOWN, DECODERS["greedy"])
    with pytest.raises(ConfigError, match=r"ids.*\(3,\).*\(4,\)"):
        next(batching.stream(None, [Prompt(np.asarray([1, 2, 3]), 3, row_keys(1)[0])]))


def test_beams_cannot_be_batched_continuously():
    with pytest.raises(ConfigError, match="BeamSearch"):
        batching_of(RECURRENT, BeamSearch(eos_id=EOS))
