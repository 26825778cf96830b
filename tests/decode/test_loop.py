"""Cached decoding is what the uncached model says, for ragged prompts, alone, batched, sharded."""

import functools
import re

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite.decode import Sampling, decode_tokens
from praxis_lite.errors import ConfigError
from praxis_lite.layers import TransformerLm, set_sharding_params
from praxis_lite.learner import Learner
from praxis_lite.models import NnxModel
from praxis_lite.partitioner import Partitioner
from tasks.language_model import LanguageModelTask

V, P, M = 29, 5, 6  # Classes, longest prompt, most new tokens.
NEVER = V  # No token: a row never ends by itself.
LENGTHS = np.asarray([5, 2, 0, 1, 4], np.int32)
PROMPTS = np.where(
    np.arange(P) < LENGTHS[:, None],
    np.random.default_rng(12).integers(1, V, (len(LENGTHS), P)),
    7,  # What stands in the padding must not matter.
).astype(np.int32)
POSITIONS = {"rotary": {}, "learned": {"max_seq_length": P + M}}


def lm_config(positions: str) -> fdl.Buildable:
    lm = fdl.Partial(
        TransformerLm, V, 12, 17, num_heads=3, num_layers=2, dim_per_head=4, **POSITIONS[positions]
    )
    return set_sharding_params(lm)


@functools.cache
def model_and_vars(positions: str):
    model = NnxModel(fdl.build(lm_config(positions)))
    rng = np.random.default_rng(13)
    mdl_vars = jax.tree.map(
        lambda w: rng.normal(scale=0.5, size=w.shape).astype(np.float32),
        jax.eval_shape(model.init, jax.random.key(0)),
    )
    return model, mdl_vars


@functools.cache
def decoder(positions: str, eos_id: int, sampling: Sampling):
    model, mdl_vars = model_and_vars(positions)

    @jax.jit
    def run(mdl_vars, ids, lengths, key):
        return decode_tokens(
            model.module(mdl_vars), ids, lengths, key, sampling=sampling, max_decode_steps=M,
            eos_id=eos_id,
        )

    def decode(ids, lengths, key=None):
        key = jax.random.key(0) if key is None else key
        return jax.device_get(run(mdl_vars, ids, lengths, key))

    return decode


@functools.cache
def uncached(positions: str):
    model, mdl_vars = model_and_vars(positions)
    run = jax.jit(lambda v, ids: model.module(v)(ids)[0])
    return lambda ids: np.asarray(run(mdl_vars, ids))


@pytest.mark.parametrize("positions", POSITIONS)
def test_cached_logits_equal_the_uncached_ones_at_every_position(positions):
    """Teacher-forced: rows of different lengths go on, each from its own position."""
    model, mdl_vars = model_and_vars(positions)
    ids = np.random.default_rng(14).integers(0, V, (len(LENGTHS), P + M), dtype=np.int32)
    starts = np.maximum(LENGTHS, 1)
    wanted = uncached(positions)(ids)

    @jax.jit
    def prefill(mdl_vars, ids):
        module = model.module(mdl_vars)
        return module(ids, cache=module.init_cache(len(LENGTHS), P + M))

    @jax.jit
    def step(mdl_vars, ids, positions, cache):
        return model.module(mdl_vars)(ids, positions=positions, cache=cache)

    logits, cache = prefill(mdl_vars, ids[:, :P])
    np.testing.assert_allclose(logits, wanted[:, :P], atol=2e-5)
    rows = np.arange(len(LENGTHS))
    for t in range(M):
        now = starts + t
        logits, cache = step(mdl_vars, ids[rows, now][:, None], now[:, None], cache)
        np.testing.assert_allclose(logits[:, 0], wanted[rows, now], atol=2e-5)


def continue_alone(positions: str, prompt: np.ndarray) -> tuple[list[int], float]:
    """Returns the greedy continuation and its log-probability: a whole forward pass per token."""
    ids, log_prob = list(prompt), 0.0
    for _ in range(M):
        padded = np.zeros((1, P + M), np.int32)  # Causal: what comes later is not seen.
        padded[0, : len(ids)] = ids
        logits = uncached(positions)(padded)[0, len(ids) - 1].astype(np.float64)
        log_prob += logits.max() - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :], log_prob


@pytest.mark.parametrize("positions", POSITIONS)
def test_ragged_prompts_in_one_batch_go_on_as_each_would_alone(positions):
    found = decoder(positions, NEVER, Sampling())(PROMPTS, LENGTHS)
    for row in np.flatnonzero(LENGTHS):
        ids, log_prob = continue_alone(positions, PROMPTS[row, : LENGTHS[row]])
        np.testing.assert_array_equal(found["output_ids"][row], ids)
        np.testing.assert_allclose(found["log_probs"][row], log_prob, rtol=1e-4)
        assert found["decode_lengths"][row] == M


def test_a_row_of_length_zero_stays_empty():
    found = decoder("rotary", NEVER, Sampling())(PROMPTS, LENGTHS)
    empty = list(LENGTHS).index(0)
    assert not found["output_ids"][empty].any()
    assert found["decode_lengths"][empty] == 0 and found["log_probs"][empty] == 0


def test_a_row_stops_at_the_end_of_text_with_zeros_after_it():
    whole = decoder("rotary", NEVER, Sampling())(PROMPTS, LENGTHS)
    eos_id = int(whole["output_ids"][0, 2])
    found = decoder("rotary", eos_id, Sampling())(PROMPTS, LENGTHS)
    for row in np.flatnonzero(LENGTHS):
        ids = whole["output_ids"][row].tolist()
        length = ids.index(eos_id) + 1 if eos_id in ids else M
        assert found["decode_lengths"][row] == length
        np.testing.assert_array_equal(
            found["output_ids"][row], ids[:length] + [0] * (M - length)
        )
    assert found["decode_lengths"][0] <= 3 and (found["decode_lengths"] == M).any()
    assert (found["log_probs"] >= whole["log_probs"] - 1e-6).all()


class Counter:
    """A model whose next token is the last plus one; it counts how often it was asked."""

    def init_cache(self, num_rows, length):
        return {"num_calls": jnp.zeros((), jnp.int32)}

    def __call__(self, ids, positions=None, *, cache):
        jax.debug.callback(lambda calls: self.calls.append(int(calls)), cache["num_calls"])
        return 9.0 * jax.nn.one_hot(ids + 1, 13), {"num_calls": cache["num_calls"] + 1}

    def __init__(self):
        self.calls = []


def test_the_loop_ends_when_every_row_has_ended():
    model = Counter()
    ids = jnp.asarray([[3, 4], [5, 0]])
    found = decode_tokens(
        model, ids, jnp.asarray([2, 1]), jax.random.key(0), sampling=Sampling(),
        max_decode_steps=7, eos_id=7,
    )
    np.testing.assert_array_equal(found["output_ids"][:, :4], [[5, 6, 7, 0], [6, 7, 0, 0]])
    jax.effects_barrier()
    assert max(model.calls) == 3  # The prefill and three tokens, not seven.


def test_sampled_continuations_depend_on_the_key_and_each_step_draws_anew():
    decode = decoder("rotary", NEVER, Sampling(temperature=30.0))
    first, same, other = (
        decode(PROMPTS, LENGTHS, jax.random.key(seed))["output_ids"] for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, same)
    assert (first != other).any()
    # Nearly uniform over 29 tokens: six equal draws in a row would mean one key for all steps.
    assert all(len(set(row)) > 2 for row in first[LENGTHS > 0])


def lm_task(positions: str, **options) -> LanguageModelTask:
    return LanguageModelTask(
        fdl.build(lm_config(positions)), Learner(optax.sgd, 0.1), max_decode_steps=M, **options
    )


BATCH = {
    "ids": PROMPTS,
    "prefix_lengths": np.where(LENGTHS == 0, 3, LENGTHS),
    "weights": (LENGTHS > 0).astype(np.float32),
}


@pytest.fixture(scope="module")
def sharded():
    """Returns outputs and the program of the compiled decode step, by mesh."""
    from praxis_lite.sharding import MeshConfig, make_mesh

    @functools.cache
    def run(*shape):
        task = lm_task("learned", inputs_split_mapping={
            "map_1d": (("replica", "data"),), "map_2d": (("replica", "data"), None)})
        task.tokenizer.eos_id = NEVER
        partitioner = Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=shape)))
        layout = partitioner.layout.select("mdl_vars")
        mdl_vars = jax.jit(layout.pad, out_shardings=layout.shardings(partitioner.mesh))(
            model_and_vars("learned")[1]
        )
        spec = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in BATCH.items()}
        compiled = partitioner.lower("decode", spec).compile()
        outputs = compiled(mdl_vars, partitioner.global_batch(BATCH), partitioner.key(0))
        return jax.device_get(outputs), compiled.as_text()

    return run


@pytest.mark.parametrize("shape", [(1, 4, 2), (1, 3, 2)], ids=str)
def test_sharded_decoding_equals_unsharded_with_heads_and_rows_that_do_not_divide(sharded, shape):
    found = sharded(*shape)[0]
    wanted = decoder("learned", NEVER, Sampling())(PROMPTS, LENGTHS)
    np.testing.assert_array_equal(found["output_ids"], wanted["output_ids"])
    np.testing.assert_array_equal(found["decode_lengths"], wanted["decode_lengths"])
    np.testing.assert_allclose(found["log_probs"], wanted["log_probs"], rtol=1e-4)


@pytest.mark.parametrize("shape", [(1, 4, 2), (1, 3, 2)], ids=str)
def test_each_device_carries_its_share_of_the_cache(sharded, shape):
    program = sharded(*shape)[1]
    # [L, B, S, N, K]; two layers, rows over the data axis, 3 heads over 2 devices.
    whole = f"f32[2,{len(LENGTHS)},{P + M},3,4]"
    share = f"f32[2,{-(-len(LENGTHS) // shape[1])},{P + M},2,4]"
    loops = [line for line in program.splitlines() if re.search(r" while\(", line)]
    assert any(share in line for line in loops)
    assert not any(whole in line for line in loops)


def test_learned_positions_that_end_too_early_are_an_error_before_anything_compiles():
    task = lm_task("learned")
    spec = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in BATCH.items()}
    task.check_inputs(spec, task.required_decode_inputs, "decode_datasets.x")
    longer = {**spec, "ids": jax.ShapeDtypeStruct((5, P + 1), "int32")}
    message = rf"max_seq_length is {P + M}, but a sequence has up to {P + M + 1} tokens"
    with pytest.raises(ConfigError, match=message):
        task.check_inputs(longer, task.required_decode_inputs, "decode_datasets.x")
    too_long = jax.ShapeDtypeStruct((2, P + M + 1), "int32")
    training = dict.fromkeys(task.required_inputs, too_long)
    with pytest.raises(ConfigError, match=message):
        task.check_inputs(training, task.required_inputs, "datasets.x")
    lm_task("rotary").check_inputs(training, task.required_inputs, "datasets.x")


def test_the_loop_itself_refuses_to_run_past_learned_positions():
    model, mdl_vars = model_and_vars("learned")
    with pytest.raises(ConfigError, match="max_seq_length is 11, but .* up to 12"):
        jax.eval_shape(
            lambda v: decode_tokens(
                model.module(v), PROMPTS, LENGTHS, jax.random.key(0), sampling=Sampling(),
                max_decode_steps=M + 1, eos_id=NEVER,
            ),
            mdl_vars,
        )
