"""Cached decoding is what the uncached model says, for ragged prompts, alone, batched, sharded."""

import dataclasses
import functools
import re

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite import ConfigError
from praxis_lite.core import Learner, MeshConfig, NnxModel, Partitioner, make_mesh
from praxis_lite.decode import BeamSearch, Decoder, Greedy, Sample, cache_length
from praxis_lite.decode.continuous_batching import ContinuousBatching, Prompt
from praxis_lite.decode.loop import sample_keys
from praxis_lite.layers import TransformerLm, set_sharding_params
from praxis_lite.tasks.language_model import LanguageModelTask
from tests.decode.toy_models import num_compiled, row_keys

V, P, M = 29, 5, 6  # Classes, longest prompt, most new tokens.
NEVER = ()  # A row never ends by itself.
LENGTHS = np.asarray([5, 2, 0, 1, 4], np.int32)
PROMPTS = np.where(
    np.arange(P) < LENGTHS[:, None],
    np.random.default_rng(12).integers(1, V, (len(LENGTHS), P)),
    7,  # What stands in the padding must not matter.
).astype(np.int32)
POSITIONS = {
    "rotary": {"position_emb_tpl": None},
    "learned": {"max_seq_length": P + M},
}
GREEDY = Greedy(max_decode_steps=M, eos_id=NEVER)


def lm_config(positions: str) -> fdl.Buildable:
    lm = fdl.Partial(
        TransformerLm, V, 12, 17, num_heads=3, num_layers=2, dim_per_head=4, **POSITIONS[positions]
    )
    lm = set_sharding_params(lm)
    lm.transformer_layer_tpl.tr_atten_tpl.use_rotary_position_emb = positions == "rotary"
    return lm


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
def decoding(positions: str, decoder: Decoder):
    """Returns a compiled function from prompts and their lengths to outputs."""
    model, mdl_vars = model_and_vars(positions)

    @jax.jit
    def run(mdl_vars, ids, lengths, keys):
        return decoder(model.module(mdl_vars), ids, lengths, keys)

    return lambda ids, lengths, seed=0: jax.device_get(
        run(mdl_vars, ids, lengths, row_keys(len(ids), seed))
    )


@functools.cache
def uncached(positions: str):
    model, mdl_vars = model_and_vars(positions)
    run = jax.jit(lambda v, ids: model.module(v)(ids)[0])
    return lambda ids: np.asarray(run(mdl_vars, ids))


@pytest.mark.slow
@pytest.mark.parametrize("positions", POSITIONS)
def test_cached_logits_equal_the_uncached_ones_at_every_position(positions):
    """Teacher-forced: rows of different lengths go on, each from its own position."""
    model, mdl_vars = model_and_vars(positions)
    ids = np.random.default_rng(14).integers(0, V, (len(LENGTHS), P + M), dtype=np.int32)
    starts = np.maximum(LENGTHS, 1)
    expected = uncached(positions)(ids)

    @jax.jit
    def prefill(mdl_vars, ids):
        module = model.module(mdl_vars)
        is_padding = jnp.arange(P)[None, :] >= starts[:, None]
        cache = module.init_cache(len(LENGTHS), P + M)
        return module(ids, paddings=is_padding.astype(jnp.float32), cache=cache)

    @jax.jit
    def step(mdl_vars, ids, positions, cache):
        return model.module(mdl_vars)(ids, positions=positions, cache=cache)

    logits, cache = prefill(mdl_vars, ids[:, :P])
    for row, start in enumerate(starts):
        np.testing.assert_allclose(logits[row, :start], expected[row, :start], atol=2e-5)
    rows = np.arange(len(LENGTHS))
    for t in range(M):
        now = starts + t
        logits, cache = step(mdl_vars, ids[rows, now][:, None], now[:, None], cache)
        np.testing.assert_allclose(logits[:, 0], expected[rows, now], atol=2e-5)


def continue_alone(prompt: np.ndarray) -> tuple[list[int], float]:
    """Returns the greedy continuation and its log-probability: a whole forward pass per token."""
    ids, log_prob = list(prompt), 0.0
    for _ in range(M):
        padded = np.zeros((1, P + M), np.int32)  # Causal: what comes later is not seen.
        padded[0, : len(ids)] = ids
        logits = uncached("learned")(padded)[0, len(ids) - 1].astype(np.float64)
        log_prob += logits.max() - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :], log_prob


@pytest.mark.slow
def test_ragged_prompts_in_one_batch_go_on_as_each_would_alone():
    actual = decoding("learned", GREEDY)(PROMPTS, LENGTHS)
    for row in np.flatnonzero(LENGTHS):
        ids, log_prob = continue_alone(PROMPTS[row, : LENGTHS[row]])
        np.testing.assert_array_equal(actual["output_ids"][row, 0], ids)
        np.testing.assert_allclose(actual["scores"][row, 0], log_prob, rtol=1e-4)
        assert actual["decode_lengths"][row, 0] == M


OTHERS = {
    "greedy": GREEDY,
    "sample": Sample(max_decode_steps=M, eos_id=3, num_samples=3, k=0, temperature=2.0),
    "beam": BeamSearch(max_decode_steps=M, eos_id=3, beam_size=3),
}


class Counter:
    """A model whose next token is the last plus one; it counts how often it was asked."""

    def init_cache(self, num_rows, length):
        return {"num_calls": jnp.zeros((), jnp.int32)}

    def __call__(self, ids, *, positions=None, paddings=None, cache):
        jax.debug.callback(lambda calls: self.calls.append(int(calls)), cache["num_calls"])
        return 9.0 * jax.nn.one_hot(ids + 1, 13), {"num_calls": cache["num_calls"] + 1}

    def __init__(self):
        self.calls = []


def test_the_loop_ends_when_every_row_has_ended():
    model = Counter()
    ids = jnp.asarray([[3, 4], [5, 0]])
    decoder = Greedy(max_decode_steps=7, eos_id=7)
    actual = jax.jit(functools.partial(decoder, model))(ids, jnp.asarray([2, 1]), row_keys(2))
    np.testing.assert_array_equal(actual["output_ids"][:, 0, :4], [[5, 6, 7, 0], [6, 7, 0, 0]])
    jax.effects_barrier()
    assert max(model.calls) == 3  # The prefill and three tokens, not seven.


def lm_task(positions: str, **options) -> LanguageModelTask:
    return LanguageModelTask(
        fdl.build(lm_config(positions)), Learner(optax.sgd, 0.1), **{"decoder": GREEDY, **options}
    )


BATCH = {
    "ids": PROMPTS,
    "prefix_lengths": np.where(LENGTHS == 0, 3, LENGTHS),
    "weights": (LENGTHS > 0).astype(np.float32),
}


@functools.cache
def sharded(shape: tuple[int, ...], name: str):
    """Returns outputs and the program of the decode step on a mesh."""
    partitioner, mdl_vars = partitioner_and_vars(shape, OTHERS[name])
    spec = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in BATCH.items()}
    compiled = partitioner.decode_step.lower(spec).compile()
    weights = partitioner.for_decoding(mdl_vars)
    outputs = compiled(weights, partitioner.global_batch(BATCH), partitioner.key(0))
    return jax.device_get(outputs), compiled.as_text()


def partitioner_and_vars(shape: tuple[int, ...], decoder: Decoder):
    batch = ("replica", "data")
    task = lm_task(
        "learned",
        decoder=decoder,
        inputs_split_mapping={"map_1d": (batch,), "map_2d": (batch, None)},
    )
    partitioner = Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=shape)))
    layout = partitioner.layout.select("mdl_vars")
    pad = jax.jit(layout.pad, out_shardings=layout.shardings(partitioner.mesh))
    return partitioner, pad(model_and_vars("learned")[1])


def assert_same(actual, expected):
    np.testing.assert_array_equal(actual["output_ids"], expected["output_ids"])
    np.testing.assert_array_equal(actual["decode_lengths"], expected["decode_lengths"])
    for name in ("logprobs", "scores"):
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-4, atol=1e-5)


MESHES = [
    ((1, 3, 2), "greedy"),
    pytest.param((1, 4, 2), "sample", marks=pytest.mark.nightly),
    pytest.param((1, 4, 2), "beam", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("shape", "name"), MESHES, ids=str)
def test_sharded_decoding_equals_unsharded_with_heads_and_rows_that_do_not_divide(shape, name):
    assert_same(sharded(shape, name)[0], decoding("learned", OTHERS[name])(PROMPTS, LENGTHS))


@pytest.mark.slow
def test_continuous_batching_on_a_mesh_gives_what_one_device_gives():
    decoder = dataclasses.replace(OTHERS["sample"], num_cache_slots=4)
    partitioner, mdl_vars = partitioner_and_vars((1, 2, 3), decoder)
    wrap = functools.partial(partitioner.with_mdl_vars, has_splits=True)
    batching = ContinuousBatching(decoder, partitioner.task.model.module, 4, P, wrap=wrap)
    keys = sample_keys(row_keys(len(LENGTHS)), decoder.num_samples)
    rows = [(b, s) for b in np.flatnonzero(LENGTHS) for s in range(decoder.num_samples)]
    prompts = [Prompt(PROMPTS[b], LENGTHS[b], keys[3 * b + s]) for b, s in rows]
    actual, scores = [[] for _ in rows], [0.0 for _ in rows]
    compiled = []
    for new in batching.stream(mdl_vars, prompts, num_steps=2):
        actual[new.index] += new.ids.tolist()
        scores[new.index] += new.logprobs.sum()
        compiled.append(num_compiled())
    # All that there is to compile was by the time that the first tokens came.
    assert compiled[0] == compiled[-1]
    expected = decoding("learned", OTHERS["sample"])(PROMPTS, LENGTHS)
    # Of each prompt the likeliest sample is first.
    by_score = sorted(range(len(rows)), key=lambda n: (rows[n][0], -scores[n]))
    for (b, s), ids in zip(rows, [actual[n] for n in by_score], strict=True):
        assert ids == expected["output_ids"][b, s, : expected["decode_lengths"][b, s]].tolist()
    # From call to call too, rows are split over the data axis and heads over the other.
    cache = jax.tree.leaves(batching.empty(mdl_vars).cache)
    assert cache[0].shape == (2, 4, 3, P + M, 4)
    assert {x.sharding.shard_shape(x.shape) for x in cache} == {(2, 2, 1, P + M, 4)}


def test_each_device_carries_its_share_of_the_cache():
    program = sharded((1, 3, 2), "greedy")[1]
    # [B, N, S, K] of each layer; 5 rows over 3 devices, 3 heads over 2.
    whole, share = f"f32[5,3,{P + M},4]", f"f32[2,2,{P + M},4]"
    loops = [line for line in program.splitlines() if re.search(r" while\(", line)]
    assert any(share in line for line in loops)
    assert not any(whole in line for line in loops)


def test_learned_positions_that_end_too_early_are_an_error_before_anything_compiles():
    task = lm_task("learned")
    spec = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in BATCH.items()}
    task.check_inputs(spec, task.required_decode_inputs, "decode_datasets.x")
    longer = {**spec, "ids": jax.ShapeDtypeStruct((5, P + 1), "int32")}
    message = f"max_seq_length.*{P + M}.*{P + M + 1}"
    with pytest.raises(ConfigError, match=message):
        task.check_inputs(longer, task.required_decode_inputs, "decode_datasets.x")
    too_long = jax.ShapeDtypeStruct((2, P + M + 1), "int32")
    training = dict.fromkeys(task.required_inputs, too_long)
    with pytest.raises(ConfigError, match=message):
        task.check_inputs(training, task.required_inputs, "datasets.x")
    lm_task("rotary").check_inputs(training, task.required_inputs, "datasets.x")


def test_the_loop_itself_refuses_to_run_past_learned_positions():
    model, mdl_vars = model_and_vars("learned")
    with pytest.raises(ConfigError, match="max_seq_length.*11.*12"):
        jax.eval_shape(
            lambda v: Greedy(max_decode_steps=M + 1)(
                model.module(v), PROMPTS, LENGTHS, row_keys(len(LENGTHS))
            ),
            mdl_vars,
        )


@pytest.mark.parametrize("seqlen, expected", [(None, 11), (19, 11), (8, 8), (3, 5)])
def test_a_cache_holds_the_prompt_and_what_may_follow_within_seqlen(seqlen, expected):
    decoder = Greedy(max_decode_steps=6, seqlen=seqlen)
    assert cache_length(decoder, prompt_length=5) == expected
