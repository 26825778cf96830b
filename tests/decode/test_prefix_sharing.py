"""Prompts that begin alike give the tokens that they give without sharing, from fewer reads."""

import dataclasses
import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite import ConfigError, layers
from praxis_lite.core import Learner, MeshConfig, Partitioner, make_mesh
from praxis_lite.decode import Greedy, Sample
from praxis_lite.decode.continuous_batching import ContinuousBatching, Prompt
from praxis_lite.decode.prefix_sharing import PrefixCache, block_size, common_prefix_length
from praxis_lite.tasks.language_model import LanguageModelTask
from tests.decode.toy_models import Recurrent, Summing, num_compiled, row_keys
from tests.support.lm_runs import drawn_weights
from tests.support.marks import slow_but, slow_or_nightly

V, P, M = 13, 23, 7
RNG = np.random.default_rng(8)
LENGTHS = np.asarray([17, 23, 0, 19, 14], np.int32)
PROMPTS = RNG.integers(0, V, (len(LENGTHS), P)).astype(np.int32)
PROMPTS[[0, 1, 3, 4], :13] = PROMPTS[0, :13]
MODELS = {"attention": Summing(V, seed=1), "recurrent": Recurrent(V, seed=1)}
DECODER = Sample(max_decode_steps=M, eos_id=3, num_samples=2, k=0, temperature=0.5)
GREEDY = Greedy(max_decode_steps=M, eos_id=(), prefill_chunk_size=5)
# Passes of five tokens, of which two are shared.
SHARING = dataclasses.replace(DECODER, num_cached_prefixes=3, prefill_chunk_size=5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_batch_reads_once_what_all_its_prompts_begin_with(name):
    model, outputs = MODELS[name], {}
    for decoder in (DECODER, SHARING):
        run = jax.jit(functools.partial(decoder, model))
        outputs[decoder] = jax.device_get(run(PROMPTS, LENGTHS, row_keys(len(LENGTHS))))
    expected, actual = outputs[DECODER], outputs[SHARING]
    for output, x in expected.items():
        np.testing.assert_allclose(actual[output], x, atol=1e-4, err_msg=output)
    np.testing.assert_array_equal(actual["num_shared"], 10 * (LENGTHS > 0)[:, None].repeat(2, 1))


@pytest.mark.parametrize("name", slow_but({"recurrent"}, MODELS))
def test_a_continuous_batch_reads_a_beginning_once_from_its_second_prompt_on(name):
    model = MODELS[name]
    # Thirteen tokens are equal, so two blocks of five.
    order, num_read = [0, 1, 3, 4, 1], [17, 23, 19 - 10, 14 - 10, 23 - 10]
    prompts = [
        Prompt(PROMPTS[row], LENGTHS[row], key)
        for row, key in zip(order, row_keys(len(order)), strict=True)
    ]
    tokens, batchings = [], []
    for decoder in (DECODER, SHARING):
        decoder = dataclasses.replace(decoder, num_samples=1)
        batching = ContinuousBatching(decoder, lambda mdl_vars: model, 2, P)
        ids, logprobs = [[] for _ in order], [[] for _ in order]
        for new in batching.stream(None, prompts, num_steps=2):
            ids[new.index] += new.ids.tolist()
            logprobs[new.index] += new.logprobs.tolist()
        tokens.append((ids, logprobs))
        batchings.append(batching)
    expected, actual = tokens
    assert actual[0] == expected[0]
    for a, b in zip(actual[1], expected[1], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    plain, sharing = (batching.latest for batching in batchings)
    assert plain.num_read_tokens == plain.num_prompt_tokens == sharing.num_prompt_tokens
    # The last shares four blocks with the second: two were kept, two are read to be kept.
    assert sharing.num_read_tokens == sum(num_read)


ATTENTION = fdl.Partial(
    layers.DotProductAttention, use_rotary_position_emb=True, internal_enable_per_dim_scale=False
)
BLOCKS = {
    # A ring of 5 + 16 places, fewer than a row has.
    "windows": [
        fdl.Partial(layers.Transformer, tr_atten_tpl=fdl.copy_with(ATTENTION, window=window))
        for window in (5, None)
    ],
    "recurrent": [
        fdl.Partial(layers.Transformer, tr_atten_tpl=layers.RgLruBlock),
        fdl.Partial(layers.Transformer, tr_atten_tpl=ATTENTION),
    ],
}


@pytest.mark.parametrize("name", slow_or_nightly((), {"windows"}, BLOCKS))
def test_transformers_with_windows_or_states_share_on_a_mesh_too(name):
    lm = fdl.Partial(
        layers.TransformerLm,
        V,
        12,
        17,
        num_heads=2,
        num_layers=2,
        dim_per_head=4,
        position_emb_tpl=None,
        transformer_layer_tpl=BLOCKS[name],
    )
    batch = {
        "ids": PROMPTS,
        "prefix_lengths": np.maximum(LENGTHS, 1),
        "weights": (LENGTHS > 0).astype(np.float32),
    }
    prompts = [
        Prompt(PROMPTS[row], LENGTHS[row], row_keys(1)[0]) for row in np.flatnonzero(LENGTHS)
    ]
    results = []
    for num in (0, 3):
        decoder = dataclasses.replace(GREEDY, num_cached_prefixes=num)
        task = LanguageModelTask(fdl.build(lm), Learner(optax.sgd, 0.1), decoder=decoder)
        partitioner = Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=(1, 3, 2))))
        weights = partitioner.for_decoding(drawn_weights(partitioner))
        inputs = partitioner.global_batch(batch)
        outputs = partitioner.decode_step(weights, inputs, partitioner.key(0))
        wrap = functools.partial(partitioner.with_mdl_vars, has_splits=True)
        batching = ContinuousBatching(decoder, task.module, 3, P, wrap=wrap)
        rows, compiled = [[] for _ in prompts], []
        for new in batching.stream(weights, [*prompts, *prompts], num_steps=2):
            rows[new.index % 4] += new.ids.tolist()
            compiled.append(num_compiled())
        assert compiled[-1] == compiled[len(compiled) // 2]
        results.append((jax.device_get(outputs)["output_ids"][:, 0], rows))
    (expected, _), (actual, rows) = results
    np.testing.assert_array_equal(actual, expected)
    records = task.decode_to_records(batch, jax.device_get(outputs))
    assert [record["shared_length"] for record in records] == [10] * 4
    for row, index in enumerate((0, 1, 3, 4)):
        assert rows[row] == 2 * expected[index].tolist()
    # First as above; then each prompt shares with itself: 15, 20, 15 and 10 tokens, of which 10
    # were kept.
    assert batching.latest.num_read_tokens == (17 + 23 + 9 + 4) + (7 + 13 + 9 + 4)


def test_prefixes_are_cached_at_the_second_prompt_and_the_least_recently_used_is_dropped():
    reads = []

    def read(cache, ids, start, end):
        assert cache == tuple(ids[:start].tolist())
        reads.append((start, end))
        return tuple(ids[:end].tolist())

    def longest(text):
        ids = np.asarray([*map(ord, text), *[9] * (12 - len(text))], np.int32)
        cache, start = prefixes.longest(ids, len(text))
        assert cache == tuple(ids[:start].tolist()), "the tokens in the cache are not the prompt's"
        return text[:start]

    prefixes = PrefixCache(2, 3, (), read)
    assert longest("abcdefgh") == ""
    assert longest("abcdexgh") == "abc"  # Five tokens are equal, in blocks of three.
    assert longest("abcdefxy") == "abcdef"
    assert longest("abcdef") == "abc"  # One token is left to read.
    assert reads == [(0, 3), (3, 6)]
    assert longest("uvwxyz") == ""
    assert longest("uvwx") == "uvw"  # Drops "abcdef", because "abc" was used later.
    assert reads == [(0, 3), (3, 6), (0, 3)]
    assert longest("abcd") == "abc" and longest("uvwabc") == "uvw" and len(reads) == 3
    assert longest("abcdefgh") == "abcdef" and reads[3:] == [(3, 6)]
    assert prefixes.num_read == 3 + 3 + 3 + 3


@pytest.mark.parametrize(
    "max_decode_steps, chunk, expected",
    [
        (64, None, 32),
        (20, None, 29),
        (1, None, 26),
        (64, 16, 16),
        (128, 128, 128),
    ],
)
def test_no_block_ends_behind_the_cache(max_decode_steps, chunk, expected):
    decoder = Greedy(max_decode_steps=max_decode_steps, prefill_chunk_size=chunk)
    size = block_size(decoder, 129)
    assert size == expected and -(-129 // size) * size <= 129 + max_decode_steps


def test_settings_that_do_not_go_together_are_refused():
    with pytest.raises(ConfigError, match="num_cached_prefixes=2 .*length 131.*multiple of 64"):
        block_size(Greedy(seqlen=131, num_cached_prefixes=2), 131)
    with pytest.raises(ConfigError, match="num_cached_prefixes.*2.*fprop_for_prefix=False"):
        Greedy(num_cached_prefixes=2, fprop_for_prefix=False)


def test_what_a_batch_begins_with_leaves_each_prompt_a_token():
    ids = jnp.asarray([[1, 2, 3, 4], [1, 2, 3, 9], [7, 7, 7, 7], [1, 2, 3, 4]])
    run = jax.jit(common_prefix_length)
    for lengths, expected in (
        ([4, 4, 0, 4], 3),
        ([4, 3, 0, 4], 2),
        ([4, 4, 1, 4], 0),
        ([0, 0, 4, 0], 3),
        ([0] * 4, 0),
    ):
        assert run(ids, jnp.asarray(lengths)) == expected
